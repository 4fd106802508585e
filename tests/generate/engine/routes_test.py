"""Routes that the engine and the padded sampler record, against one scoring pass."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate.toy_ids import Ids
from tests.models.transformer.experts.routing_test import model
from tunix.generate import scoring
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.engine_sampler import EngineSampler
from tunix.generate.sampler import Sampler
from tunix.models.transformer.experts import route_records

TOKENS = 9
COMMON = np.arange(1, 10, dtype=np.int32)
PROMPTS = [COMMON, np.array([*COMMON, 40], np.int32), np.array([5, 6, 7], np.int32)]
SIZES = {"slots": 3, "max_tokens": 24, "page_tokens": 4, "prefill_tokens": 8}
WIDTH = 24


def requests(**rules):
  rules = {"temperature": 1.0, "seed": 3, "logprobs": True, "stop_ids": ()} | rules
  return [
    EngineRequest(prompt=p, max_tokens=TOKENS, num_samples=2, first_row=2 * i, **rules)
    for i, p in enumerate(PROMPTS)
  ]


def pass_of(made):
  """Returns a function that runs rows once: (ids, routes) to (routes, log-probs)."""
  graph, state = nnx.split(made)

  @jax.jit
  def run(state, tokens, routes):
    made = nnx.merge(graph, state)
    (_, _), own = route_records.recorded(made, lambda: made(tokens))
    size = tokens.shape[1]
    scores = scoring.score_completions(
      *(made, tokens[:, :1], np.ones((len(tokens), 1), bool)),
      *(tokens[:, 1:], np.ones((len(tokens), size - 1), bool)),
      prompt_routes=routes[:, :1],
      completion_routes=routes[:, 1:],
    )
    return own, scores.logps

  return lambda tokens, routes: jax.device_get(run(state, tokens, routes))


def check(run, rows):
  """Compares (prompt, tokens, routes, log-probs) of rows with one scoring pass."""
  ids = np.zeros((len(rows), WIDTH), np.int32)
  form = rows[0][2].shape[1:]
  routes = np.zeros((len(rows), WIDTH, *form), np.uint8)
  for i, (prompt, tokens, experts, _) in enumerate(rows):
    n = len(prompt) + len(tokens)
    assert experts.shape == (n, *form) and experts.dtype == np.uint8
    ids[i, :n], routes[i, :n] = [*prompt, *tokens], experts
  own, logps = run(ids, routes)
  sets = lambda x: np.sort(x, axis=-1)
  for i, (prompt, tokens, experts, reported) in enumerate(rows):
    n = len(prompt) + len(tokens)
    assert not experts[-1].any() and experts[:-1].all()
    np.testing.assert_array_equal(sets(own[i, : n - 1]), sets(experts[:-1]))
    got = logps[i, len(prompt) - 1 : n - 1]
    np.testing.assert_allclose(got, reported, atol=1e-5)


def rows_of(done):
  return [
    (prompt, row.tokens, row.routes, row.logprobs)
    for prompt, each in zip(PROMPTS, done)
    for row in each
  ]


@pytest.fixture(scope="module")
def mixture():
  made = model()
  return made, pass_of(made)


CASES = {
  "shared prefixes, short launches": {"rounds": 3},
  "preemption": {"rounds": 3, "cache_tokens": 32, "slots": 3},
  "drafts": {"draft_tokens": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_records_the_routes_of_a_scoring_pass(mixture, name):
  made, run = mixture
  config = EngineConfig(**{**SIZES, **CASES[name]}, record_routes=True)
  engine = Engine(made, Ids(), config)
  engine._drafts.use_only("lookup")
  rules = {}
  if name == "drafts":  # of two ids, which repeat, and prompt lookup finds
    others = set(range(toys.VOCAB)) - {5, 6}
    rules = {"logit_bias": dict.fromkeys(others, -np.inf)}
  first = engine.run(requests(**rules))
  check(run, rows_of(first))
  hits = engine.stats().prefix_hit_tokens
  # The pages of the first run, and with them the routes of their tokens.
  again = engine.run(requests(**rules))
  check(run, rows_of(again))
  assert engine.stats().prefix_hit_tokens > hits
  if name == "preemption":
    assert engine.stats().preemptions > 0
  if name == "drafts":
    assert engine.stats().accepted_tokens > 0


def test_new_weights_keep_what_the_old_ones_recorded(mixture):
  made, run = mixture
  config = EngineConfig(**SIZES, rounds=2, record_routes=True)
  engine = Engine(made, Ids(), config)
  tickets = [engine.submit(request) for request in requests()]
  for _ in range(3):
    engine.step()
  other = model(1)
  engine.update_weights(other, mode="keep")
  while engine.is_busy:
    engine.step()
  ids, routes, drawn = [], [], []
  for prompt, ticket in zip(PROMPTS, tickets):
    for row in engine.collect(ticket):
      n = len(prompt) + TOKENS
      ids.append(np.pad([*prompt, *row.tokens], (0, WIDTH - n)).astype(np.int32))
      padding = ((0, WIDTH - n), (0, 0), (0, 0))
      routes.append(np.pad(row.routes, padding))
      # The tokens that the old weights ran: all but the last that they drew.
      count = int(np.sum(row.versions == 0))
      drawn.append(len(prompt) + count - 1 if count else 0)
      assert row.routes[:-1].all()
  old, _ = run(np.stack(ids), np.stack(routes))
  new, _ = pass_of(other)(np.stack(ids), np.stack(routes))
  assert min(drawn) == 0 and max(drawn) > 9  # three slots: the others began later
  sets = lambda x: np.sort(x, axis=-1)
  for i, end in enumerate(drawn):
    have = sets(routes[i])
    np.testing.assert_array_equal(have[:end], sets(old[i])[:end])
    if not end:
      n = np.flatnonzero(have.any((-1, -2)))[-1] + 1
      np.testing.assert_array_equal(have[:n], sets(new[i])[:n])


def test_a_constrained_completion_has_routes(mixture):
  made, run = mixture

  class Even:
    """Allows even ids."""

    def matcher(self):
      return self

    def mask(self):
      return np.full(toys.VOCAB // 32, 0x55555555, np.uint32)

    def accept(self, token):
      assert token % 2 == 0

  engine = Engine(made, Ids(), EngineConfig(**SIZES, record_routes=True))
  check(run, rows_of(engine.run(requests(constraint=Even()))))


def test_both_samplers_return_the_same_routes(mixture):
  made, run = mixture
  options = {"num_samples": 2, "temperature": 1.0, "seed": 3, "return_logprobs": True}
  options |= {"return_routes": True, "stop_strings": ["7"]}
  outs = [kind(made, Ids())(PROMPTS, TOKENS, **options) for kind in SAMPLERS]
  each = [p for p in PROMPTS for _ in range(2)]
  for out in outs:
    check(run, list(zip(each, out.tokens, out.routes, out.logprobs)))
  for a, b in zip(outs[0].tokens, outs[1].tokens, strict=True):
    np.testing.assert_array_equal(a, b)


SAMPLERS = (EngineSampler, Sampler)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_routes_that_do_not_exist_are_refused(mixture, kind):
  with pytest.raises(ValueError, match="has no experts whose routes can be recorded"):
    kind(toys.model(num_layers=1), Ids())(["1 2"], 2, return_routes=True)
  for more, message in (
    ({"exact": True, "return_logprobs": True}, "exact and return_routes are True"),
    ({"beam_size": 2}, "return_routes cannot be combined with beam_size"),
  ):
    with pytest.raises(ValueError, match=message):
      kind(mixture[0], Ids())(["1 2"], 2, return_routes=True, **more)
