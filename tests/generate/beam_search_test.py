"""Beam search against enumeration, and by its options."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tunix.generate.sampler import Sampler

VOCAB = 5
PROMPTS = [[1, 2], [3, 1, 4, 1], [0]]


@pytest.fixture(scope="module")
def sampler():
  model = toys.model(vocab_size=VOCAB, num_layers=1)
  model.lm_head.kernel.set_value(model.lm_head.kernel[...] * 10)
  return Sampler(model, toy_ids.Ids())


def every_completion(model, prompt, steps, eos):
  """{completion: log-probability} of all that end by `eos` or have `steps` tokens."""
  rows = list(itertools.product(range(VOCAB), repeat=steps))
  tokens = np.asarray([[*prompt, *row] for row in rows])
  logps = np.asarray(jax.nn.log_softmax(model(tokens)[0]), np.float64)
  out = {}
  for i, row in enumerate(rows):
    end = row.index(eos) + 1 if eos in row else steps
    places = np.arange(len(prompt) - 1, len(prompt) - 1 + end)
    out[row[:end]] = logps[i, places, row[:end]].sum()
  return out


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
def test_wide_beams_find_the_best_of_all(sampler, penalty):
  # With as many beams as there are texts of one token less, none is lost.
  steps, eos, beams = 3, 2, 25
  out = sampler(
    PROMPTS,
    steps,
    beam_size=beams,
    num_samples=4,
    length_penalty=penalty,
    eos_tokens=[eos],
    include_eos=True,
    return_logprobs=True,
  )
  for number, prompt in enumerate(PROMPTS):
    texts = every_completion(sampler.transformer, prompt, steps, eos)
    score = lambda text, texts=texts: texts[text] / len(text) ** penalty
    best = sorted(texts, key=score, reverse=True)[:4]
    rows = range(4 * number, 4 * number + 4)
    assert [tuple(out.tokens[row].tolist()) for row in rows] == best
    sums = [out.logprobs[row].sum() for row in rows]
    np.testing.assert_allclose(sums, [texts[text] for text in best], atol=1e-4)
    reasons = ["eos" if text[-1] == eos else "length" for text in best]
    assert [out.finish_reasons[row] for row in rows] == reasons


def test_one_beam_is_greedy(sampler):
  for eos in ([], [2]):
    options = {"eos_tokens": eos, "return_logprobs": True}
    one = sampler(PROMPTS, 12, beam_size=1, **options)
    greedy = sampler(PROMPTS, 12, **options)
    assert one.text == greedy.text and one.finish_reasons == greedy.finish_reasons
    for a, b in zip(one.logprobs, greedy.logprobs):
      np.testing.assert_allclose(a, b, atol=1e-5)


def test_prompts_are_searched_for_themselves(sampler):
  limits, options = [4, 9, 6], {"beam_size": 3, "eos_tokens": [2]}
  together = sampler(PROMPTS, limits, **options).text
  for prompt, limit, text in zip(PROMPTS, limits, together):
    assert sampler([prompt], limit, **options).text == [text]
  assert sampler(PROMPTS[::-1], limits[::-1], **options).text == together[::-1]


def test_penalties_choose_lengths(sampler):
  lengths = lambda penalty: [
    len(row)
    for row in sampler(
      PROMPTS, 12, beam_size=4, length_penalty=penalty, eos_tokens=[2, 4]
    ).tokens
  ]
  assert sum(lengths(-2.0)) < sum(lengths(3.0))


def test_forbidden_tokens_never_come(sampler):
  options = {"beam_size": 4, "num_samples": 4, "eos_tokens": []}
  free = sampler(PROMPTS, 6, **options)
  common = int(np.bincount(np.concatenate(free.tokens)).argmax())
  out = sampler(PROMPTS, 6, forbidden_tokens=[common], **options)
  assert common not in np.concatenate(out.tokens)


def test_echo_and_padded_output(sampler):
  options = {"beam_size": 3, "num_samples": 2, "eos_tokens": [2]}
  plain = sampler(PROMPTS, 8, **options)
  echoed = sampler(PROMPTS, 8, echo=True, **options)
  padded = sampler(PROMPTS, 8, pad_output=True, **options)
  for row, tokens in enumerate(plain.tokens):
    assert echoed.tokens[row].tolist() == [*PROMPTS[row // 2], *tokens]
    assert padded.tokens[row].tolist() == [*tokens, *[0] * (8 - len(tokens))]
  assert padded.tokens.shape == (6, 8)


@pytest.mark.parametrize("kind", ["own", "tokens", "four"])
def test_models_of_users(kind):
  model = {
    "own": toy_ids.OwnCache(97),
    "tokens": toys.TokensOnly(nnx.Rngs(0)),
    "four": toys.FourArguments(nnx.Rngs(0)),
  }[kind]
  sampler = Sampler(model, toy_ids.Ids())
  prompts = toy_ids.prompts(2, longest=6)
  out = sampler(prompts, 5, beam_size=3, return_logprobs=True)
  greedy = sampler(prompts, 5, return_logprobs=True)
  for row in range(2):
    assert out.logprobs[row].sum() >= greedy.logprobs[row].sum() - 1e-5
