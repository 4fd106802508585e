import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from tunix.sft.config import TrainingInput
from tunix.sft.steps import windows


@dataclasses.dataclass
class Unknown:
  input_tokens: Any
  extra: Any = None


class Named(NamedTuple):
  input_tokens: Any


def rows(n, length=3):
  return {"input_tokens": np.ones((n, length)), "input_mask": np.ones((n, length))}


def test_fields_of_all_kinds_of_batches():
  for batch in ({"input_tokens": 1}, TrainingInput(1, 2), Named(1)):
    assert windows.field(batch, "input_tokens") == 1
    assert windows.field(batch, "nothing") is None


def test_a_dataclass_that_jax_does_not_know_becomes_a_dict():
  batch = windows.as_pytree(Unknown(np.ones(3)))
  assert isinstance(batch, dict) and list(batch) == ["input_tokens"]
  known = TrainingInput(np.ones(3), np.ones(3))
  assert windows.as_pytree(known) is known


@pytest.mark.parametrize("batch", ["text", {"a": "text"}, [], None])
def test_a_batch_without_arrays_is_refused(batch):
  with pytest.raises(TypeError, match="holds no arrays"):
    windows.as_pytree(batch)


def test_padding_adds_zero_rows_and_leaves_scalars():
  out = windows.pad_rows({**rows(2), "scale": np.float32(3)}, 4)
  assert out["input_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
  assert out["scale"] == 3
  same = rows(4)
  assert windows.pad_rows(same, 4) is same


def test_splitting_keeps_every_row_once():
  batch = {"x": np.arange(12).reshape(6, 2), "scale": np.float32(3)}
  parts = windows.split_rows(batch, 3)
  np.testing.assert_array_equal(np.concatenate([p["x"] for p in parts]), batch["x"])
  assert all(part["scale"] == 3 for part in parts)
  with pytest.raises(ValueError, match="6 rows cannot be cut into 4 micro-batches"):
    windows.split_rows(batch, 4)


def test_a_short_window_is_filled_with_weight_zero():
  (only,) = windows.group([rows(2), rows(2)], 4)
  assert len(only.batches) == 4 and only.weights.tolist() == [1, 1, 0, 0]


def test_groups_are_by_shape_and_dtype():
  half = {k: v.astype(np.float16) for k, v in rows(2).items()}
  batches = [rows(3), rows(2), half, rows(2)]
  groups = windows.group(batches, 4)
  assert sorted(len(g.batches) for g in groups) == [1, 1, 2]
  # The order of the data is no matter: another one is the same program.
  forms = [jax.tree.map(np.shape, g) for g in groups]
  again = windows.group(batches[::-1], 4)
  assert [jax.tree.map(np.shape, g) for g in again] == forms


def test_positions_that_a_model_does_not_take():
  counted = {**rows(2), "positions": np.tile(np.arange(3), (2, 1))}
  windows.check_positions([counted, rows(2)], ["tokens"])
  other = {**counted, "positions": counted["positions"] + 1}
  with pytest.raises(ValueError, match="takes no positions"):
    windows.check_positions([other], ["tokens"])
  windows.check_positions([other], ["tokens", "positions"])
  padding = {**other, "segment_ids": np.zeros((2, 3), np.int32)}
  windows.check_positions([padding], ["tokens"])


def test_a_dataclass_is_cut_into_dataclasses():
  @dataclasses.dataclass
  class Batch:
    tokens: np.ndarray
    name: str = "x"

  first, second = windows.split_rows(Batch(np.arange(4)[:, None]), 2)
  assert (first.name, first.tokens.tolist()) == ("x", [[0], [1]])
  assert second.tokens.tolist() == [[2], [3]]


def test_no_trained_token_is_an_error_that_says_why():
  empty = {**rows(2), "input_mask": np.zeros((2, 3))}
  first_only = {**empty, "input_mask": np.eye(1, 3).repeat(2, axis=0)}
  for batch in (empty, first_only):
    with pytest.raises(ValueError, match="4 rows has no trained token"):
      windows.check_trained([batch, batch])
  windows.check_trained([empty, rows(2)])
  windows.check_trained([{"input_tokens": np.ones((2, 3))}])


def test_packed_rows_need_a_model_that_keeps_them_apart():
  packed = {**rows(1), "segment_ids": np.array([[1, 2, 0]])}
  padded = {**rows(1), "segment_ids": np.array([[1, 1, 0]])}
  with pytest.raises(ValueError, match=r"packed .* takes neither segment_ids nor"):
    windows.check_packed([padded, packed], ["tokens"])
  windows.check_packed([padded, rows(1)], ["tokens"])
  windows.check_packed([packed], ["tokens", "segment_ids"])
  windows.check_packed([packed], ["a", "b", "c", "attention_mask"])


def test_tokens_are_counted_with_padding():
  assert windows.token_count([rows(2), rows(3), {"x": np.ones(9)}], ()) == 15
