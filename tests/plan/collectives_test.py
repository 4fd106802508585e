"""Collectives of compiled programs, counted and weighed by hand."""
# ruff: noqa: E501 (lines of a program)

import pytest

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

ENTRY %main.1_spmd (p: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]) while(%init), condition=%cond, body=%body
  %v = (s32[], f32[8,4]) while(%init), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %u = (s32[], f32[8,4]) while(%init), condition=%data_cond, body=%data_body
  %all-reduce.1 = (f32[10]{0}, bf16[6]{0}) all-reduce(%a, %b), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %reduce-scatter.1 = f32[2]{0} reduce-scatter(%a), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%sum
  %all-gather-start.1 = (f32[2]{0}, f32[16]{0}) all-gather-start(%c), channel_id=4, replica_groups=[1,8]<=[8]
  ROOT %all-to-all.1 = pred[64]{0} all-to-all(%d), channel_id=5
}

%inner (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %all-to-all.2 = u8[100]{0} all-to-all(%d), channel_id=6, replica_groups=[4,2]<=[8]
}
"""


@pytest.fixture(scope="module")
def found():
  return collectives.read(PROGRAM, devices=8)


def test_loops_count_as_often_as_they_run_and_pieces_once(found):
  assert collectives.counts(found) == {
    "all-gather": 5 + 1,  # up to the constant of the condition; and one started
    "all-reduce": 1,
    "reduce-scatter": 1,
    "all-to-all": 3 + 1,  # as the compiler notes
    "collective-permute": 1,  # nobody knows how often
  }


def test_bytes_that_a_device_must_receive(found):
  received = {(one.kind, one.shape): one.received for one in found}
  assert received == {
    ("all-gather", "f32[8,4]"): 5 * 128 * 3 / 4,
    ("all-gather", "f32[16]"): 64 * 7 / 8,
    ("all-reduce", "f32[10], bf16[6]"): 2 * 52 / 2,
    ("reduce-scatter", "f32[2]"): 8 * 7,
    ("all-to-all", "pred[64]"): 64 * 7 / 8,
    ("all-to-all", "u8[100]"): 3 * 100 / 2,
    ("collective-permute", "bf16[16]"): 32,
  }
  groups = {one.shape: one.group for one in found}
  assert groups["f32[8,4]"] == 4 and groups["f32[10], bf16[6]"] == 2
  assert groups["pred[64]"] == 8  # nobody is named: all of them
