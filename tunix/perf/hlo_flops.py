"""FLOPs of a lowered JAX program, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once, so that a model whose layers run
under `lax.scan` seems to cost one layer. This module walks the HLO of the lowered
program instead. It counts matrix products, convolutions and the attention kernels of
splash and cuDNN, and multiplies the body of every `while` by its trip count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

from tunix.perf import flops
from tunix.perf.hlo_text import ENTRY, Operation, Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramFlops:
  """Work of a program, on all devices together.

  Attributes:
    flops: floating-point operations; a multiply-add counts as two.
    unknown_loops: loops whose trip count depends on data, without the attribute
      `PASSES`; each counts as one pass.
  """

  flops: float
  unknown_loops: int = 0

  def __add__(self, other: ProgramFlops) -> ProgramFlops:
    return ProgramFlops(
      flops=self.flops + other.flops,
      unknown_loops=self.unknown_loops + other.unknown_loops,
    )

  def times(self, count: float) -> ProgramFlops:
    """Returns the work of `count` runs."""
    return dataclasses.replace(self, flops=self.flops * count)


_NOTHING = ProgramFlops(flops=0.0)

# Attribute of a grouped product: which part of its rows belongs to a group, on average.
SHARE = "tunix_share"

# Attribute of a loop whose length depends on data: how often its body runs, on average.
PASSES = "tunix_passes"

_SHARE = re.compile(rf'{SHARE}="([\d.e-]+)"')
_PASSES = re.compile(rf'{PASSES}="([\d.e-]+)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_KERNEL_LABELS = re.compile(r"dim_labels=\w+?_(\w+)->")
_MESHES = re.compile(r"xla\.sdy\.meshes=.*")
_AXIS_SIZE = re.compile(r'"([^"\\]+)\\?"=(\d+)')
_MANUAL_AXES = re.compile(r"manual_axes\{([^}]*)\}")
_AXIS = re.compile(r'"([^"\\]+)\\?"')


def count_flops(lowered: Any) -> ProgramFlops:
  """Counts the FLOPs of the products of `jax.jit(f).lower(...)`.

  Shapes are those before partitioning, so the count is that of all devices together.
  A forward pass that rematerialization computes twice counts twice. Element-wise
  operations and other kernels than those of attention do not count. A conditional
  counts as its most expensive branch.

  Args:
    lowered: result of `.lower(...)` of a jitted function (jax.jit or nnx.jit).
  """
  # Debug information has the names of kernels; HLO keeps no other trace of them.
  text = lowered.as_text(dialect="hlo", debug_info=True)
  meshes = _MESHES.search(text)
  axes = _AXIS_SIZE.findall(meshes[0]) if meshes else []
  program = Program(text, is_compiled=False)
  return _Counter(program, {name: int(size) for name, size in axes}).total(ENTRY)


class _Counter:
  """Walks operations; a computation that runs often is counted once."""

  def __init__(self, program: Program, axes: dict[str, int]):
    self._program, self._axes = program, axes
    self.total = functools.cache(self._total)

  def _total(self, name: str) -> ProgramFlops:
    operations = self._program.computations[name]
    shards = self._shards(operations)
    return sum(
      (
        self._work(name, one, operations).times(shards.get(one.name, 1))
        for one in operations.values()
      ),
      _NOTHING,
    )

  def _work(
    self, name: str, one: Operation, operations: dict[str, Operation]
  ) -> ProgramFlops:
    match one.opcode:
      case "dot":
        return ProgramFlops(flops=_dot_flops(one, operations))
      case "convolution":
        return ProgramFlops(flops=_convolution_flops(one, operations))
      case "ragged-dot":
        return ProgramFlops(flops=_ragged_dot_flops(one, operations))
      case "custom-call":
        return ProgramFlops(flops=_kernel_flops(one, operations))
      case "call":
        return sum(map(self.total, one.callees), _NOTHING)
      case "while":
        (body,) = map(self.total, one.callees)
        count = self._program.trip_count(name, one)
        if count is None and (passes := _PASSES.search(one.text)) is not None:
          count = float(passes[1])
        if count is not None:
          return body.times(count)
        return body + ProgramFlops(flops=0.0, unknown_loops=1 if body.flops else 0)
      case "conditional":
        return max(map(self.total, one.callees), key=lambda branch: branch.flops)
      case _:
        return _NOTHING

  def _shards(self, operations: dict[str, Operation]) -> dict[str, int]:
    """Returns {call of a shard_map's body: shards}; shapes inside are those of a shard.

    HLO notes the mesh axes of a `shard_map` where its results become global again.
    """
    out = {}
    for one in operations.values():
      if "xla.sdy.LocalToGlobalShape" not in one.text:
        continue
      axes = _MANUAL_AXES.search(one.text)
      body = operations[one.operands[0]]
      if body.index is not None:
        body = operations[body.operands[0]]
      names = _AXIS.findall(axes[1]) if axes else []
      out[body.name] = math.prod(self._axes.get(axis, 1) for axis in names)
    return out


def _dot_flops(dot: Operation, operations: dict[str, Operation]) -> float:
  contracted = _CONTRACTED.search(dot.text)
  lhs = operations[dot.operands[0]].sizes
  axes = contracted[1].split(",") if contracted else []
  terms = math.prod(lhs[int(axis)] for axis in axes if axis)
  return 2.0 * math.prod(dot.sizes) * terms


def _convolution_flops(one: Operation, operations: dict[str, Operation]) -> float:
  # "b0f_0io->b0f": the kernel without its output features is what one element of the
  # result sums over.
  labels = _KERNEL_LABELS.search(one.text)
  assert labels is not None, one.text
  kernel = operations[one.operands[1]].sizes
  terms = math.prod(kernel) / kernel[labels[1].index("o")]
  return 2.0 * math.prod(one.sizes) * terms


# FLOPs a pair of query and key of splash attention's kernels, in units of H: two for
# each product that has the pair. The backward kernels compute the scores again.
_SPLASH = {"fwd": 4.0, "dq": 6.0, "dkv": 8.0}


# Likewise of cuDNN's. The backward kernel computes the scores again.
_CUDNN = {"": 4.0, "Backward": 10.0}
CUDNN_KERNEL = re.compile(r'"__cudnn\$fmha(?:ScaleBias)?Softmax(|Backward)"')
_CUDNN_WINDOW = re.compile(r'"sliding_window_length": ?"?(\d+)')


def _kernel_flops(kernel: Operation, operations: dict[str, Operation]) -> float:
  """Counts a kernel of attention; 0 for other kernels."""
  if (match := CUDNN_KERNEL.search(kernel.text)) is not None:
    return _cudnn_flops(_CUDNN[match[1]], kernel, operations)
  return _splash_flops(kernel, operations)


def _cudnn_flops(
  factor: float, kernel: Operation, operations: dict[str, Operation]
) -> float:
  """Counts cuDNN's attention of queries [B, T, N, H], causal, windowed or neither."""
  b, t, n, h = operations[kernel.operands[0]].sizes
  window = _CUDNN_WINDOW.search(kernel.text)
  width = int(window[1]) if window else 0
  is_causal = '"mask_type": "CAUSAL"' in kernel.text
  pairs = flops.attended_pairs(t, causal=is_causal, window=width or None)
  return factor * b * n * h * pairs


def _splash_flops(kernel: Operation, operations: dict[str, Operation]) -> float:
  """Counts splash attention with blocks of equal sides, causal or windowed.

  The kernels compute whole blocks, and skip blocks that no query looks into.
  """
  phase = re.search(r"splash_mha_(fwd|dq|dkv)", kernel.text)
  if phase is None or "tpu_custom_call" not in kernel.text:
    return 0.0
  # The first operands are tables of blocks, [1 or N, blocks, partners]: `partners` is
  # the largest number of blocks of the other side that one block meets. The first float
  # operands are queries, [B, N, T, H] without a B of 1, and keys, [B, K, S, H].
  operands = [operations[name].arrays[0] for name in kernel.operands]
  table = operands[0].sizes
  is_dkv = phase[1] == "dkv"
  count, partners = (table[2], table[1]) if is_dkv else (table[1], table[2])
  floats = (x.sizes for x in operands if "f" in x.dtype)
  queries, keys = next(floats), next(floats)
  size = (keys if is_dkv else queries)[-2] // count
  # Fewer than all blocks: a window. Queries are all of a row's, or a device's share of
  # them (mesh axis cp), which costs its share of the work.
  blocks = keys[-2] // size
  if partners == (queries if is_dkv else keys)[-2] // size:
    partners = blocks
  pairs = sum(min(i + 1, partners) for i in range(blocks)) * size**2
  pairs *= queries[-2] / keys[-2]
  return _SPLASH[phase[1]] * math.prod(queries[:-2]) * queries[-1] * pairs


def _ragged_dot_flops(one: Operation, operations: dict[str, Operation]) -> float:
  # Rows [m, k] each meet one of the [g, k, n] matrices. The gradients of both cost the
  # same: the left side's elements, each as often as the result has columns.
  rows, share = operations[one.operands[0]].sizes, _SHARE.search(one.text)
  part = float(share[1]) if share else 1.0
  return 2.0 * math.prod(rows) * one.sizes[-1] * part
