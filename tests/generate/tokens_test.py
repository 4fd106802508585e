"""Every column of `Tokens` is joined, chained, cut, padded and saved by the table."""

import dataclasses

import numpy as np
import pytest

from tunix.generate import tokens as lib
from tunix.generate.tokens import COLUMNS, Completion, Delta, Tokens

DEPTH = {
  "top_ids": (3,),
  "top_logps": (3,),
  "head_ids": (2,),
  "head_probs": (2,),
  "logits": (5,),
  "routes": (2, 2),
}


def made(rng, prompt, count, kind=Tokens, **fields):
  """Tokens with random values in every column."""
  columns = {}
  for name, form in COLUMNS.items():
    size = count + len(prompt) * form.covers_prompt
    values = rng.integers(1, 99, (size, *DEPTH.get(name, ())))
    columns[name] = values.astype(form.dtype or np.uint8)
  columns["is_drawn"][:] = True
  return kind(prompt=np.array(prompt, np.int32), **columns, **fields)


def assert_same(a, b):
  for name in ("prompt", *COLUMNS):
    x, y = getattr(a, name), getattr(b, name)
    np.testing.assert_array_equal(x, y, err_msg=name)
    assert x.dtype == y.dtype, name


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 0, 1, 1), (0, 4)])
def test_a_completion_has_the_columns_of_its_deltas(sizes):
  rng = np.random.default_rng(0)
  whole = made(rng, [5, 6], 4)
  deltas, start = [], 0
  for size in sizes:
    part = {
      name: x if COLUMNS[name].covers_prompt else x[start : start + size]
      for name, x in whole.columns().items()
    }
    deltas.append(Delta(sample=2, text="ab"[:size], prompt=whole.prompt, **part))
    start += size
  deltas[-1] = dataclasses.replace(deltas[-1], finish_reason="eos")
  joined = lib.joined(deltas)
  assert_same(joined, whole)
  assert (joined.number, joined.finish_reason) == (2, "eos")
  assert joined.text == "".join(delta.text for delta in deltas)


def test_columns_that_no_delta_knows_are_none():
  none = Delta(sample=0, finish_reason="cancelled")
  assert list(lib.joined([none]).columns()) == ["ids"]


def test_a_cut_keeps_the_first_tokens_of_every_column():
  whole = made(np.random.default_rng(0), [5, 6], 4, Completion, finish_reason="eos")
  cut = whole.cut(3)
  for name, x in cut.columns().items():
    size = 5 if COLUMNS[name].covers_prompt else 3
    np.testing.assert_array_equal(x, getattr(whole, name)[:size])
  assert cut.finish_reason == "eos"
  assert_same(whole.cut(9), whole)


def test_turns_are_chained_and_what_was_read_between_them_is_zero():
  rng = np.random.default_rng(0)
  first = made(rng, [5, 6], 2)
  second = made(rng, [5, 6, *first.ids, 7, 8, 9], 1)
  row = lib.chained([first, second])
  assert row.prompt.tolist() == [5, 6]
  assert row.ids.tolist() == [*first.ids, 7, 8, 9, *second.ids]
  assert row.is_drawn.tolist() == [True, True, False, False, False, True]
  for name in COLUMNS.keys() - {"ids", "is_drawn", "routes"}:
    x, a, b = (getattr(t, name) for t in (row, first, second))
    np.testing.assert_array_equal(x, [*a, *np.zeros((3, *a.shape[1:])), *b])
  # The last token of the first turn is run in the second one.
  np.testing.assert_array_equal(row.routes[:3], first.routes[:3])
  np.testing.assert_array_equal(row.routes[3:], second.routes[3:])
  unknown = dataclasses.replace(second, versions=None)
  assert lib.chained([first, unknown]).versions is None


def test_a_long_prompt_goes_on_in_the_tokens():
  row = made(np.random.default_rng(0), [5, 6, 7], 2)
  moved = row.with_prompt_of(1)
  assert (moved.prompt.tolist(), moved.ids[:2].tolist()) == ([5], [6, 7])
  assert moved.is_drawn.tolist() == [False, False, True, True]
  np.testing.assert_array_equal(moved.routes, row.routes)  # of the same tokens
  np.testing.assert_array_equal(moved.logps, [0, 0, *row.logps])
  assert row.with_prompt_of(3) is row


@pytest.mark.parametrize("name", COLUMNS)
def test_padding_is_zero_around_every_column(name):
  rng = np.random.default_rng(0)
  rows = [made(rng, [5, 6], 3), Tokens(prompt=np.zeros(1, np.int32)), made(rng, [7], 1)]
  before, after = lib.padded(rows, name, 4, 5)
  x, y = getattr(rows[0], name), getattr(rows[2], name)
  start, other = (2, 1) if COLUMNS[name].covers_prompt else (0, 0)
  np.testing.assert_array_equal(after[0, :3], x[start:])
  np.testing.assert_array_equal(after[2, :1], y[other:])
  assert not after[0, 3:].any() and not after[1].any() and not after[2, 1:].any()
  assert after.shape[:2] == (3, 5) and after.dtype == x.dtype
  if start:
    np.testing.assert_array_equal(before[0, 2:], x[:2])
    np.testing.assert_array_equal(before[2, 3:], y[:1])
    assert not before[0, :2].any() and not before[1].any() and not before[2, :3].any()
  assert lib.padded([Tokens()], "routes", 4, 5) is None


def test_saved_columns_return():
  whole = made(np.random.default_rng(0), [5, 6], 3)
  again = Tokens.of_saved(whole.saved())
  known = {name for name, form in COLUMNS.items() if form.saved}
  assert {n for n, x in again.columns().items() if x is getattr(whole, n)} == known
  names = {"ids", "logps", "versions", "routes", "head_ids", "head_probs"}
  assert whole.saved().keys() == names
