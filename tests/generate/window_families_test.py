"""Caches of families with sliding windows, at the lengths where the window closes.

Rows of one batch have window - 1, window and window + 1 tokens in the prompt, or with
the completion. Everything is compared with passes of the model without a cache.
"""

import pathlib

import jax
import numpy as np
import pytest

from tests.generate import toy_ids
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.automodel import AutoModel

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# Gemma 3 has two kinds of layers with a rope each, Mistral slides in all layers, and
# this Qwen 2 slides above its first layer and stretches its rope.
WINDOWS = {"gemma3": 6, "mistral": 7, "qwen2_window_yarn": 4}


@pytest.fixture(scope="module", params=WINDOWS)
def family(request):
  model = AutoModel.from_pretrained(GOLDEN / request.param)
  window = WINDOWS[request.param]
  assert model.config.sliding_window == window
  return model, window


def rows(window):
  """Prompts, and the number of tokens of each completion."""
  lengths = [(window - 2, 1), (window - 2, 2), (window - 2, 3), (window - 1, 1)]
  lengths += [(window - 1, 5), (window, 5), (window + 1, 5), (1, window)]
  rng = np.random.default_rng(window)
  prompts = [rng.integers(1, 48, length) for length, _ in lengths]
  return prompts, [steps for _, steps in lengths]


def check_best(model, prompt, tokens, logits=None):
  full = toy_ids.full_logits(model, prompt, tokens)
  if logits is not None:
    np.testing.assert_allclose(logits, full, atol=2e-5)
  gap = full.max(-1) - full[np.arange(len(tokens)), tokens]
  assert np.all(gap <= 2e-5), (prompt, tokens)  # a tie may be broken either way
  return full


@pytest.mark.parametrize("is_tight", [False, True])
def test_greedy_tokens_and_logits_are_those_of_full_passes(family, is_tight):
  model, window = family
  prompts, steps = rows(window)
  # In a tight cache, the prompts of a batch move.
  size = max(map(len, prompts)) + max(steps)
  cache = CacheConfig(cache_size=size) if is_tight else None
  out = Sampler(model, toy_ids.Ids(), cache)(
    prompts, steps, eos_tokens=[], return_logits=True
  )
  assert [len(tokens) for tokens in out.tokens] == steps
  for prompt, tokens, logits in zip(prompts, out.tokens, out.logits):
    check_best(model, prompt, tokens, logits)


def test_samples_and_stop_strings_are_those_of_full_passes(family):
  model, window = family
  prompts, steps = rows(window)
  sampler = Sampler(model, toy_ids.Ids())
  options = {"eos_tokens": [], "num_samples": 3, "temperature": 0.5, "seed": 1}
  options["return_logprobs"] = True
  free = sampler(prompts, steps, **options)
  for row, (tokens, logprobs) in enumerate(zip(free.tokens, free.logprobs)):
    full = toy_ids.full_logits(model, prompts[row // 3], tokens)
    expected = jax.nn.log_softmax(full)[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)
  assert len({tuple(tokens) for tokens in free.tokens[15:18]}) > 1
  # The third token of one sample, written as in the middle of a text, ends its row.
  stop = f" {free.tokens[15][2]} "
  cut = sampler(prompts, steps, stop_strings=[stop], **options)
  ended = 0
  for row, text in enumerate(free.text):
    place = text.find(stop)
    ended += place >= 0
    assert cut.text[row] == (text if place < 0 else text[:place])
    assert cut.finish_reasons[row] == ("length" if place < 0 else "stop")
  assert ended


def beams_of_full_passes(model, prompt, steps, width):
  """The best completions and their log-probabilities, best first."""
  beams = [((), 0.0)]
  for _ in range(steps):
    longer = []
    for tokens, score in beams:
      full = toy_ids.full_logits(model, prompt, [*tokens, 0])[-1]
      logps = np.asarray(jax.nn.log_softmax(full), np.float64)
      longer += [((*tokens, i), score + logp) for i, logp in enumerate(logps)]
    beams = sorted(longer, key=lambda beam: -beam[1])[:width]
  return beams


def test_beams_are_those_of_full_passes(family):
  model, window = family
  prompts = rows(window)[0][3:]
  out = Sampler(model, toy_ids.Ids())(
    prompts,
    4,
    beam_size=3,
    num_samples=3,
    length_penalty=0.0,
    eos_tokens=[],
    return_logprobs=True,
  )
  for number, prompt in enumerate(prompts):
    expected = beams_of_full_passes(model, prompt, 4, 3)
    found = range(3 * number, 3 * number + 3)
    sums = [out.logprobs[row].sum() for row in found]
    np.testing.assert_allclose(sums, [score for _, score in expected], atol=1e-4)
    assert {tuple(out.tokens[row].tolist()) for row in found} == {
      tokens for tokens, _ in expected
    }
