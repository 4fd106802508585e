"""Reader of the pickle inside a torch file: no name in it is imported or called.

`pickle.Unpickler` is not used, even with a strict `find_class`. It calls the functions
that a stream names and sets attributes on their results, and its C version allocates a
table as long as the largest memo number in the stream. This module is a stack machine
for the thirty instructions that `torch.save` uses for a dictionary of tensors.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pathlib
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tunix.models.files.stored_tensor import DTYPES, StoredTensor, brief, sizes

MAX_BYTES = 16_000_000
# Limit of instructions. A tensor takes about 30 of them, and each instruction allocates
# at most some hundred bytes.
_MAX_STEPS = 2_000_000

_DTYPES = {f"torch.{dtype.name}": dtype for dtype in DTYPES.values()}
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
  "torch.storage.UntypedStorage": np.dtype(np.uint8),
}

# Maps the key of a storage to (first byte in the file, size in bytes).
Locate = Callable[[str], tuple[int, int]]


class Storage(StoredTensor):
  """The elements of one member of the archive; tensors are views of it."""


@dataclasses.dataclass(frozen=True)
class _Name:
  """The name of a class or function in the stream. It is never looked up."""

  name: str


def read_tensors(
  raw: bytes, file: pathlib.Path, locate: Locate
) -> dict[str, StoredTensor]:
  """Returns the tensors of a pickled state dict, by name.

  Args:
    raw: the pickle.
    file: the archive that the pickle is a member of.
    locate: finds the bytes of a storage in `file`; raises ValueError if there are none.

  Raises:
    ValueError: the pickle is damaged or holds anything but tensors. The message names
      the first value that is none.
  """
  if len(raw) > MAX_BYTES:
    raise ValueError(f"its pickle has {len(raw)} bytes, at most {MAX_BYTES} are read")
  try:
    state = _run(raw, _Machine(file, locate))
  except (IndexError, KeyError, TypeError) as error:
    raise ValueError(f"its pickle is damaged: {type(error).__name__}") from error
  if not isinstance(state, dict):
    raise ValueError(f"it holds {type(state).__name__}, expected a dict of tensors")
  for key, value in state.items():
    if type(value) is not StoredTensor:  # a Storage is none
      raise ValueError(
        f"{brief(key)} is of type {type(value).__name__}, expected a tensor"
      )
  return {key: dataclasses.replace(value, name=key) for key, value in state.items()}


def _run(raw: bytes, machine: _Machine) -> Any:
  stream = io.BytesIO(raw)
  for _ in range(_MAX_STEPS):
    operation = _OPERATIONS.get(stream.read(1))
    if operation is None:
      raise ValueError("its pickle has no end, or an instruction that does not exist")
    if operation.name == "STOP":
      return machine.pop()
    action = _ACTIONS.get(operation.name)
    if action is None:  # refused before its argument is read
      raise ValueError(f"its pickle uses {operation.name}, which no tensor needs")
    action(machine, _argument(operation, stream))
  raise ValueError(f"its pickle has more than {_MAX_STEPS} instructions")


def _argument(operation: pickletools.OpcodeInfo, stream: io.BytesIO) -> Any:
  if operation.name == "GLOBAL":  # the reader of pickletools interprets backslashes
    return [stream.readline().removesuffix(b"\n").decode("ascii") for _ in range(2)]
  return operation.arg.reader(stream) if operation.arg else None


class _Machine:
  """The state of a running pickle.

  Attributes:
    file, locate: see `read_tensors`.
    stack: the values since the last mark; `below` holds the stacks before each mark.
    memo: values that the stream numbered for later use.
  """

  def __init__(self, file: pathlib.Path, locate: Locate) -> None:
    self.file = file
    self.locate = locate
    self.stack: list[Any] = []
    self.below: list[list[Any]] = []
    self.memo: dict[int, Any] = {}

  def push(self, value: object) -> None:
    self.stack.append(value)

  def pop(self) -> Any:
    return self.stack.pop()

  def mark(self, _: object) -> None:
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
      raise ValueError("its pickle sets items of a value that is no dict")
    for key, value in zip(values[::2], values[1::2]):
      # Hashing a tuple of tuples that share their parts takes exponential time.
      if not isinstance(key, str):
        raise ValueError(f"it has {type(key).__name__} as a key, expected a string")
      if key in target:
        raise ValueError(f"{brief(key)} occurs twice")
      target[key] = value

  def append(self, values: list[Any]) -> None:
    if not isinstance(self.stack[-1], list):
      raise ValueError("its pickle appends to a value that is no list")
    self.stack[-1].extend(values)

  def name(self, module: object, name: object) -> None:
    full = f"{module}.{name}"
    if full not in _CALLS and full not in _STORAGES and full not in _DTYPES:
      raise ValueError(f"it names {brief(full)}, which no tensor needs")
    self.push(_Name(full))

  def stack_name(self, _: object) -> None:
    name, module = self.pop(), self.pop()
    if not isinstance(name, str) or not isinstance(module, str):
      raise ValueError("its pickle has a module or function name that is no string")
    self.name(module, name)

  def reduce(self, _: object) -> None:
    arguments, function = self.pop(), self.pop()
    if not isinstance(function, _Name) or function.name not in _CALLS:
      raise ValueError("its pickle calls a value that is no function")
    if not isinstance(arguments, tuple):
      raise ValueError(f"{function.name} has {type(arguments).__name__} as arguments")
    self.push(_CALLS[function.name](*arguments))

  def build(self, _: object) -> None:
    """Drops the attributes of a dict: modules store their version numbers there."""
    state = self.pop()
    if not isinstance(self.stack[-1], dict) or not isinstance(state, dict):
      raise ValueError("its pickle sets attributes of a value that is no dict")

  def storage(self, _: object) -> None:
    tag, kind, key, _, count = self.pop()
    if tag != "storage" or not isinstance(kind, _Name) or kind.name not in _STORAGES:
      raise ValueError("its pickle refers to a value that is no storage")
    if not isinstance(key, str) or not (key.isascii() and key.isdigit()):
      raise ValueError(f"the name of storage {brief(key)} is no number")
    shape = sizes([count], "the size of a storage")
    start, nbytes = self.locate(key)
    storage = Storage(key, self.file, _STORAGES[kind.name], shape, start)
    if nbytes != storage.nbytes:
      raise ValueError(f"storage {key} has {nbytes} bytes, {storage.nbytes} expected")
    self.push(storage)


def _tensor(
  storage: Any, start: Any, shape: Any, strides: Any, *rest: Any, dtype: Any = None
) -> StoredTensor:
  if not isinstance(storage, Storage) or len(rest) not in (2, 3):
    raise ValueError("a tensor has no storage")
  if len(rest) == 3 and rest[2]:
    raise ValueError("a tensor has flags (conjugate, negative)")
  dtype = dtype or storage.dtype
  (start,) = sizes([start], "the start of a tensor")
  shape, strides = sizes(shape, "shape"), sizes(strides, "strides")
  room = storage.nbytes // dtype.itemsize  # elements of the storage
  last = start + sum((n - 1) * step for n, step in zip(shape, strides) if n)
  # A tensor may not have more elements than its storage. With a stride of 0, a small
  # file could otherwise describe a tensor of any size.
  count = math.prod(shape)
  if len(shape) != len(strides) or (count and (last >= room or count > room)):
    raise ValueError(
      f"a tensor of shape {shape}, strides {strides} from {start} leaves its storage "
      f"of {room} elements, or repeats some"
    )
  offset = storage.offset + start * dtype.itemsize
  return StoredTensor("", storage.file, dtype, shape, offset, strides)


def _typed_tensor(*parts: object) -> StoredTensor:
  storage, start, shape, strides, grad, hooks, kind, *rest = parts
  if not isinstance(kind, _Name) or kind.name not in _DTYPES:
    raise ValueError("a tensor has an unknown dtype")
  dtype = _DTYPES[kind.name]
  return _tensor(storage, start, shape, strides, grad, hooks, *rest, dtype=dtype)


def _parameter(tensor: object, *_: object) -> StoredTensor:
  if type(tensor) is not StoredTensor:
    raise ValueError("a parameter holds no tensor")
  return tensor


def _empty_dict(*items: object) -> dict[str, Any]:
  if items:
    raise ValueError("an OrderedDict is made of arguments")
  return {}


# Maps each name that a stream may call to the function that this module runs instead.
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
