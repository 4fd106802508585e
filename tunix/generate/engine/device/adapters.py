"""Several LoRA adapters in one batch, of different ranks, in one compiled program.

Every adaptable linear map has one pair of factors, A [in, R] and B [R, out], for all
adapters together. R is fixed. A loaded adapter of rank r owns r of the R columns, and a
row of the batch uses only the columns of its own adapter:

  low = x A;  low = 0 where the column's owner is not the row's adapter;  y += low B

Ranks therefore need no padding, a row without adapter adds exactly 0, and loading and
unloading change values only: no shape depends on the loaded adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tunix.generate.engine import adapter_sources
from tunix.generate.engine.adapter_sources import Source
from tunix.models.adapters import lora_modules
from tunix.models.transformer.dense.cpu_products import TransposedKernel
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.dense.quantized import QuantizedKernel
from tunix.models.transformer.model import Transformer
from tunix.utils import checks, mesh as mesh_lib

Pair = tuple[Any, Any]

_FREE = -1  # the owner of a free column; 0 is the number of a row without adapter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BankState:
  """The arrays of a bank, an argument of the compiled programs.

  Attributes:
    owner: number of the adapter that owns each column, int32 [R]; -1 for a free one.
    factors: A [in, R] and B [R, out] by the path of the module in an unstacked model. B
      includes the adapters' scales.
  """

  owner: Any
  factors: dict[str, Pair]


class BankParam(nnx.Param):
  """An array of the bank inside a module.

  It is a `Param`, because a call under Explicit mesh axes returns all other variables.
  """


class RowAdapters(nnx.Module):
  """The low-rank maps of one module, one for each row of the batch.

  Attributes:
    a, b: the factors [in, R] and [R, out].
    used: bool [B, R] or [B, T, R], True on the columns that a row uses.
  """

  def __init__(self, a: BankParam, b: BankParam, used: BankParam):
    self.a, self.b, self.used = a, b, used

  def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    with jax.named_scope("adapters"):
      low = jnp.einsum("...i,ir->...r", x, self.a[...].astype(x.dtype))
      *rows, ranks = self.used[...].shape
      used = self.used[...].reshape(*rows, *(1,) * (x.ndim - 1 - len(rows)), ranks)
      # `where` and not a product: a column of another adapter may overflow in this row,
      # and inf * 0 is NaN.
      low = jnp.where(used, low, 0)
      return jnp.einsum("...r,ro->...o", low, self.b[...].astype(x.dtype))


def with_bank(
  model: Transformer,
  state: BankState | None,
  rows: Int[Array, " B"] | Int[Array, "B T"],
) -> Transformer:
  """Returns a copy of the model in which each row uses its adapter.

  Call it inside the traced function, because the copy holds the traced arrays.

  Args:
    model: the model. It is unchanged and shares its arrays. A stacked model is
      unstacked, which copies its weights, so call `decode.opened` before.
    state: `AdapterBank.state`; None returns the model itself.
    rows: number of the adapter of each row or token, see `AdapterBank.index`; 0 for
      none.
  """
  if state is None:
    return model
  out = nnx.clone(model).unstack()
  linears = lora_modules.linears(out)
  used = BankParam(rows[..., None] == state.owner)
  for path, (a, b) in state.factors.items():
    linears[path].added = nnx.data(RowAdapters(BankParam(a), BankParam(b), used))
  return out


class _Place(NamedTuple):
  """A module that the bank has factors for: the shapes and shardings of A and B."""

  shapes: Pair
  shardings: Pair


class AdapterBank:
  """The loaded adapters of a model.

  Args:
    model: the model that runs, after `decode.opened`, because the factors follow the
      shardings of its kernels. Its arrays are not kept. It may have adapters or
      quantized kernels of its own; they stay part of the base. A model of shapes gives
      a `state` of shapes.
    ranks: R, the largest sum of the ranks of all loaded adapters; 0 for none.
    dtype: dtype of the factors; None for the model's compute dtype.

  Attributes:
    ranks: R.
    state: the arrays to pass to the compiled programs; None if `ranks` is 0. Loading
      and unloading replace it and leave the old arrays valid.
  """

  def __init__(
    self, model: Transformer, ranks: int = 64, *, dtype: DTypeLike | None = None
  ):
    checks.number("adapter_ranks", ranks, checks.NOT_NEGATIVE, whole=True)
    self.ranks = ranks
    self.state: BankState | None = None
    self._owner = np.full(ranks, _FREE, np.int32)
    self._numbers: dict[str, int] = {}
    self._last = 0
    if not ranks:
      return
    if not isinstance(model, Transformer):
      raise TypeError(
        f"the model is {checks.type_of(model)}; expected a decoder of this package. "
        "Set adapter_ranks=0 for another model"
      )
    self._config = model.config
    self._dtype = jnp.dtype(model.config.dtype if dtype is None else dtype)
    self._places = dict(_places(model, ranks))
    # The sharding of `owner`, on the mesh of the factors.
    self._replicated = next(iter(self._places.values())).shardings[0]
    if isinstance(self._replicated, NamedSharding):
      self._replicated = NamedSharding(self._replicated.mesh, PartitionSpec())
    leaves = jax.tree.leaves(nnx.state(model))
    self.state = self._empty(any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves))

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the loaded adapters in the order of loading."""
    return tuple(self._numbers)

  def index(self, name: str | None) -> int:
    """Returns the number of a loaded adapter, for `rows` of `with_bank`.

    A number is never used twice. An adapter that is loaded again under its old name
    gets a new number, so the number can be part of the key of cached pages.

    Args:
      name: a loaded adapter. None has the number 0: no adapter.

    Raises:
      ValueError: no adapter of this name is loaded; the message lists the loaded ones.
    """
    if name is None:
      return 0
    if name not in self._numbers:
      loaded = ", ".join(map(repr, self._numbers)) or "none"
      raise ValueError(
        f"adapter {name!r} is not loaded; expected one of the loaded ones: {loaded}. "
        "Load it first"
      )
    return self._numbers[name]

  def load(self, name: str, source: Source) -> None:
    """Loads an adapter. If an error is raised, the bank is unchanged.

    The factors of all modules are copied on the devices, one module after the other.

    Args:
      name: a new name.
      source: a folder that `save_adapter` or PEFT wrote, a model with adapters, or
        adapters by the path of their module in a stacked or unstacked model.

    Raises:
      FileNotFoundError: the folder or one of its two files does not exist.
      ValueError: the name is empty or in use, too few columns are free, the adapter
        adapts a module that the bank has no factors for or has other shapes, or see
        `adapter_sources.read`.
    """
    self._check_name(name)
    pairs = adapter_sources.read(name, source, self._config, self._dtype)
    for path, pair in pairs.items():
      self._check_fits(name, path, *pair)
    columns = self._free(name, max(a.shape[-1] for a, _ in pairs.values()))
    factors = self._written(pairs, columns)
    self._last += 1
    self._numbers[name] = self._last
    self._own(columns, self._last, factors)

  def unload(self, name: str) -> None:
    """Frees the columns of an adapter. Rows with its number add 0 from now on.

    Raises:
      ValueError: no adapter of this name is loaded.
    """
    number = self.index(name)
    if self.state is None or not number:
      raise ValueError(f"adapter name is {name!r}; expected the name of a loaded one")
    del self._numbers[name]
    # The values stay, because `load` overwrites its columns in every module.
    columns = np.flatnonzero(self._owner == number)
    self._own(columns, _FREE, self.state.factors)

  def _empty(self, shapes_only: bool) -> BankState:
    def make(shape: tuple[int, ...], fill: int, dtype: DTypeLike, where: object) -> Any:
      if shapes_only:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
      return jnp.full(shape, fill, dtype, device=where)

    factors = {
      path: tuple(make(s, 0, self._dtype, at) for s, at in zip(*place))
      for path, place in self._places.items()
    }
    owner = make((self.ranks,), _FREE, jnp.int32, self._replicated)
    return BankState(owner=owner, factors=factors)

  def _check_name(self, name: str) -> None:
    if not isinstance(name, str) or not name:
      raise ValueError(f"adapter name is {name!r}; expected a text. Give it a name")
    if not self.ranks:
      raise ValueError(
        f"adapter_ranks is 0; expected at least the rank of adapter {name!r}. Set it "
        "to the sum of the ranks of all adapters"
      )
    if name in self._numbers:
      raise ValueError(
        f"adapter {name!r} is loaded already; expected a new name. Unload it first"
      )

  def _check_fits(self, name: str, path: str, a: np.ndarray, b: np.ndarray) -> None:
    if path not in self._places:
      names = ", ".join(dict.fromkeys(x.split(".", 2)[2] for x in self._places))
      raise ValueError(
        f"adapter {name!r} adapts {path}; expected only {names} of the model's layers, "
        "because the engine adapts no experts, routers and vision towers. Merge the "
        "adapter and run the merged model"
      )
    (rows, _), (_, outputs) = self._places[path].shapes
    rank = a.shape[-1]
    if (a.shape, b.shape) != ((rows, rank), (rank, outputs)):
      raise ValueError(
        f"adapter {name!r}: A and B of {path} have shapes {a.shape} and {b.shape}; "
        f"expected {(rows, rank)} and {(rank, outputs)}. Load an adapter of this model"
      )

  def _free(self, name: str, rank: int) -> np.ndarray:
    """Returns free columns for an adapter; they need not be neighbors."""
    free = np.flatnonzero(self._owner == _FREE)
    if free.size >= rank:
      return free[:rank]
    loaded = ", ".join(
      f"{other!r}: {np.count_nonzero(self._owner == number)}"
      for other, number in self._numbers.items()
    )
    raise ValueError(
      f"adapter {name!r} has rank {rank}; expected at most {free.size}, the free ones "
      f"of adapter_ranks={self.ranks} (loaded: {loaded or 'none'}). Unload an adapter, "
      f"or set adapter_ranks to at least {self.ranks - free.size + rank}"
    )

  def _written(self, pairs: Mapping[str, Pair], columns: np.ndarray) -> dict[str, Pair]:
    """Returns the factors with new columns; they are 0 where the adapter has none."""
    assert self.state is not None
    # Widths are powers of two, so that few programs write all ranks. An index beyond
    # the last column is dropped.
    width = 1 << (len(columns) - 1).bit_length()
    index = np.full(width, self.ranks, np.int32)
    index[: len(columns)] = columns
    out = {}
    for path, (shapes, where) in self._places.items():
      a = np.zeros((shapes[0][0], width), self._dtype)
      b = np.zeros((width, shapes[1][1]), self._dtype)
      if path in pairs:
        new_a, new_b = pairs[path]
        a[:, : new_a.shape[1]], b[: new_b.shape[0]] = new_a, new_b
      parts = (mesh_lib.put(x, at) for x, at in zip((a, b), where))
      # The shardings must stay the same, or the engine's programs compile again.
      write = jax.jit(_write, out_shardings=None if where[0] is None else where)
      out[path] = write(*self.state.factors[path], *parts, index)
    return out

  def _own(self, columns: np.ndarray, number: int, factors: dict[str, Pair]) -> None:
    self._owner[columns] = number
    # A copy, because a CPU array may share the memory of a NumPy array.
    owner = mesh_lib.put(self._owner.copy(), self._replicated)
    self.state = BankState(owner=owner, factors=factors)


def _write(a, b, new_a, new_b, columns):
  return (
    a.at[:, columns].set(new_a, mode="drop"),
    b.at[columns].set(new_b, mode="drop"),
  )


def _places(model: Transformer, ranks: int) -> Iterator[tuple[str, _Place]]:
  """Yields the modules that have factors, by their paths in the unstacked model.

  The linear maps of a mixture of experts have none. Their rows are not rows of the
  batch.
  """
  for path, linear in lora_modules.adaptable(model).items():
    if {"experts", "router"} & set(path.split(".")):
      continue
    *stack, rows, columns = linear.kernel.shape
    place = _Place(((rows, ranks), (ranks, columns)), _shardings(linear))
    layers = adapter_sources.layer_paths(path, model.config) if stack else [path]
    for layer in layers:
      yield layer, place


def _shardings(linear: Linear) -> Pair:
  """Returns the shardings of A and B: R is not split, in and out follow the kernel."""
  kernel = linear.kernel
  if isinstance(kernel, TransposedKernel):
    array = kernel.matrix.get_value()  # on one device
  else:
    stored = kernel.codes if isinstance(kernel, QuantizedKernel) else kernel
    array = stored.get_value()
  where = array.sharding
  if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh):
    spec = (*where.spec, *(None,) * (array.ndim - len(where.spec)))
    mesh = mesh_lib.auto(where.mesh)

    def named(*entries):
      return NamedSharding(mesh, PartitionSpec(*entries))

    return named(spec[-2], None), named(None, spec[-1])
  # Factors that are committed to a device, beside weights that are not, would compile
  # the engine's programs a second time.
  is_free = isinstance(array, jax.Array) and not array.committed
  return (None, None) if is_free else (where, where)
