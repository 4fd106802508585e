"""The engine with windows much shorter than the texts, against the padded sampler."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests import toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.sampler import Sampler
from tunix.models import tiny
from tunix.models.automodel import AutoModel
from tunix.models.gemma3.model import ModelConfig as Gemma3

VOCAB = 600
TOKENIZER = toys_text.chat_tokenizer()
RULES = {"temperature": 1.0, "seed": 4}
WINDOW = 6


@functools.cache
def model(types=("sliding", "full")):
  config = dataclasses.replace(
    tiny.shrink(Gemma3.gemma3_1b(), VOCAB),
    sliding_window=WINDOW,
    layer_types=types,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
  )
  return AutoModel.from_config(config, seed=1)


def load():
  """Prompts of 3 to 70 tokens, most with a common beginning, and their lengths."""
  rng = np.random.default_rng(0)
  common = rng.integers(1, VOCAB, 50)
  longer = [np.concatenate([common, rng.integers(1, VOCAB, n)]) for n in (1, 9, 20)]
  return [common[:3], common[:33], *longer], [50, 40, 45, 30, 26]


@functools.cache
def expected(types):
  sampler, (prompts, lengths) = Sampler(model(types), TOKENIZER), load()
  options = {"num_samples": 2, "eos_tokens": [], **RULES}
  return sampler(prompts, lengths, **options).tokens


# Some launches prefill more than a window, some completions fork within a page, and
# three completions do not fit into the pages of the full layers.
SIZES = {
  "slots": 3, "max_tokens": 100, "page_tokens": 4, "rounds": 2, "prefill_tokens": 24,
  "cache_tokens": 160,
}  # fmt: skip


@pytest.mark.parametrize(
  ("attention", "draft_tokens", "types"),
  [
    ("rows", 1, ("sliding", "full")),
    ("gather", 1, ("sliding", "full")),
    ("gather", 0, ("sliding", "sliding")),
  ],
)
def test_tokens_are_those_of_the_padded_sampler(attention, draft_tokens, types):
  config = EngineConfig(**SIZES, attention=attention, draft_tokens=draft_tokens)
  engine = Engine(model(types), TOKENIZER, config)
  engine._drafts.use_only("lookup")
  pools = engine._scheduler.pages.pools
  assert len(pools) == len(set(types))
  prompts, lengths = load()
  for turn in range(2):  # in the second turn prompts are in the cache
    order = np.random.default_rng(turn).permutation(len(prompts))
    requests = [
      EngineRequest(
        prompt=prompts[i], max_tokens=lengths[i], num_samples=2, first_row=2 * int(i),
        stop_ids=(), **RULES,
      )
      for i in order
    ]  # fmt: skip
    for i, rows in zip(order, engine.run(requests)):
      for sample, row in enumerate(rows):
        np.testing.assert_array_equal(row.tokens, expected(types)[2 * i + sample])
    engine.audit()
  stats = engine.stats()
  assert stats.prefix_hit_tokens and stats.pages_free == stats.pages_total
  assert bool(stats.preemptions) == ("full" in types)


def test_rows_change_their_width_behind_a_window():
  """Rows are filled again from pages, of which the window's layers have few."""
  config = EngineConfig(**{**SIZES, "max_tokens": 256, "cache_tokens": None})
  engine = Engine(model(), TOKENIZER, config)
  assert len(engine._scheduler.pages.pools) == 2
  ask = lambda prompt, tokens: EngineRequest(
    prompt=prompt, max_tokens=tokens, stop_ids=(), **RULES
  )
  wanted = [ask(np.arange(1, 22), 60), ask(np.arange(40, 240), 20)]
  alone = [engine.run([request])[0][0].tokens for request in wanted]
  engine.sleep()
  tickets, widths = [engine.submit(wanted[0])], []
  for _ in range(8):
    engine.step()
    widths.append(engine._device.width)
  tickets.append(engine.submit(wanted[1]))
  while engine.step():
    widths.append(engine._device.width)
  assert list(dict.fromkeys(widths)) == [128, 256] and widths[-1] == 128
  for ticket, tokens in zip(tickets, alone):
    np.testing.assert_array_equal(engine.collect(ticket, 0)[0].tokens, tokens)
