"""The cache of a sliding layer is as long as its window: same numbers, fewer bytes."""

import jax
import numpy as np
import pytest

from tests import toys
from tests.generate import toy_ids
from tunix.generate.sampler import CacheConfig, Sampler

ROW = 10
TOKENS = np.random.default_rng(0).integers(1, toys.VOCAB, (2, ROW), dtype=np.int32)
KINDS = ("sliding", "full")


def model(window):
  return toys.model(layer_types=KINDS, sliding_window=window)


@pytest.mark.parametrize("window, pieces", [(3, (2, 3, 1, 4)), (1, (7, 3)), (7, (10,))])
def test_a_ring_gives_what_full_passes_give(window, pieces):
  """Row 1 begins with two tokens of padding; tokens come piece by piece."""
  tried = model(window)
  tokens = np.array(TOKENS)
  tokens[1, 2:] = TOKENS[1, :-2]
  mask = np.ones((2, ROW + 2), bool)
  mask[1, :2] = False
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  visible = np.tril(np.ones((ROW + 2, ROW + 2), bool))[None] & mask[:, None]
  cache = tried.init_cache(2, ROW + 2)
  assert [x.shape[2] for x in cache.k] == [window, ROW + 2] and cache.size == ROW + 2
  parts, at = [], 0
  for size in pieces:
    of = slice(at, at + size)
    logits, cache = tried(tokens[:, of], positions[:, of], cache, visible[:, of])
    parts.append(logits)
    at += size
  got, want = np.concatenate(parts, axis=1), tried(TOKENS)[0]
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(got[1, 2:], want[1, :-2], rtol=1e-5, atol=1e-6)
  assert int(cache.index) == ROW and cache.size == ROW + 2
  if window == 3:  # the causal order by itself
    alone, _ = tried(TOKENS, cache=tried.init_cache(2, ROW))
    np.testing.assert_allclose(alone, want, rtol=1e-5, atol=1e-6)


def test_a_window_as_long_as_the_row_needs_no_ring():
  sizes = {x.shape[2] for x in model(16).init_cache(1, 12).k}
  assert sizes == {12}


def test_sampling_beams_and_rows_that_move():
  """Against models without a cache of any length: full passes."""
  sharp = toy_ids.sharp_model(layer_types=KINDS, sliding_window=3)
  prompts = toy_ids.prompts(3, longest=9)
  out = Sampler(sharp, toy_ids.Ids())(prompts, 6, num_samples=2)
  for row, tokens in enumerate(out.tokens):
    full = toy_ids.full_logits(sharp, prompts[row // 2], tokens)
    np.testing.assert_array_equal(tokens, full.argmax(-1))
  tight = Sampler(sharp, toy_ids.Ids(), CacheConfig(cache_size=16))  # prompts move
  assert tight(prompts, 6, num_samples=2).text == out.text
  beams = tight(prompts, 6, beam_size=2, return_logprobs=True)
  for prompt, tokens, logps in zip(prompts, beams.tokens, beams.logprobs):
    full = jax.nn.log_softmax(toy_ids.full_logits(sharp, prompt, tokens))
    np.testing.assert_allclose(logps, full[np.arange(6), tokens], atol=1e-3)
