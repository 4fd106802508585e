"""Collectives of compiled programs, counted and weighed by hand."""
# ruff: noqa: E501 (lines of a program)

import pytest

from tunix.perf.hlo_text import Program
from tunix.plan import collectives

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%cond (state: (s32[], f32[8,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%piece (x: f32[2,4]) -> f32[8,4] {
  ROOT %all-gather.2 = f32[8,4]{1,0:T(8,128)} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %all-gather.1 = f32[8,4]{1,0:T(8,128)} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %fusion = f32[8,4] fusion(%x), kind=kLoop, calls=%piece
  ROOT %t = (s32[], f32[8,4]) tuple(%i, %fusion)
}

%data_cond (state: (s32[], f32[8,4])) -> pred[] {
  ROOT %go = pred[] get-tuple-element(%state), index=0
}

%data_body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %collective-permute.1 = bf16[16]{0} collective-permute(%y), channel_id=9, source_target_pairs={{0,1},{1,0}}
}

%kernel_cond (state: (s32[])) -> pred[] {
  %most = s32[] constant(2)
  ROOT %lt.1 = pred[] compare(%i, %most), direction=LT
}

%kernel_body (state: (s32[])) -> (s32[]) {
  %splash = f32[8] custom-call(%q), custom_call_target="tpu_custom_call", metadata={kernel="
  %inner = {
}}, metadata={op_name="splash"}
  %all-gather.7 = f32[6]{0} all-gather(%z), channel_id=10, replica_groups=mesh['a'=2,'b'=3] {'b'}, dimensions={0}
  %all-gather.8 = f32[8]{0} all-gather(%z), channel_id=11, replica_groups=mesh['a'=4,'b'=2] {'a':(2)2,'b'}, dimensions={0}
}

ENTRY %main.1_spmd (p: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]) while(%init), condition=%cond, body=%body
  %v = (s32[], f32[8,4]) while(%init), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %u = (s32[], f32[8,4]) while(%init), condition=%data_cond, body=%data_body
  %x = (s32[]) while(%init), condition=%kernel_cond, body=%kernel_body
  %all-reduce.1 = (f32[10]{0}, bf16[6]{0}) all-reduce(%a, %b), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %reduce-scatter.1 = f32[2]{0} reduce-scatter(%a), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%sum
  %all-gather-start.1 = (f32[2]{0}, f32[16]{0}) all-gather-start(%c), channel_id=4, replica_groups=[1,8]<=[8]
  %fusion.1 = f32[16]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.4
  ROOT %all-to-all.1 = pred[64]{0} all-to-all(%d), channel_id=5
}

%all-reduce-scatter.4 (a: f32[64]) -> f32[16] {
  %all-reduce.9 = f32[64]{0} all-reduce(%a), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  ROOT %slice = f32[16]{0} dynamic-slice(%all-reduce.9, %i), dynamic_slice_sizes={16}
}

%inner (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %all-to-all.2 = u8[100]{0} all-to-all(%d), channel_id=6, replica_groups=[4,2]<=[8]
}
"""


@pytest.fixture(scope="module")
def found():
  return collectives.read(Program(PROGRAM, is_compiled=True), devices=8)


def test_loops_count_as_often_as_they_run_and_pieces_once(found):
  assert collectives.counts(found) == {
    # Up to the constant of the condition, one started, and two behind a kernel's text.
    "all-gather": 5 + 1 + 2 * 2,
    "all-reduce": 1,
    "reduce-scatter": 1 + 1,
    "all-to-all": 3 + 1,  # as the compiler notes
    "collective-permute": 1,  # nobody knows how often
  }


STEPPED = """\
%cond (state: (u32[], f32[4])) -> pred[] {
  %state = (u32[], f32[4]) parameter(0)
  %i = u32[] get-tuple-element(%state), index=0
  %limit = u32[] constant(9)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (state: (u32[], f32[4])) -> (u32[], f32[4]) {
  %state.1 = (u32[], f32[4]) parameter(0)
  %i.1 = u32[] get-tuple-element(%state.1), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%i.1, %two)
  %x = f32[4] get-tuple-element(%state.1), index=1
  %y = f32[4] all-gather(%x), channel_id=1
  ROOT %out = (u32[], f32[4]) tuple(%next, %y)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x.1 = f32[4] parameter(0)
  %first = u32[] constant(START)
  %init = (u32[], f32[4]) tuple(%first, %x.1)
  %loop = (u32[], f32[4]) while(%init), condition=%cond, body=%body
  ROOT %done = f32[4] get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(("start", "trips"), [(0, 5), (3, 3), (9, 0)])
def test_a_loop_starts_anywhere_and_steps_by_more_than_one(start, trips):
  """The TPU compiler steps by 2 through products that it cuts into windows."""
  program = Program(STEPPED.replace("START", str(start)), is_compiled=True)
  (gather,) = collectives.read(program, devices=2)
  assert gather.count == trips


def test_bytes_that_a_device_must_receive(found):
  received = {(one.kind, one.shape): one.received for one in found}
  assert received == {
    ("all-gather", "f32[8,4]"): 5 * 128 * 3 / 4,
    ("all-gather", "f32[16]"): 64 * 7 / 8,
    ("all-gather", "f32[6]"): 2 * 24 * 2 / 3,  # over the axis of three
    ("all-gather", "f32[8]"): 2 * 32 * 3 / 4,  # over half of one axis and the other
    ("all-reduce", "f32[10], bf16[6]"): 2 * 52 / 2,
    ("reduce-scatter", "f32[2]"): 8 * 7,
    ("reduce-scatter", "f32[64]"): 64 * 3,  # as the TPU compiler writes one
    ("all-to-all", "pred[64]"): 64 * 7 / 8,
    ("all-to-all", "u8[100]"): 3 * 100 / 2,
    ("collective-permute", "bf16[16]"): 32,
  }
  groups = {one.shape: one.group for one in found}
  assert groups["f32[8,4]"] == 4 and groups["f32[10], bf16[6]"] == 2
  assert groups["pred[64]"] == 8  # nobody is named: all of them


def test_what_nothing_else_runs_beside(found):
  waits = {one.shape for one in found if one.waits}
  assert "f32[16]" not in waits  # started, and done later
  assert "f32[8,4]" not in waits  # one of its pieces is in a fusion
  assert {"f32[64]", "f32[10], bf16[6]", "bf16[16]"} <= waits
