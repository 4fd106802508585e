"""Host objects that many requests leave behind: none.

The test counts objects, not bytes or seconds: a count is exact on any machine.
Memory and seconds are measured by hand, see docs/performance.md.
"""

import collections
import gc

import numpy as np
import pytest

from tests import toys, toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest, Ticket
from tunix.generate.engine.scheduling import sequence
from tunix.generate.tokens import Delta

OURS = (sequence.Sequence, Ticket, EngineRequest, Delta)
VOCAB = 300
SIZES = {"slots": 4, "max_tokens": 64, "prefill_tokens": 32, "cache_tokens": 256}


def held():
  """Returns the live objects of each class of requests, and of all objects' classes."""
  gc.collect()
  kinds = collections.Counter(type(x) for x in gc.get_objects())
  return {kind.__name__: kinds[kind] for kind in OURS}, sum(kinds.values())


def serve(engine, count, rng):
  """Completes, cancels and fails requests; their prompts are new, or share a start."""
  start = np.arange(1, 20)
  for number in range(count):
    prompt = rng.integers(1, VOCAB, rng.integers(1, 30))
    if number % 3 == 0:
      prompt = np.concatenate([start, prompt[:8]])
    rules = {"temperature": 1.0, "seed": number, "num_samples": 1 + number % 2}
    if number % 7 == 0:  # no token is left
      rules["logit_bias"] = dict.fromkeys(range(VOCAB), -np.inf)
    request = EngineRequest(
      prompt=prompt, max_tokens=int(rng.integers(1, 20)), stop_ids=(), **rules
    )
    ticket = engine.submit(request)
    if number % 5 == 0:
      engine.step()
      engine.cancel(ticket)
    if number % 4 == 3:  # four requests are open at a time
      finish(engine)
  finish(engine)
  engine.audit()


def finish(engine):
  while engine.step():
    pass


@pytest.mark.parametrize("attention", ["rows", "gather"])
def test_requests_leave_no_object_behind(attention):
  config = EngineConfig(**SIZES, attention=attention)
  tokenizer = toys_text.chat_tokenizer()
  engine = Engine(toys.model(num_layers=1, vocab_size=VOCAB), tokenizer, config)
  rng, counts = np.random.default_rng(0), []
  for _ in range(3):  # the first part compiles, and fills the cache of prefixes
    serve(engine, 60, rng)
    assert not engine.is_busy
    stats = engine.stats()
    assert stats.pages_free == stats.pages_total
    assert stats.waiting == stats.running == 0
    counts.append(held())
  (_, (ours, before), (ours_after, after)) = counts
  assert ours == ours_after
  # Digests of the kept pages and entries of caches vary a little; 60 requests with one
  # object each would be more.
  assert after - before < 60, counts
  assert engine.stats().pages_cached > 0
