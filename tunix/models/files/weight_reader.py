"""Reader that assembles parameters from slices of stored tensors, on their devices.

A slice is read while the device still copies the previous one, so the host's memory
holds at most two slices. On a CPU the slice itself becomes the array. The arrays do not
refer to the files: files may be changed afterwards, and weights may be donated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from tunix.models.files.stored_tensor import StoredTensor
from tunix.models.transformer.params import Placement, axes_of

Index = tuple[slice, ...]

# Number of rows that a transposed copy processes at once. With 32 rows the inner loops
# are too short (half the speed), and all rows at once do not fit the processor's cache
# (a quarter of the speed).
_ROWS = 256
# Bytes that one thread maps at a time. It bounds the resident pages of the files, and
# lets several threads read one large tensor, such as the embedding table.
_BLOCK = 4 << 20
_THREADS = 8
_ALIGNMENT = 64  # bytes; JAX adopts host memory with this alignment


class WeightReader:
  """Reader of the parameters of one checkpoint, to be used as a context manager.

  Args:
    tensors: the tensors of the checkpoint by name.
  """

  def __init__(self, tensors: Mapping[str, StoredTensor]):
    self._tensors = tensors
    self._copying: list[jax.Array] = []
    self._pool = futures.ThreadPoolExecutor(_THREADS)

  def __enter__(self) -> WeightReader:
    return self

  def __exit__(self, *_: object) -> None:
    self._pool.shutdown()

  def settle(self) -> None:
    """Waits for the last copy to a device and drops it, so that it can be freed."""
    jax.block_until_ready(self._copying)
    self._copying = []

  def load(
    self,
    place: Placement,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    where: Sharding | None,
  ) -> jax.Array:
    """Reads one parameter; each slice that this process's devices hold is read once.

    Args:
      place: the parameter's tensors, whose shapes were checked.
      shape: shape of the whole parameter.
      dtype: dtype of the result.
      where: sharding of the result; None for the default device.
    """
    if where is None:
      everything = tuple(slice(0, n) for n in shape)
      return self._put(self.read(place, everything, dtype), [None])[0]
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in where.addressable_devices_indices_map(shape).items():
      bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape))
      target = SingleDeviceSharding(device, memory_kind=where.memory_kind)
      holders.setdefault(bounds, []).append(target)
    parts = []
    for bounds, targets in holders.items():
      values = self.read(place, tuple(slice(*pair) for pair in bounds), dtype)
      parts += self._put(values, targets)
    return jax.make_array_from_single_device_arrays(shape, where, parts, dtype=dtype)

  def read(self, place: Placement, index: Index, dtype: DTypeLike) -> np.ndarray:
    """Reads one slice of a parameter and casts it.

    Args:
      place: the parameter's tensors.
      index: slices with a start and a stop for every axis of the parameter.
      dtype: dtype of the result.
    """
    out = _array([s.stop - s.start for s in index], np.dtype(dtype))
    lead = len(place.lead)
    keys = np.array(place.keys).reshape(place.lead)[index[:lead]].reshape(-1).tolist()
    inner, each = index[lead:], out.reshape(len(keys), *out.shape[lead:])
    jobs = [
      self._pool.submit(job.run)
      for i, key in enumerate(keys)  # each[i] of a scalar tensor would be a copy
      for job in _jobs(self._tensors[key], each[i, ...], inner, place.transpose)
    ]
    for job in jobs:  # NumPy's copies release the interpreter's lock
      job.result()
    return out

  def _put(self, values: np.ndarray, targets: list[Any]) -> list[jax.Array]:
    jax.block_until_ready(self._copying)
    self._copying = [jax.device_put(values, target) for target in targets]
    return self._copying


def _array(shape: list[int], dtype: np.dtype) -> np.ndarray:
  """Allocates host memory at a multiple of 64 bytes.

  JAX's CPU backend uses memory with this alignment without a copy if nothing else
  refers to it; a copy would double the time of loading. The disadvantage is that XLA
  does not reuse this memory for results: the first step that donates such a weight
  allocates a new array.
  """
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class _Job:
  """A copy of some rows of a stored tensor; `out` has the tensor's order of axes."""

  tensor: StoredTensor
  out: np.ndarray
  index: Index

  def run(self) -> None:
    # The file is mapped here, so that the pages are released after this copy.
    source = self.tensor.map()[self.index]
    if self.out.ndim < 2 or self.out.flags.c_contiguous:
      self.out[...] = source
      return
    for row in range(0, len(source), _ROWS):
      self.out[row : row + _ROWS] = source[row : row + _ROWS]


def _jobs(
  tensor: StoredTensor, target: np.ndarray, index: Index, transpose: bool
) -> Iterator[_Job]:
  out = target
  if transpose:
    order = axes_of(target.ndim)
    out, index = target.transpose(order), tuple(index[axis] for axis in order)
  if not out.size or not out.ndim:
    yield _Job(tensor, out, index)
    return
  first, *others = index
  per_row = out[0].size * tensor.dtype.itemsize
  # A row of a tensor with three axes is the matrix of one expert.
  step = max(_ROWS if out.ndim < 3 else 1, _BLOCK // per_row)
  for row in range(0, len(out), step):
    rows = slice(first.start + row, min(first.start + row + step, first.stop))
    yield _Job(tensor, out[row : row + step], (rows, *others))
