"""FLOPs of a lowered JAX program, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once, so a model whose layers run
under `lax.scan` seems to cost one layer. Here the StableHLO program is walked
instead: matrix products, convolutions and splash attention's kernels, the body of
every `while` times its trip count. `lax.scan` and `lax.fori_loop` lower to a counter
that starts at a constant and is compared with another: their difference is the trip
count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramFlops:
  """What a program computes, over all devices together.

  Args:
    flops: floating-point operations, a multiply-add counted as two.
    unknown_loops: loops whose trip count depends on data; counted once.
  """

  flops: float
  unknown_loops: int = 0

  def __add__(self, other: ProgramFlops) -> ProgramFlops:
    return ProgramFlops(
      flops=self.flops + other.flops,
      unknown_loops=self.unknown_loops + other.unknown_loops,
    )

  def times(self, count: int) -> ProgramFlops:
    return dataclasses.replace(self, flops=self.flops * count)


_NOTHING = ProgramFlops(flops=0.0)

# Attribute of a grouped product: which part of its rows belongs to a group, on average.
SHARE = "tunix_share"


def count_flops(lowered: Any) -> ProgramFlops:
  """FLOPs of the products of `jax.jit(f).lower(...)`: of matrices, of convolutions, of
  splash attention.

  Shapes are those before partitioning, so the count is that of all devices together.
  What a rematerialised forward pass computes twice counts twice. Element-wise
  operations and kernels other than splash (cuDNN) do not count. Of the branches of a
  condition the dearest counts.

  Args:
    lowered: what `.lower(...)` of a jitted function returns (jax.jit or nnx.jit).
  """
  module = lowered.compiler_ir("stablehlo").operation
  functions = {}
  meshes: dict[str, int] = {}
  for operation in _operations(module.regions[0]):
    if operation.name == "func.func":
      functions[operation.attributes["sym_name"].value] = operation
    elif operation.name == "sdy.mesh":
      sizes = re.findall(r'"([^"]+)"\s*=\s*(\d+)', str(operation.attributes["mesh"]))
      meshes.update({name: int(size) for name, size in sizes})
  return _Counter(functions, meshes).function("main")


class _Counter:
  """Walks operations; functions that are called often are counted once."""

  def __init__(self, functions: dict[str, Any], axes: dict[str, int]):
    self._functions = functions
    self._axes = axes
    self.function = functools.cache(self._function)

  def _function(self, name: str) -> ProgramFlops:
    return self._region(self._functions[name].regions[0])

  def _region(self, region: Any) -> ProgramFlops:
    return sum(map(self._operation, _operations(region)), _NOTHING)

  def _operation(self, operation: Any) -> ProgramFlops:
    match operation.name:
      case "stablehlo.dot_general":
        return ProgramFlops(flops=_dot_flops(operation))
      case "stablehlo.convolution":
        return ProgramFlops(flops=_convolution_flops(operation))
      case "chlo.ragged_dot":
        return ProgramFlops(flops=_ragged_dot_flops(operation))
      case "stablehlo.custom_call":
        return ProgramFlops(flops=_kernel_flops(operation))
      case "func.call":
        return self.function(operation.attributes["callee"].value)
      case "stablehlo.while":
        body = self._region(operation.regions[1])
        count = trip_count(operation)
        if count is not None:
          return body.times(count)
        return body + ProgramFlops(flops=0.0, unknown_loops=1 if body.flops else 0)
      case "stablehlo.case" | "stablehlo.if":
        branches = [self._region(region) for region in operation.regions]
        return max(branches, key=lambda branch: branch.flops)
      case "sdy.manual_computation":  # shard_map: shapes inside are those of a shard
        axes = re.findall(r'"([^"]+)"', str(operation.attributes["manual_axes"]))
        shards = math.prod(self._axes.get(axis, 1) for axis in axes)
        return self._region(operation.regions[0]).times(shards)
      case _:
        return _NOTHING


def trip_count(loop: Any) -> int | None:
  """How often a `stablehlo.while` of the form `i = a; while i < b: i += c` runs."""
  condition = loop.regions[0].blocks[0]
  compare = _definition(list(condition.operations)[-1].operation.operands[0])
  if compare is None or compare.name != "stablehlo.compare":
    return None
  if "LT" not in str(compare.attributes["comparison_direction"]):
    return None
  counter, limit = compare.operands
  index = _block_argument(counter, condition)
  if index is None:
    return None
  body = loop.regions[1].blocks[0]
  advanced = _definition(list(body.operations)[-1].operation.operands[index])
  if advanced is None or advanced.name != "stablehlo.add":
    return None
  if _block_argument(advanced.operands[0], body) != index:
    return None
  last = _constant(_outside(limit, condition, loop))
  first = _constant(loop.operands[index])
  step = _constant(_outside(advanced.operands[1], body, loop))
  if last is None or first is None or step is None or step < 1:
    return None
  return max(0, -(-(last - first) // step))


def _operations(region: Any) -> Any:
  for block in region.blocks:
    for operation in block.operations:
      yield operation.operation


def _definition(value: Any) -> Any:
  """The operation that computes a value; None for an argument of a block."""
  owner = value.owner
  return getattr(owner, "operation", None) if not hasattr(owner, "arguments") else None


def _block_argument(value: Any, block: Any) -> int | None:
  """The index of a value among the block's arguments; None if it is none of them."""
  for index, argument in enumerate(block.arguments):
    if argument == value:
      return index
  return None


def _outside(value: Any, block: Any, loop: Any) -> Any:
  """What a loop starts an argument with, for a value that is one."""
  index = _block_argument(value, block)
  return value if index is None else loop.operands[index]


def _constant(value: Any) -> int | None:
  operation = _definition(value)
  if operation is None or operation.name != "stablehlo.constant":
    return None
  match = re.search(r"dense<(-?\d+)>", str(operation.attributes["value"]))
  return int(match.group(1)) if match else None


def _shape(value: Any) -> list[int]:
  return list(value.type.shape)


def _dot_flops(operation: Any) -> float:
  numbers = str(operation.attributes["dot_dimension_numbers"])
  match = re.search(r"lhs_contracting_dimensions = \[([\d, ]*)\]", numbers)
  lhs = _shape(operation.operands[0])
  contracted = [int(i) for i in match.group(1).split(",") if i.strip()] if match else []
  terms = math.prod(lhs[i] for i in contracted)
  return 2.0 * math.prod(_shape(operation.results[0])) * terms


def _convolution_flops(operation: Any) -> float:
  # "[b, 0, f]x[0, i, o]->[b, 0, f]": the kernel without its output features is what
  # one output element sums over.
  numbers = str(operation.attributes["dimension_numbers"])
  kernel_axes = numbers.split("x[")[1].split("]")[0].replace(" ", "").split(",")
  kernel = _shape(operation.operands[1])
  terms = math.prod(kernel) / kernel[kernel_axes.index("o")]
  return 2.0 * math.prod(_shape(operation.results[0])) * terms


# FLOPs a pair of query and key of splash attention's kernels, in units of H: two for
# each product that has the pair. The backward ones compute the scores again.
_SPLASH = {"fwd": 4.0, "dq": 6.0, "dkv": 8.0}


def _kernel_flops(operation: Any) -> float:
  """Of splash attention with blocks of equal sides, causal or windowed: it computes
  whole blocks, and skips those that no query looks into."""
  known = operation.attributes
  name = str(known["kernel_name"]) if "kernel_name" in known else ""
  phase = re.search(r"splash_mha_(fwd|dq|dkv)", name)
  if phase is None:
    return 0.0
  # First come tables by blocks, [1 or N, own, other]: the other side is as long as the
  # most blocks that one of its own meets. Then queries, [B, N, T, H], without a B of 1,
  # and keys, [B, K, S, H].
  table = _shape(operation.operands[0])
  own, most = (table[2], table[1]) if phase[1] == "dkv" else (table[1], table[2])
  floats = (x for x in operation.operands if "f" in str(x.type.element_type))
  queries, keys = _shape(next(floats)), _shape(next(floats))
  size = (keys if phase[1] == "dkv" else queries)[-2] // own
  # Fewer than there are: a window. Queries are all of a row's, or the share of a device
  # (the mesh axis cp), which has its share of the work.
  blocks = keys[-2] // size
  if most == (queries if phase[1] == "dkv" else keys)[-2] // size:
    most = blocks
  pairs = sum(min(i + 1, most) for i in range(blocks)) * size**2
  pairs *= queries[-2] / keys[-2]
  return _SPLASH[phase[1]] * math.prod(queries[:-2]) * queries[-1] * pairs


def _ragged_dot_flops(operation: Any) -> float:
  # Rows (m, k) each meet one of the (g, k, n) matrices.
  rows, matrices = _shape(operation.operands[0]), _shape(operation.operands[1])
  said = re.search(rf'{SHARE} = "([\d.e-]+)"', str(operation.attributes))
  share = float(said[1]) if said else 1.0
  return 2.0 * math.prod(rows) * matrices[-1] * share
