"""The pickle inside a torch file, read as data: nothing named in it is imported or run.

`pickle.Unpickler` calls what a stream names and sets attributes on what it gets back,
however few names `find_class` lets through, and its C version allocates a table as long
as the largest memo number. So this is a stack machine of its own, for the thirty
instructions that a dictionary of tensors is written with.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tunix.models.stored_tensor import brief, sizes

MAX_BYTES = 16_000_000
# A tensor takes about 30 instructions; one builds at most some hundred bytes.
_MAX_STEPS = 2_000_000

_NUMBERS: Mapping[str, Any] = {
  "float64": np.float64,
  "float32": np.float32,
  "float16": np.float16,
  "bfloat16": jnp.bfloat16,
  "float8_e4m3fn": jnp.float8_e4m3fn,
  "float8_e5m2": jnp.float8_e5m2,
  "int64": np.int64,
  "int32": np.int32,
  "int16": np.int16,
  "int8": np.int8,
  "uint64": np.uint64,
  "uint32": np.uint32,
  "uint16": np.uint16,
  "uint8": np.uint8,
  "bool": np.bool_,
}
_DTYPES = {f"torch.{name}": np.dtype(kind) for name, kind in _NUMBERS.items()}
_UNTYPED = "torch.storage.UntypedStorage"
_STORAGES: Mapping[str, np.dtype] = {
  "torch.DoubleStorage": np.dtype(np.float64),
  "torch.FloatStorage": np.dtype(np.float32),
  "torch.HalfStorage": np.dtype(np.float16),
  "torch.BFloat16Storage": np.dtype(jnp.bfloat16),
  "torch.LongStorage": np.dtype(np.int64),
  "torch.IntStorage": np.dtype(np.int32),
  "torch.ShortStorage": np.dtype(np.int16),
  "torch.CharStorage": np.dtype(np.int8),
  "torch.ByteStorage": np.dtype(np.uint8),
  "torch.BoolStorage": np.dtype(np.bool_),
  _UNTYPED: np.dtype(np.uint8),
}


@dataclasses.dataclass(frozen=True)
class Storage:
  """A member of the archive: `count` elements of `dtype`."""

  key: str
  dtype: np.dtype
  count: int

  @property
  def nbytes(self) -> int:
    return self.count * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class View:
  """A tensor: part of a storage. `start` and `strides` count elements of `dtype`."""

  storage: Storage
  dtype: np.dtype
  start: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Name:
  """A class or function that the stream names: a word, never looked up."""

  name: str


def read_tensors(raw: bytes) -> dict[str, View]:
  """The tensors of a pickled state dict.

  Raises:
    ValueError: it is damaged or holds anything else, which the message names.
  """
  if len(raw) > MAX_BYTES:
    raise ValueError(f"its pickle has {len(raw)} bytes, at most {MAX_BYTES} are read")
  try:
    state = _run(raw)
  except (IndexError, KeyError, TypeError) as error:
    raise ValueError(f"its pickle is damaged: {type(error).__name__}") from error
  if not isinstance(state, dict):
    raise ValueError(f"it holds {type(state).__name__}, expected a dict of tensors")
  for key, value in state.items():
    if not isinstance(value, View):
      raise ValueError(
        f"{brief(key)} is of type {type(value).__name__}, expected a tensor"
      )
  return state


def _run(raw: bytes) -> Any:
  machine, stream = _Machine(), io.BytesIO(raw)
  for _ in range(_MAX_STEPS):
    operation = _OPERATIONS.get(stream.read(1))
    if operation is None:
      raise ValueError("its pickle has no end, or an instruction that does not exist")
    if operation.name == "STOP":
      return machine.pop()
    action = _ACTIONS.get(operation.name)
    if action is None:  # before its argument is read
      raise ValueError(f"its pickle uses {operation.name}, which no tensor needs")
    action(machine, _argument(operation, stream))
  raise ValueError(f"its pickle has more than {_MAX_STEPS} instructions")


def _argument(operation: pickletools.OpcodeInfo, stream: io.BytesIO) -> Any:
  if operation.name == "GLOBAL":  # whose own reader interprets backslashes
    return [stream.readline().removesuffix(b"\n").decode("ascii") for _ in range(2)]
  return operation.arg.reader(stream) if operation.arg else None


class _Machine:
  """The stack of a pickle, cut at the marks, and its memo."""

  def __init__(self) -> None:
    self.stack: list[Any] = []
    self.below: list[list[Any]] = []
    self.memo: dict[int, Any] = {}

  def push(self, value: Any) -> None:
    self.stack.append(value)

  def pop(self) -> Any:
    return self.stack.pop()

  def mark(self, _: Any) -> None:
    self.below.append(self.stack)
    self.stack = []

  def pop_mark(self) -> list[Any]:
    values, self.stack = self.stack, self.below.pop()
    return values

  def pop_tuple(self, count: int) -> None:
    values = [self.pop() for _ in range(count)]
    self.push(tuple(reversed(values)))

  def remember(self, number: int | None) -> None:
    self.memo[len(self.memo) if number is None else number] = self.stack[-1]

  def set_items(self, values: list[Any]) -> None:
    target = self.stack[-1]
    if not isinstance(target, dict) or len(values) % 2:
      raise ValueError("its pickle sets items of what is no dict")
    for key, value in zip(values[::2], values[1::2]):
      # Hashing a tuple of tuples that share their parts takes exponential time.
      if not isinstance(key, str):
        raise ValueError(f"it has {type(key).__name__} as a key, expected a string")
      if key in target:
        raise ValueError(f"{brief(key)} is there twice")
      target[key] = value

  def append(self, values: list[Any]) -> None:
    if not isinstance(self.stack[-1], list):
      raise ValueError("its pickle appends to what is no list")
    self.stack[-1].extend(values)

  def name(self, module: Any, name: Any) -> None:
    full = f"{module}.{name}"
    if full not in _CALLS and full not in _STORAGES and full not in _DTYPES:
      raise ValueError(f"it names {brief(full)}, which no tensor needs")
    self.push(_Name(full))

  def stack_name(self, _: Any) -> None:
    name, module = self.pop(), self.pop()
    if not isinstance(name, str) or not isinstance(module, str):
      raise ValueError("its pickle names something by what is no string")
    self.name(module, name)

  def reduce(self, _: Any) -> None:
    arguments, made = self.pop(), self.pop()
    if not isinstance(made, _Name) or made.name not in _CALLS:
      raise ValueError("its pickle calls what is no function")
    if not isinstance(arguments, tuple):
      raise ValueError(f"{made.name} has {type(arguments).__name__} as arguments")
    self.push(_CALLS[made.name](*arguments))

  def build(self, _: Any) -> None:
    """Modules leave their version numbers as an attribute of the dict: not needed."""
    state = self.pop()
    if not isinstance(self.stack[-1], dict) or not isinstance(state, dict):
      raise ValueError("its pickle sets attributes of what is no dict")

  def storage(self, _: Any) -> None:
    word, kind, key, _, count = self.pop()
    if word != "storage" or not isinstance(kind, _Name) or kind.name not in _STORAGES:
      raise ValueError("its pickle refers to what is no storage")
    if not isinstance(key, str) or not (key.isascii() and key.isdigit()):
      raise ValueError(f"the storage {brief(key)} has no number for a name")
    (count,) = sizes([count], "the size of a storage")
    self.push(Storage(key, _STORAGES[kind.name], count))


def _tensor(
  storage: Any, start: Any, shape: Any, strides: Any, *rest: Any, dtype: Any = None
) -> View:
  if not isinstance(storage, Storage) or len(rest) not in (2, 3):
    raise ValueError("a tensor has no storage")
  if len(rest) == 3 and rest[2]:
    raise ValueError("a tensor has flags (conjugate, negative)")
  dtype = dtype or storage.dtype
  (start,) = sizes([start], "the start of a tensor")
  shape, strides = sizes(shape, "shape"), sizes(strides, "strides")
  room = storage.nbytes // dtype.itemsize
  last = start + sum((n - 1) * step for n, step in zip(shape, strides) if n)
  # Not more elements than are stored: a stride of 0 could claim any size.
  count = math.prod(shape)
  if len(shape) != len(strides) or (count and (last >= room or count > room)):
    raise ValueError(
      f"a tensor of shape {shape}, strides {strides} from {start} leaves its storage "
      f"of {room} elements, or repeats some"
    )
  return View(storage, dtype, start, shape, strides)


def _typed_tensor(*parts: Any) -> View:
  storage, start, shape, strides, grad, hooks, kind, *rest = parts
  if not isinstance(kind, _Name) or kind.name not in _DTYPES:
    raise ValueError("a tensor has an unknown dtype")
  dtype = _DTYPES[kind.name]
  return _tensor(storage, start, shape, strides, grad, hooks, *rest, dtype=dtype)


def _parameter(tensor: Any, *_: Any) -> View:
  if not isinstance(tensor, View):
    raise ValueError("a parameter holds no tensor")
  return tensor


def _empty_dict(*items: Any) -> dict[str, Any]:
  if items:
    raise ValueError("an OrderedDict is made of arguments")
  return {}


# What the names admitted stand for: functions of ours.
_CALLS: Mapping[str, Callable[..., Any]] = {
  "collections.OrderedDict": _empty_dict,
  "torch.Size": lambda values: sizes(values, "shape"),
  "torch._utils._rebuild_parameter": _parameter,
  "torch._utils._rebuild_tensor_v2": _tensor,
  "torch._utils._rebuild_tensor_v3": _typed_tensor,
}

_OPERATIONS = {x.code.encode("latin-1"): x for x in pickletools.opcodes}
_Action = Callable[[_Machine, Any], None]
_CONSTANTS = ("BINFLOAT", "BININT", "BININT1", "BININT2", "LONG1")
_STRINGS = ("BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE")
_ACTIONS: Mapping[str, _Action] = {
  **dict.fromkeys((*_CONSTANTS, *_STRINGS), _Machine.push),
  **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
  **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, at: m.push(m.memo[at])),
  **dict.fromkeys(("FRAME", "PROTO"), lambda m, _: None),
  "APPEND": lambda m, _: m.append([m.pop()]),
  "APPENDS": lambda m, _: m.append(m.pop_mark()),
  "BINPERSID": _Machine.storage,
  "BUILD": _Machine.build,
  "EMPTY_DICT": lambda m, _: m.push({}),
  "EMPTY_LIST": lambda m, _: m.push([]),
  "EMPTY_TUPLE": lambda m, _: m.push(()),
  "GLOBAL": lambda m, names: m.name(*names),
  "MARK": _Machine.mark,
  "NEWFALSE": lambda m, _: m.push(False),
  "NEWTRUE": lambda m, _: m.push(True),
  "NONE": lambda m, _: m.push(None),
  "REDUCE": _Machine.reduce,
  "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
  "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
  "STACK_GLOBAL": _Machine.stack_name,
  "TUPLE": lambda m, _: m.push(tuple(m.pop_mark())),
  "TUPLE1": lambda m, _: m.pop_tuple(1),
  "TUPLE2": lambda m, _: m.pop_tuple(2),
  "TUPLE3": lambda m, _: m.pop_tuple(3),
}
