import math

import jax.numpy as jnp
import numpy as np
import pytest

from tunix.sft.metrics.records import (
  Mode,
  StepRecords,
  as_number,
  decode,
  encode,
  split_event,
)


@pytest.mark.parametrize(
  ("event", "expected"),
  [
    ("train/loss", ("train", "loss")),
    ("actor/eval/loss", ("eval", "actor/loss")),
    ("eval/train/loss", ("train", "eval/loss")),
    ("a/b/train/rewards/chosen", ("train", "a/b/rewards/chosen")),
    ("loss", (None, "loss")),
    ("actor/train", (None, "actor/train")),
  ],
)
def test_split_event(event, expected):
  assert split_event(event) == expected


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    (2, 2),
    (2.5, 2.5),
    (True, 1),
    (np.int64(2**60 + 1), 2**60 + 1),
    (np.float32(0.1), 0.10000000149011612),
    (jnp.bfloat16(0.5), 0.5),
    (jnp.array([3.0]), 3.0),
  ],
)
def test_as_number(value, expected):
  number = as_number("loss", value)
  assert number == expected
  assert type(number) is type(expected)


def test_as_number_refuses_what_is_no_scalar():
  with pytest.raises(ValueError, match=r"'loss' has shape \(2,\)"):
    as_number("loss", [1.0, 2.0])
  with pytest.raises(TypeError, match="'note' is 'hello'"):
    as_number("note", "hello")


def test_encode_and_decode():
  for value in (1.5, math.inf, -math.inf, math.nan):
    assert repr(decode(encode(value))) == repr(value)
  assert encode(math.nan) == "NaN"


def test_records_leave_in_the_order_in_which_their_steps_were_opened():
  records = StepRecords(1)
  assert records.add(5, "eval", "loss", 1.0) == []
  assert records.add(5, "train", "loss", 2.0) == []
  done = records.add(3, "train", "loss", 3.0)
  assert [(r.step, r.mode, r.values) for r in done] == [
    (5, "train", {"loss": 2.0}),
    (5, "eval", {"loss": 1.0}),
  ]
  assert [r.step for r in records.release_all()] == [3]
  assert records.release_all() == []


def test_mode_is_its_string():
  assert str(Mode.TRAIN) == "train" and {Mode.EVAL: 1}["eval"] == 1
