"""Sampling of tokens: each row by its own rules, compared with plain loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.generate import distributions
from tunix.generate.drawing import filters
from tunix.generate.engine.device import token_sampling
from tunix.generate.engine.device.token_sampling import Rules
from tunix.generate.engine.run import arrays
from tunix.generate.sizes import batching

VOCAB = 77  # the last word of a mask is filled in part
USES = frozenset((*arrays.FLAGS, "prompts"))
OFF = {"temperature": 0.0, **filters.OFF}


def rules_of(rows, uses=USES):
  """Rules of rows that are given as dicts, as `arrays.rules_of` makes them."""
  column = lambda name, dtype: np.array([{**OFF, **r}[name] for r in rows], dtype)
  biases = [r.get("bias", {}) for r in rows]
  ids = np.full((len(rows), 4), batching.NO_TOKEN, np.int32)
  values = np.zeros((len(rows), 4), np.float32)
  for n, bias in enumerate(biases):
    ids[n, : len(bias)], values[n, : len(bias)] = list(bias), list(bias.values())
  keys = [jax.random.key_data(jax.random.key(r.get("seed", 0))) for r in rows]
  drawing = any(r.get("temperature") for r in rows)
  filtered = any(r.keys() & {"top_k", "top_p", "min_p"} for r in rows)
  return Rules(
    keys=np.stack(keys),
    rows=np.array([r.get("row", 0) for r in rows], np.int32),
    temperature=column("temperature", np.float32),
    filter_values={name: column(name, off.dtype) for name, off in filters.OFF.items()},
    bias_ids=ids,
    bias=values,
    draws=np.bool_(drawing),
    filters=np.bool_(filtered),
    biases=np.bool_(any(biases)),
    scores=np.bool_(True),
    tops=np.bool_(True),
    uses=uses,
  )


@functools.partial(jax.jit, static_argnames="tops")
def chosen_of(logits, rules, index, allowed=None, tops=3):
  return token_sampling.choose(logits, rules, index, allowed, tops)


def choose(*args):
  return chosen_of(*args)[0]


def logits_of(rows, seed=0, spread=3.0):
  return spread * jax.random.normal(jax.random.key(seed), (rows, VOCAB))


ROWS = [
  {},
  {"temperature": 1.0, "seed": 1},
  {"temperature": 0.7, "seed": 2, "top_k": 5},
  {"temperature": 1.3, "seed": 3, "top_p": 0.8},
  {"temperature": 1.0, "seed": 4, "min_p": 0.2},
  {"temperature": 0.9, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
  {"bias": {3: 50.0}},
  {"temperature": 1.0, "seed": 6, "bias": {4: 2.0, 9: -np.inf}},
  {"temperature": 1.0, "seed": 1, "row": 1},
]


def branches(uses):
  """Number of branches in the program of rows with these flags."""
  rules, index = rules_of(ROWS, frozenset(uses)), np.zeros(len(ROWS), np.int32)
  traced = jax.make_jaxpr(lambda x: token_sampling.choose(x, rules, index)[0])
  return str(traced(logits_of(len(ROWS)))).count("cond[")


@pytest.mark.parametrize(
  "off", [{}, {"draws": np.bool_(False)}, {"scores": np.bool_(False)}], ids=str
)
def test_a_gpu_draws_the_same_with_fewer_branches(off, monkeypatch):
  logits, index = logits_of(len(ROWS)), np.arange(len(ROWS), dtype=np.int32)
  uses = {"draws", "scores"}
  given = dataclasses.replace(rules_of(ROWS, frozenset(uses)), **off)
  want = choose(logits, given, index)
  assert branches(uses) == 3
  platform = lambda: "gpu"
  monkeypatch.setattr(token_sampling.mesh_lib, "context_platform", platform)
  assert not branches(uses) and branches(USES) > 2  # biases, filters, tops
  got, _ = jax.jit(token_sampling.choose, static_argnums=4)(
    logits, given, index, None, 3
  )
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_row_depends_on_its_own_rules_only():
  """A row among others draws what it draws among rows without rules, to the bit."""
  logits = logits_of(len(ROWS), spread=9.0)  # tails that a rounded share of 1 lacks
  index = np.arange(len(ROWS), dtype=np.int32)
  together = choose(logits, rules_of(ROWS), index)
  for n, row in enumerate(ROWS):
    rows = [row if n == other else {} for other in range(len(ROWS))]
    alone = choose(logits, rules_of(rows), index)
    for name in ("ids", "logps", "sampling_logps", "top_ids", "top_logps"):
      a, b = getattr(together, name)[n], getattr(alone, name)[n]
      np.testing.assert_array_equal(a, b, err_msg=f"{name} of row {n}")


def test_a_program_without_rules_chooses_alike():
  """What is not compiled changes nothing for rows that do not use it."""
  logits, index = logits_of(3), np.arange(3, dtype=np.int32)
  rows = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.5, "seed": 1}]
  wide = choose(logits, rules_of(rows), index)
  narrow = choose(logits, rules_of(rows, frozenset(("draws", "scores"))), index)
  np.testing.assert_array_equal(wide.ids, narrow.ids)
  np.testing.assert_array_equal(wide.logps, narrow.logps)
  np.testing.assert_array_equal(wide.sampling_logps, narrow.sampling_logps)
  assert wide.top_logps[0, 0] < 0 and not np.any(narrow.top_logps)
  greedy = choose(logits, rules_of([{}] * 3, frozenset()), index)
  np.testing.assert_array_equal(greedy.ids, np.argmax(logits, axis=1))


@pytest.mark.parametrize("row", ROWS[1:6] + ROWS[7:8], ids=str)
def test_draws_follow_the_distribution(row):
  count = 4000
  logits = np.asarray(logits_of(1, seed=3, spread=1.5)[0])
  rules = rules_of([row])
  many = token_sampling.repeated(rules, count)
  chosen = choose(
    np.broadcast_to(logits, (count, VOCAB)), many, np.arange(count, dtype=np.int32)
  )
  biased = np.array(logits, np.float64)
  for token, value in row.get("bias", {}).items():
    biased[token] += value
  given = {k: v for k, v in row.items() if k in OFF}
  chances = distributions.exact(biased, **given)
  seen = np.bincount(chosen.ids, minlength=VOCAB)
  assert distributions.p_value(seen, chances) > 1e-3
  # The log-probs are those of the model, and of what was drawn from.
  own = jax.nn.log_softmax(logits)[chosen.ids]
  np.testing.assert_allclose(chosen.logps, own, atol=1e-5)
  np.testing.assert_allclose(
    chosen.sampling_logps, np.log(chances[chosen.ids]), atol=1e-4
  )


def test_the_draw_depends_on_key_row_and_number():
  logits = np.broadcast_to(logits_of(1), (4, VOCAB))
  rows = [
    {"temperature": 3.0, "seed": s, "row": r} for s, r in ((1, 0), (2, 0), (1, 1))
  ]
  draw = lambda row, number: tuple(
    choose(
      logits,
      token_sampling.repeated(rules_of([row]), 4),
      np.arange(4, dtype=np.int32) + number,
    ).ids.tolist()
  )
  first = draw(rows[0], 0)
  assert draw(rows[0], 0) == first
  assert draw(rows[0], 1)[:3] == first[1:]
  assert len({draw(row, number) for row in rows for number in (0, 9)}) == 6


def test_masks_by_hand():
  logits = np.zeros((3, VOCAB), np.float32)
  logits[:, 40] = 5
  allowed = np.full((3, 3), 2**32 - 1, np.uint32)
  allowed[1] = 0, 0, 1 << (76 - 64)  # the last id alone
  allowed[2] = 1 << 31, 1, 0  # 31 and 32
  rows = [{}, {}, {"bias": {32: 1.0}}]
  chosen, finite = chosen_of(logits, rules_of(rows), np.zeros(3, np.int32), allowed)
  assert chosen.ids.tolist() == [40, 76, 32]
  assert np.all(finite)
  # The log-probs stay those of the model.
  own = jax.nn.log_softmax(logits[0])
  np.testing.assert_allclose(chosen.logps, own[np.array([40, 76, 32])], atol=1e-6)
  drawn = rules_of([{"temperature": 1.0, "seed": 2}] * 3)
  at = lambda number: np.full(3, number, np.int32)
  rows = [choose(logits, drawn, at(n), allowed).ids.tolist() for n in range(20)]
  seen = {(second, third) for _, second, third in rows}
  assert seen == {(76, 31), (76, 32)}


def bad_logits():
  logits = np.array(logits_of(6))
  logits[1, 5] = np.nan
  logits[2, 5] = np.inf
  logits[3, 5] = -np.inf  # one id that the model never draws
  logits[4] = -np.inf
  return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_concerns_its_row(temperature):
  rows = [{"temperature": temperature, "seed": n} for n in range(6)]
  rows[5] = {**rows[5], "bias": {0: -np.inf}}
  index = np.zeros(6, np.int32)
  allowed = np.full((6, 3), 2**32 - 1, np.uint32)
  allowed[5] = 1, 0, 0  # only what the bias forbids
  chosen, finite = chosen_of(bad_logits(), rules_of(rows), index, allowed)
  assert finite.tolist() == [True, False, False, True, False, False]
  good = choose(logits_of(6), rules_of(rows), index)
  np.testing.assert_array_equal(chosen.ids[0], good.ids[0])
  np.testing.assert_array_equal(chosen.logps[0], good.logps[0])


def test_the_most_likely_tokens():
  logits = logits_of(4)
  ids, values = token_sampling.most_likely(logits, 5)
  logps = np.asarray(jax.nn.log_softmax(logits))
  order = np.argsort(-logps, axis=1)[:, :5]
  np.testing.assert_array_equal(ids, order)
  np.testing.assert_allclose(values, np.take_along_axis(logps, order, 1), atol=1e-5)
  ids, values = token_sampling.most_likely(jnp.array([[1.0, 2.0]]), 4)
  assert ids.tolist() == [[1, 0, 0, 0]] and np.all(values[0, 2:] == -np.inf)


def test_rows_are_repeated_next_to_each_other():
  twice = token_sampling.repeated(rules_of(ROWS), 2)
  np.testing.assert_array_equal(twice.rows, [0] * 16 + [1, 1])
  assert twice.temperature.tolist()[2:6] == [1.0, 1.0, *[np.float32(0.7)] * 2]
  assert twice.keys.shape == (18, 2) and not np.ndim(twice.draws)
