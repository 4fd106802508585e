"""`exact=True`: log-probs whose bits depend on their own row alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tunix.generate import scoring
from tunix.generate.sampler import Sampler

# The compiler decides about the bits and the buffers of products.
pytestmark = pytest.mark.shipped

PROMPTS = toy_ids.prompts(6, longest=14)


@pytest.fixture(scope="module")
def sampler():
  return Sampler(toys.model(num_layers=1), toy_ids.Ids())


def exact(sampler, prompts, **options):
  settings = {"seed": 3, "temperature": 0.7, "return_logprobs": True, "exact": True}
  return sampler(prompts, 9, **{**settings, **options})


def test_bits_do_not_depend_on_the_batch(sampler):
  whole = exact(sampler, PROMPTS, temperature=0.0)
  back = exact(sampler, PROMPTS[::-1], temperature=0.0)
  for row, prompt in enumerate(PROMPTS):
    alone = exact(sampler, [prompt], temperature=0.0)
    for other in (alone.logprobs[0], back.logprobs[-1 - row]):
      assert np.array_equal(whole.logprobs[row], other)


def test_they_are_the_trainers_bits(sampler):
  out = exact(sampler, PROMPTS[:1])
  prompt, tokens = PROMPTS[0], out.tokens[0]
  ids = np.zeros((1, 16), np.int32)
  ids[0, 16 - len(prompt) :] = prompt
  completion = np.zeros((1, 16), np.int32)
  completion[0, :9] = tokens
  scored = nnx.jit(scoring.score_completions, static_argnames=("tile_rows",))(
    sampler.transformer,
    jnp.asarray(ids),
    jnp.arange(16)[None] >= 16 - len(prompt),
    jnp.asarray(completion),
    jnp.arange(16)[None] < 9,
    tile_rows=1,
  )
  assert np.array_equal(out.logprobs[0], scored.logps[0, :9])


def test_they_are_the_log_probs_up_to_rounding(sampler):
  plain = exact(sampler, PROMPTS, exact=False)
  scored = exact(sampler, PROMPTS)
  for name in ("logprobs", "sampling_logprobs"):
    for a, b in zip(getattr(plain, name), getattr(scored, name)):
      np.testing.assert_allclose(a, b, atol=2e-5)
  assert not np.allclose(scored.logprobs[0], scored.sampling_logprobs[0])


def test_padded_output(sampler):
  rows, padded = (exact(sampler, PROMPTS, pad_output=p) for p in (False, True))
  assert padded.logprobs.shape == (6, 9)
  assert np.array_equal(np.concatenate(rows.logprobs), padded.logprobs.ravel())


def test_refusals(sampler):
  with pytest.raises(ValueError, match="return_logprobs is False"):
    exact(sampler, PROMPTS, return_logprobs=False)
  with pytest.raises(ValueError, match="exact is True"):
    exact(sampler, PROMPTS, top_k=3)
