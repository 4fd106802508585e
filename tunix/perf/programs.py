"""Named calls of compiled programs, which a plan can record instead of running them.

A plan executes the Python code of a run with `jax.ShapeDtypeStruct`s in place of
arrays. `call` then lowers the program and returns the shapes of its results. The values
that the code brings to the host (`mesh.to_host`) are ones, so that it can continue.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax


@dataclasses.dataclass
class ProgramRecord:
  """A program that was called and not run.

  Attributes:
    lowered: the program, lowered by its first call.
    args: arguments of the first call, static ones included.
    calls: number of calls.
    result: shapes of the result; None: not computed yet.
    others: programs of the same name with arguments of other shapes, one for each form.
  """

  lowered: jax.stages.Lowered
  args: tuple[Any, ...]
  calls: int = 1
  result: Any = None
  others: list[ProgramRecord] = dataclasses.field(default_factory=list)

  @functools.cached_property
  def compiled(self) -> jax.stages.Compiled:
    """The program, compiled at the first access."""
    return self.lowered.compile()

  @property
  def gives_arrays(self) -> bool:
    """True if the program computes anything.

    The unstacking of layers that are not stacked, for example, computes nothing.
    """
    return self.result is None or bool(shapes_in(self.result))

  def run(self) -> Any:
    """Returns the shapes of the result, with the layout that the compiler chose.

    Later programs take them as arguments.
    """
    if self.result is None:
      self.result = jax.tree.map(
        lambda out, where: jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=where),
        self.lowered.out_info,
        self.compiled.output_shardings,
      )
    return self.result


# {name: record}, inside `recording`.
_records: contextvars.ContextVar[dict[str, ProgramRecord] | None] = (
  contextvars.ContextVar("program_records", default=None)
)

_all_sizes: contextvars.ContextVar[bool] = contextvars.ContextVar(
  "program_all_sizes", default=False
)

# (name, function, its arguments) -> result
_Interceptor = Callable[[str, Any, tuple[Any, ...]], Any]
_interceptor: contextvars.ContextVar[_Interceptor | None] = contextvars.ContextVar(
  "program_interceptor", default=None
)


@contextlib.contextmanager
def recording(
  known: dict[str, ProgramRecord] | None = None, *, all_sizes: bool = False
) -> Iterator[dict[str, ProgramRecord]]:
  """Records the programs that are called inside the `with` block, and runs none.

  Args:
    known: {name: record} of an earlier block, which is extended; None: a new dict.
    all_sizes: see `records_all_sizes`.
  """
  out: dict[str, ProgramRecord] = {} if known is None else known
  tokens = _records.set(out), _all_sizes.set(all_sizes)
  try:
    yield out
  finally:
    _records.reset(tokens[0])
    _all_sizes.reset(tokens[1])


def is_recording() -> bool:
  """Returns True inside `recording`."""
  return _records.get() is not None


def records_all_sizes() -> bool:
  """Returns True if the caller of `recording` wants programs of all sizes.

  A caller whose data decide which of its programs run then calls each of them once, and
  otherwise only the largest ones.
  """
  return _all_sizes.get()


@contextlib.contextmanager
def intercepted(interceptor: _Interceptor) -> Iterator[None]:
  """Calls `interceptor(name, jitted, args)` for each program inside the block."""
  token = _interceptor.set(interceptor)
  try:
    yield
  finally:
    _interceptor.reset(token)


@contextlib.contextmanager
def observed(observer: _Interceptor) -> Iterator[None]:
  """Calls `observer(name, jitted, args)` before each program inside the block."""
  outer = _interceptor.get()

  def both(name: str, jitted: Any, args: tuple[Any, ...]) -> Any:
    observer(name, jitted, args)
    return jitted(*args) if outer is None else outer(name, jitted, args)

  with intercepted(both):
    yield


def call(name: str, jitted: Callable[..., Any], *args: object) -> Any:
  """Returns `jitted(*args)`; inside `recording` the shapes of that result."""
  records, interceptor = _records.get(), _interceptor.get()
  if records is not None:
    return _record(records, name, jitted, args).run()
  return jitted(*args) if interceptor is None else interceptor(name, jitted, args)


def lower(name: str, jitted: Callable[..., Any], *args: object) -> jax.stages.Lowered:
  """Returns `jitted.lower(*args)`, and records it inside `recording`."""
  records = _records.get()
  if records is None:
    return jitted.lower(*args)  # type: ignore[attr-defined]
  return _record(records, name, jitted, args).lowered


def _record(
  records: dict[str, ProgramRecord], name: str, jitted: Any, args: tuple[Any, ...]
) -> ProgramRecord:
  before = records.get(name)
  if before is None:
    return records.setdefault(name, ProgramRecord(jitted.lower(*args), args))
  before.calls += 1
  # Lowering a large model takes seconds, so each form of arguments is lowered once.
  for record in (before, *before.others):
    if _form(record.args) == _form(args):
      return record
  before.others.append(ProgramRecord(jitted.lower(*args), args))
  return before.others[-1]


def _form(args: tuple[Any, ...]) -> Any:
  """Returns what lowering depends on: shapes and layouts of arrays, other values."""

  def one(leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
      return leaf
    weak = getattr(leaf, "weak_type", False)
    return leaf.shape, leaf.dtype, weak, getattr(leaf, "sharding", None)

  leaves, structure = jax.tree.flatten(args)
  return structure, tuple(one(leaf) for leaf in leaves)


def shapes_in(tree: object) -> list[jax.ShapeDtypeStruct]:
  """Returns the shapes of a pytree that stand for arrays of numbers."""
  return [
    x
    for x in jax.tree.leaves(tree)
    if isinstance(x, jax.ShapeDtypeStruct)
    and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
  ]
