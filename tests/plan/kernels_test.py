"""Kernels and branches of programs for GPUs."""

import importlib.util

import pytest

from tunix.cli import config as config_lib
from tunix.cli.commands import plan
from tunix.perf.hlo_text import Program
from tunix.plan import kernels
from tunix.plan.engine import DECODE, MIXED
from tunix.plan.kernels import Launches

TEXT = """\
%few (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  ROOT %c = f32[2]{0} copy(%a)
}

%many (b: f32[2]) -> f32[2] {
  %b = f32[2]{0} parameter(0)
  %d = f32[2]{0} fusion(%b), kind=kLoop, calls=%fused
  ROOT %e = f32[2]{0} custom-call(%d), custom_call_target="gemm"
}

%body (s: (s32[], f32[2])) -> (s32[], f32[2]) {
  %s = (s32[], f32[2]{0}) parameter(0)
  %x = f32[2]{0} get-tuple-element(%s), index=1
  %y = f32[2]{0} conditional(%p, %x, %x), branch_computations={%few, %many}
  %z = f32[2]{0} all-reduce-start(%y), replica_groups={{0,1}}, to_apply=%sum
  %w = f32[2]{0} all-reduce-done(%z)
  ROOT %t = (s32[], f32[2]{0}) tuple(%i, %w)
}

%condition (s: (s32[], f32[2])) -> pred[] {
  %s.1 = (s32[], f32[2]{0}) parameter(0)
  ROOT %r = pred[] fusion(%s.1), kind=kLoop, calls=%less
}

ENTRY %main (v: f32[2]) -> f32[2] {
  %v = f32[2]{0} parameter(0)
  %u = (s32[], f32[2]{0}) while(%v), condition=%condition, body=%body{TRIPS}
  %q = f32[2]{0} get-tuple-element(%u), index=1
  ROOT %o = f32[2]{0} call(%q), to_apply=%many
}
"""
TRIPS = ', backend_config={"known_trip_count":{"n":"5"}}'


@pytest.mark.parametrize(("trips", "passes"), [(TRIPS, 5), ("", 1)])
def test_loops_branches_and_calls(trips, passes):
  program = Program(TEXT.replace("{TRIPS}", trips), is_compiled=True)
  # A pass launches the two of the longer branch, and the all-reduce.
  assert kernels.count(program) == Launches(kernels=3 * passes + 2, branches=passes)


def test_the_longest_ways_of_a_branch_count():
  ways = "%few, %many", "%many, %nested"
  inner = "  %y = f32[2]{0} conditional(%p, %x, %x), branch_computations={%few, %gone}"
  text = TEXT.replace("{TRIPS}", "").replace(ways[0], ways[1])
  program = Program(
    f"%nested (x: f32[2]) -> f32[2] {{\n{inner}\n}}\n\n{text}", is_compiled=True
  )
  assert kernels.count(program) == Launches(kernels=5, branches=2)
  assert kernels.count(Program("", is_compiled=True)) == Launches()


@pytest.mark.slow
def test_a_round_of_the_engine_launches_few_kernels():
  """The padded sampler launches 17 a layer, and 29 others (docs/performance.md)."""
  if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip("XLA's compiler for GPUs is missing: pip install 'tunix[plan-gpu]'")
  keys = {
    "job": "grpo",
    "model.name": "qwen3_0p6b",
    "model.dtype": "bfloat16",
    "model.param_dtype": "bfloat16",
    "algorithm.num_generations": 8,
    "training.global_batch_size": 8,
    "rollout.max_prompt_length": 256,
    "rollout.max_tokens_to_generate": 256,
  }
  found = {}
  for layers in (2, 4):
    given = keys | {"model.args": f"{{num_layers: {layers}}}"}
    config = config_lib.load([f"--{key}={value}" for key, value in given.items()])
    planned = plan.plan(config, "h200:1", {"fsdp": -1})
    # A large vocabulary of a shallow model, whose prompts need no logits.
    assert planned.mfu is not None and 0.2 < planned.mfu <= 1
    found[layers] = {one.name: one for one in planned.programs}
    for name in (DECODE, MIXED):
      assert found[layers][name].branches == 0
  per_layer = {
    name: (found[4][name].kernels - found[2][name].kernels) / 2
    for name in (DECODE, MIXED)
  }
  assert per_layer[DECODE] <= 17 and per_layer[MIXED] <= 27
  assert found[2][DECODE].kernels - 2 * per_layer[DECODE] <= 50
