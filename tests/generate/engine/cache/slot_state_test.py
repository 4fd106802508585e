"""Layers with a state for each slot: a toy mixer in the engine, and its dense runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tunix.generate.engine.cache import slot_state
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest

LONGEST = 80


class Recurrent(nnx.Module):
  """h' = 0.99 h + A x + x', with x' the input before x; the output is B tanh(h')."""

  def __init__(self, width, rngs):
    draw = lambda: jax.random.normal(rngs.params(), (width, width))
    self.a, self.b = nnx.Param(draw() / 5), nnx.Param(draw())
    self.width = width

  def empty_state(self, rows):
    return {"h": jnp.zeros((rows, self.width)), "x": jnp.zeros((rows, self.width))}

  def step(self, state, inputs, is_valid):
    def one(state, token):
      x, valid = token
      h = 0.99 * state["h"] + x @ self.a[...] + state["x"]
      new = {"h": h, "x": x}
      pick = lambda new, old: jnp.where(valid[:, None], new, old)
      return jax.tree.map(pick, new, state), jnp.tanh(h) @ self.b[...]

    tokens = inputs.swapaxes(0, 1), is_valid.swapaxes(0, 1)
    state, out = jax.lax.scan(one, state, tokens)
    return out.swapaxes(0, 1), state

  def advanced(self, state, inputs, is_valid):
    return self.step(state, inputs, is_valid)[1]

  def __call__(self, x, sin_cos, visible, cached=None, kind=0):
    del sin_cos, visible, kind
    if cached is not None:
      return cached.recur(self.step, x)
    out, _ = self.step(self.empty_state(x.shape[0]), x, jnp.ones(x.shape[:2], bool))
    return out, None


@functools.cache
def model():
  """The first of two layers is recurrent, the other one is attention."""
  out = toys.model().unstack()
  out.layers[0].attn = Recurrent(out.config.embed_dim, nnx.Rngs(3))
  return out


@functools.cache
def logits_of():
  graph, state = nnx.split(model())
  return jax.jit(lambda tokens: nnx.merge(graph, state)(tokens)[0])


def greedy(prompt, count):
  """The tokens of dense runs without a cache, and their log-probs."""
  row, logps = np.zeros((1, LONGEST), np.int32), []
  row[0, : len(prompt)] = prompt
  for at in range(len(prompt), len(prompt) + count):
    scores = jax.nn.log_softmax(logits_of()(row)[0, at - 1])
    row[0, at] = np.argmax(scores)
    logps.append(scores[row[0, at]])
  return row[0, len(prompt) : len(prompt) + count], logps


def check(row, tokens, logps):
  np.testing.assert_array_equal(row.tokens, tokens)
  np.testing.assert_allclose(row.logprobs, logps, atol=1e-4)


SIZES = {"max_tokens": LONGEST, "page_tokens": 4, "rounds": 5, "prefill_tokens": 16}


def make(**sizes):
  return Engine(model(), toy_ids.Ids(), EngineConfig(**{**SIZES, **sizes}))


def ask(prompt, count, **rules):
  return EngineRequest(
    prompt=prompt, max_tokens=count, stop_ids=(), logprobs=True, **rules
  )


@pytest.mark.parametrize(
  ("attention", "drafts"), [("rows", 0), ("gather", 0), ("rows", 2)]
)
def test_tokens_are_those_of_dense_runs(attention, drafts):
  """Prompts of several blocks a round, slots that are used again, and preemption."""
  engine = make(slots=3, attention=attention, cache_tokens=128, draft_tokens=drafts)
  if drafts:
    engine._drafts.use_only("lookup")
  rng = np.random.default_rng(0)
  common = rng.integers(1, 96, 30)
  prompts = [common[:1], common[:7], common, common, rng.integers(1, 96, 45)]
  counts = [40, 30, 33, 12, 30]
  found = engine.run([ask(*each) for each in zip(prompts, counts)])
  for [row], prompt, count in zip(found, prompts, counts):
    check(row, *greedy(prompt, count))
  stats = engine.stats()
  assert stats.preemptions and stats.prefix_hit_tokens == 0
  # Some drafts are right and others are not.
  assert 0 < stats.accepted_tokens < stats.draft_tokens or not drafts


def test_samples_of_a_request_go_on_from_the_state_after_their_prompt():
  """The leader draws more tokens in the launch that forks, as other prompts go on."""
  prompt, other = np.arange(5, 27), np.arange(1, 60)
  rules = {"temperature": 1.0, "num_samples": 3, "seed": 2}
  group = ask(prompt, 20, **rules)
  [alone] = make(slots=1).run([group])
  engine = make(slots=4)
  tickets = [engine.submit(group), engine.submit(ask(other, 5))]
  while engine.step():
    pass
  for row, wanted in zip(engine.collect(tickets[0], 0), alone, strict=True):
    check(row, wanted.tokens, wanted.logprobs)
  assert len({row.tokens.tobytes() for row in alone}) == 3
  assert engine.stats().prefix_hit_tokens == 2 * len(prompt)


def test_a_new_turn_and_new_weights_compute_the_state_again():
  engine = make(slots=2)
  [[first]] = engine.run([ask(np.arange(3, 20), 9)])
  turn = [*range(3, 20), *first.tokens, 7]
  ticket = engine.submit(ask(turn, 9))
  engine.step()
  engine.update_weights()
  engine.sleep()
  while engine.step():
    pass
  [row] = engine.collect(ticket, 0)
  check(row, *greedy(turn, 9))
  assert engine.stats().prefix_hit_tokens == 0


def test_drafts_need_a_mixer_that_runs_inputs_again(monkeypatch):
  monkeypatch.delattr(Recurrent, "advanced")
  with pytest.raises(ValueError, match="draft_tokens is 2 and the mixer Recurrent has"):
    make(draft_tokens=2)
  assert slot_state.makers_of(toys.model()) == (None, None)
