"""Bytes that move while nothing is computed, counted by hand."""
# ruff: noqa: E501 (lines of a program)

import pytest

from tunix.perf.hlo_text import Program
from tunix.plan import exposed

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%scale (param_0: f32[8,128], param_1: f32[4,8,128]) -> f32[8,128] {
  %param_0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %param_1 = f32[4,8,128]{2,1,0:T(8,128)} parameter(1)
  %cut = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%param_1, %i, %zero, %zero), dynamic_slice_sizes={1,8,128}
  %one = f32[8,128]{1,0:T(8,128)} bitcast(%cut)
  ROOT %product = f32[8,128]{1,0:T(8,128)} multiply(%param_0, %one)
}

%matmul (param_0.1: bf16[8,128], param_1.1: bf16[128,128]) -> bf16[8,128] {
  %param_0.1 = bf16[8,128]{1,0:T(8,128)} parameter(0)
  %param_1.1 = bf16[128,128]{1,0:T(8,128)} parameter(1)
  ROOT %conv = bf16[8,128]{1,0:T(8,128)} convolution(%param_0.1, %param_1.1), dim_labels=bf_io->bf
}

%keep (param_0.2: f32[4,8,128], param_1.2: f32[8,128]) -> f32[4,8,128] {
  %param_0.2 = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %param_1.2 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %row = f32[1,8,128]{2,1,0:T(8,128)} bitcast(%param_1.2)
  ROOT %update = f32[4,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%param_0.2, %row, %i, %zero, %zero)
}

%cond (state: (s32[], f32[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (state: (s32[], f32[8,128], f32[4,8,128])) -> (s32[], f32[8,128], f32[4,8,128]) {
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %stack = f32[4,8,128]{2,1,0:T(8,128)} get-tuple-element(%state), index=2
  %scaled = f32[8,128]{1,0:T(8,128)} fusion(%x, %stack), kind=kLoop, calls=%scale
  %near = f32[8,128]{1,0:T(8,128)S(1)} copy(%scaled)
  %kernel = f32[8,128]{1,0:T(8,128)} custom-call(%near), custom_call_target="tpu_custom_call", metadata={kernel
}}, metadata={op_name="splash"}
  %kept = f32[4,8,128]{2,1,0:T(8,128)} fusion(%stack, %scaled), kind=kLoop, calls=%keep
  ROOT %t = (s32[], f32[8,128], f32[4,8,128]) tuple(%i, %scaled, %kept)
}

%small (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %negated = f32[8,128]{1,0:T(8,128)} negate(%p)
}

%large (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %half = f32[8,128]{1,0:T(8,128)} negate(%p)
  ROOT %again = f32[8,128]{1,0:T(8,128)} negate(%half)
}

ENTRY %main (a: bf16[8,128], b: bf16[128,128]) -> f32[8,128] {
  %a = bf16[8,128]{1,0:T(8,128)} parameter(0)
  %b = bf16[128,128]{1,0:T(8,128)} parameter(1)
  %p = bf16[8,128]{1,0:T(8,128)} fusion(%a, %b), kind=kOutput, calls=%matmul
  %g = bf16[64,128]{1,0:T(8,128)} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %copy-start = (bf16[8,128]{1,0:T(8,128)S(1)}, bf16[8,128]{1,0:T(8,128)}, u32[]) copy-start(%a)
  %copy-done = bf16[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %f = f32[8,128]{1,0:T(8,128)} convert(%copy-done)
  %w = (s32[], f32[8,128], f32[4,8,128]) while(%init), condition=%cond, body=%body
  ROOT %c = f32[8,128]{1,0:T(8,128)} conditional(%i, %f, %f), branch_computations={%small, %large}
}
"""

ARRAY = 8 * 128 * 4  # of float32


def test_what_moves_without_a_product():
  entry = ARRAY  # the conversion writes; what it reads lies on the chip already
  scaled = 3 * ARRAY  # x, a slice of the stack, the result
  near = ARRAY  # read, and written to the chip
  kept = 2 * ARRAY  # what is new is read and written, not the stack
  choice = 2 * ARRAY  # the cheaper branch
  program = Program(PROGRAM, is_compiled=True)
  assert exposed.read(program) == entry + 3 * (scaled + near + kept) + choice


COLLECTIVE_IN_A_LOOP = """\
HloModule jit_step, is_scheduled=true

%drive (param_0.3: f32[1,128], param_1.3: f32[8,128], param_2.3: f32[8,128]) -> (f32[8,128], f32[1,128], f32[8,128]) {
  %param_0.3 = f32[1,128]{1,0:T(8,128)} parameter(0)
  %param_1.3 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %param_2.3 = f32[8,128]{1,0:T(8,128)} parameter(2)
  %gathered = f32[8,128]{1,0:T(8,128)} all-gather(%param_0.3), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %negated.1 = f32[8,128]{1,0:T(8,128)} negate(%param_2.3)
  ROOT %t.1 = (f32[8,128]{1,0:T(8,128)}, f32[1,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) tuple(%negated.1, %param_0.3, %gathered)
}

%begin (param_0.4: f32[1,128]) -> (f32[1,128], f32[8,128]) {
  %param_0.4 = f32[1,128]{1,0:T(8,128)} parameter(0)
  %gathered.1 = f32[8,128]{1,0:T(8,128)} all-gather(%param_0.4), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %begun = (f32[1,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) custom-call(%gathered.1), custom_call_target="AsyncCollectiveStart"
}

%cond (state: (s32[], f32[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (state: (s32[], f32[8,128], f32[1,128], f32[8,128])) -> (s32[], f32[8,128], f32[1,128], f32[8,128]) {
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %own = f32[1,128]{1,0:T(8,128)} get-tuple-element(%state), index=2
  %all = f32[8,128]{1,0:T(8,128)} get-tuple-element(%state), index=3
  %driven = (f32[8,128]{1,0:T(8,128)}, f32[1,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) fusion(%own, %all, %x), kind=kLoop, calls=%drive
  ROOT %t.2 = (s32[], f32[8,128], f32[1,128], f32[8,128]) tuple(%i, %x, %own, %all)
}

ENTRY %main (a: f32[1,128]) -> f32[8,128] {
  %a = f32[1,128]{1,0:T(8,128)} parameter(0)
  %start = (f32[1,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) fusion(%a), kind=kLoop, calls=%begin
  ROOT %w = (s32[], f32[8,128], f32[1,128], f32[8,128]) while(%init), condition=%cond, body=%body
}
"""


def test_arrays_of_a_collective_that_a_loop_drives_on_do_not_count_in_each_pass():
  program = Program(COLLECTIVE_IN_A_LOOP, is_compiled=True)
  assert exposed.read(program) == 3 * 2 * ARRAY  # what is negated: read and written


IN_PLACE = "dynamic-update-slice(%param_2.3, %row.1, %i, %zero)"


@pytest.mark.parametrize(
  ("change", "moved"),
  [
    # A row that is negated is written into a stack: an eighth is read and written.
    ({"negate(%param_2.3)": IN_PLACE}, 2 / 8),
    ({"tuple(%negated.1": "tuple(%view"}, 2),
    ({"all-gather(%param_0.3)": "fusion(%param_0.3), kind=kLoop, calls=%inner"}, 2),
  ],
  ids=["in place", "view", "nested"],
)
def test_other_results_beside_a_collective_count_as_ever(change, moved):
  text = COLLECTIVE_IN_A_LOOP.replace("ROOT %t.1", f"{VIEW}\n  ROOT %t.1")
  text = text.replace("  %negated.1", f"{ROW}\n  %negated.1", 1)
  for old, new in change.items():
    assert old in text
    text = text.replace(old, new)
  program = Program(text.replace("%begin (", f"{INNER}\n%begin ("), is_compiled=True)
  assert exposed.read(program) == 3 * moved * ARRAY


ROW = """\
  %cut.1 = f32[1,128]{1,0:T(8,128)} dynamic-slice(%param_2.3, %i, %zero), dynamic_slice_sizes={1,128}
  %row.1 = f32[1,128]{1,0:T(8,128)} negate(%cut.1)"""
VIEW = "  %view = f32[8,128]{1,0:T(8,128)} bitcast(%negated.1)"
INNER = """\
%inner (param_0.5: f32[1,128]) -> f32[8,128] {
  %param_0.5 = f32[1,128]{1,0:T(8,128)} parameter(0)
  ROOT %gathered.2 = f32[8,128]{1,0:T(8,128)} all-gather(%param_0.5), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
}
"""
