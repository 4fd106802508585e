"""A draft model changes no token, and its own cache is that of the engine's model."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tests.generate.engine.cache import slot_state_test
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.engine.run.draft_model import DraftedPages, size_ratio
from tunix.utils import mesh as mesh_lib

VOCAB = 96
SIZES = {
  "slots": 4, "max_tokens": 64, "page_tokens": 4, "rounds": 3, "prefill_tokens": 8,
  "draft_tokens": 3,
}  # fmt: skip


@functools.cache
def model(seed=0, **changes):
  return toys.model(seed=seed, vocab_size=VOCAB, **changes)


def engine_of(draft, target=None, **sizes):
  config = EngineConfig(**{**SIZES, **sizes})
  target = model() if target is None else target
  return Engine(target, toy_ids.Ids(), config, draft_model=draft)


def ask(prompt, tokens, **rules):
  rules.setdefault("stop_ids", ())
  return EngineRequest(prompt=np.asarray(prompt), max_tokens=tokens, **rules)


class Even:
  """A constraint that allows even tokens only."""

  def matcher(self):
    return self

  def mask(self):
    return np.full(-(-VOCAB // 32), 0x55555555, np.uint32)

  def accept(self, token):
    pass


def load(**rules):
  """Groups, shared prefixes, long prompts and ends; more than there are slots.

  Args:
    **rules: rules of the first request, so that no program is compiled twice.
  """
  rng = np.random.default_rng(3)
  common = rng.integers(1, VOCAB, 21)
  drawn = {"temperature": 1.0, "seed": 2}
  later = np.concatenate([common, rng.integers(1, VOCAB, 6)])
  return [
    ask(common, 20, seed=5, temperature=0.7, logprobs=True, **rules),
    ask(common, 17, num_samples=3, **drawn),
    ask(later, 9),
    ask(rng.integers(1, VOCAB, 40), 24, logprobs=True, **drawn),
    ask(rng.integers(1, VOCAB, 1), 30, stop_ids=range(8), **drawn),
    ask(later, 12, num_samples=2, **drawn),
  ]


def run(engine, requests, sources):
  """Completes requests with the sources in turn; the engine checks its pages."""
  tickets = [engine.submit(request, streams=False) for request in requests]
  choices, busy = 0, True
  while busy:
    engine._drafts.use_only(sources[choices % len(sources)])
    busy, choices = engine.step(), choices + 1
    engine.audit()
  return [engine.collect(ticket, 0) for ticket in tickets]


def check_same(rows, others):
  for some, more in zip(rows, others, strict=True):
    for one, other in zip(some, more, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      assert one.finish_reason == other.finish_reason
      if one.logprobs is not None:
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


CASES = {
  "rows": {"layer_types": ("sliding", "full"), "sliding_window": 6},
  "gather": {"num_layers": 1},
}


@pytest.mark.parametrize("attention", CASES)
def test_a_copy_of_the_model_is_always_right(attention):
  """A wrong or missing key of the draft model would make a draft wrong."""
  target = model(**CASES[attention])
  engine = engine_of(target, target, cache_tokens=112, attention=attention)
  wanted = run(engine, load(), ["none"])
  rounds = engine.stats().rounds
  assert not engine.stats().draft_tokens
  check_same(run(engine, load(), ["model"]), wanted)
  stats = engine.stats()
  assert stats.model_draft_tokens == stats.draft_tokens > 60
  assert stats.model_accepted_tokens == stats.draft_tokens
  # Prompts take as many rounds as before.
  assert stats.rounds - rounds < 0.7 * rounds
  assert stats.preemptions > 0
  # Launches without the draft model leave keys out, which are computed afterwards.
  check_same(run(engine, load(), ["model", "none", "model"]), wanted)
  now = engine.stats()
  assert now.model_draft_tokens > stats.model_draft_tokens
  assert now.model_accepted_tokens == now.model_draft_tokens


def test_another_draft_model_changes_no_token():
  """Other weights, beside constraints, adapters and new weights of the model."""
  target, draft = (toys.model(seed=seed, num_layers=1) for seed in (0, 2))
  engine = engine_of(draft, target, adapter_ranks=2)
  engine.load_adapter("mine", toys.model(lora_rank=2, num_layers=1))
  requests = [
    *load(top_k=20, top_p=0.9, logit_bias={5: 2.0})[:3],
    ask([3, 4, 5], 20, adapter="mine", temperature=1.0, seed=1),
    ask([3, 4, 5], 5, constraint=Even(), temperature=1.0, seed=1),
  ]
  wanted = run(engine, requests, ["none"])
  check_same(run(engine, requests, ["model"]), wanted)
  stats = engine.stats()
  assert 0 < stats.model_accepted_tokens < stats.model_draft_tokens
  ticket = engine.submit(ask(np.arange(1, 20), 30))
  engine.step()
  engine.step()
  engine.update_weights(model(seed=1, num_layers=1))
  while engine.step():
    pass
  [row] = engine.collect(ticket, 0)
  begun = int(np.count_nonzero(row.versions == 0))
  assert 0 < begun < 30
  start = np.concatenate([np.arange(1, 20), row.tokens[:begun]])
  [[[rest]]] = [run(engine, [ask(start, 30 - begun)], ["none"])]
  np.testing.assert_array_equal(row.tokens[begun:], rest.tokens)


def test_a_draft_model_that_cannot_be_used():
  with pytest.raises(TypeError, match="draft_model is TokensOnly, expected a tunix"):
    engine_of(toys.TokensOnly(nnx.Rngs(0)))
  mesh = mesh_lib.create_mesh({"tp": 2}, jax.devices()[:2])
  with mesh_lib.use_mesh(mesh):
    spread = toys.model(vocab_size=VOCAB)
    graph, state = nnx.split(spread)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    spread = nnx.merge(graph, jax.device_put(state, place))
  refused = [
    (toys.model(vocab_size=50), {}, "a vocabulary of 50 ids, expected the model's, 96"),
    (model(), {"draft_tokens": 0}, "draft_tokens is 0 and there is a draft_model"),
    (
      spread,
      {},
      r"draft_model is on the mesh Mesh.*, expected that of the model, None",
    ),
    (slot_state_test.model(), {}, "draft_model has recurrent layers"),
  ]
  for draft, sizes, message in refused:
    with pytest.raises(ValueError, match=message):
      engine_of(draft, **sizes)


def test_the_size_of_a_draft_model():
  assert size_ratio(model(), model()) == 1
  assert 0.5 < size_ratio(model(num_layers=1), model()) < 1


class Held:
  """The pages of a completion with two full pages, in two groups of layers."""

  def __init__(self, pages, digests):
    self.pages, self.digests, self.computed = pages, [b"root", *digests], 10

  def pages_at(self, place):
    return self.pages[place]


def test_pages_are_known_by_their_tokens():
  known = DraftedPages(groups=2, page_tokens=4)
  first = Held([(1, 5), (2, 6)], [b"a", b"b"])
  assert known.known(first) == 0
  known.record(first, range(2))
  assert known.known(first) == 8
  assert known.known(Held([(1, 5), (2, 7)], [b"a", b"b"])) == 4
  assert known.known(Held([(1, 5), (2, 6)], [b"a", b"c"])) == 4
  # A page that a window has passed is not read.
  assert known.known(Held([(1, 0), (2, 6)], [b"a", b"b"])) == 8
  known.clear()
  assert known.known(first) == 0
