import collections

import jax
import numpy as np
import pytest
from flax import nnx
from scipy import special

from tests import toys, toys_text
from tests.generate import toy_ids
from tunix.generate.sampler import CacheConfig, Sampler


@pytest.fixture(scope="module")
def sampler():
  return Sampler(toy_ids.sharp_model(), toy_ids.Ids())


def spread(vocab):
  """A model whose next-token distributions are far from flat, and not nearly sure."""
  model = toys.model(vocab_size=vocab, num_layers=1)
  model.lm_head.kernel.set_value(model.lm_head.kernel[...] * 10)
  return model


def lists(tokens):
  return [row.tolist() for row in tokens]


def test_greedy_is_the_argmax_of_full_passes(sampler):
  prompts = toy_ids.prompts(5, longest=20)
  out = sampler(prompts, 12)
  for prompt, tokens in zip(prompts, out.tokens):
    full = toy_ids.full_logits(sampler.transformer, prompt, tokens)
    assert tokens.tolist() == full.argmax(-1).tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}])
def test_rows_of_a_batch_are_as_alone_and_in_any_company(sampler, options):
  prompts = toy_ids.prompts(5, longest=20)
  together = lists(sampler(prompts, 8, **options).tokens)
  # The first row has the same number alone; the others keep theirs by position.
  assert lists(sampler(prompts[:1], 8, **options).tokens) == together[:1]
  others = toy_ids.prompts(4, longest=40, seed=9)
  mixed = sampler([*others[:3], prompts[3], others[3]], 8, **options)
  assert mixed.tokens[3].tolist() == together[3]
  wide = sampler(prompts, 8, max_prompt_length=50, **options)
  assert lists(wide.tokens) == together


def test_logits_and_logprobs_are_those_of_a_full_pass():
  model = spread(toys.VOCAB)
  prompts = toy_ids.prompts(3, longest=10)
  out = Sampler(model, toy_ids.Ids())(
    prompts,
    6,
    temperature=3.0,
    seed=0,
    forbidden_tokens=[1, 2, 3],
    return_logits=True,
    return_logprobs=True,
  )
  for prompt, tokens, logits, logps in zip(
    prompts, out.tokens, out.logits, out.logprobs
  ):
    full = toy_ids.full_logits(model, prompt, tokens)
    np.testing.assert_allclose(logits, full, atol=2e-5)
    exact = jax.nn.log_softmax(full)[np.arange(6), tokens]
    np.testing.assert_allclose(logps, exact, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_pairs_follow_the_exact_distribution(temperature):
  from scipy import stats  # slow to import

  vocab, count = 7, 4096
  model = spread(vocab)
  prompt = [3, 1, 4, 1, 5]
  out = Sampler(model, toy_ids.Ids())(
    [prompt] * count, 2, temperature=temperature, seed=11, pad_output=True
  )
  softmax = lambda logits: special.softmax(logits.astype(np.float64) / temperature)
  first = softmax(toy_ids.full_logits(model, prompt, [0])[0])
  exact = {
    (a, b): first[a] * second
    for a in range(vocab)
    for b, second in enumerate(softmax(toy_ids.full_logits(model, prompt, [a, 0])[1]))
  }
  seen = collections.Counter(map(tuple, out.tokens.tolist()))
  pairs = [pair for pair, p in exact.items() if p * count >= 5]
  observed = np.array([seen[pair] for pair in pairs], float)
  expected = np.array([exact[pair] * count for pair in pairs])
  if (rare := count - expected.sum()) >= 5:  # one class together
    observed = np.append(observed, count - observed.sum())
    expected = np.append(expected, rare)
  expected *= observed.sum() / expected.sum()
  assert len(pairs) > 15 and observed.sum() > 0.99 * count
  assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_seeds(sampler):
  prompts = [[5, 6, 7]] * 4
  draw = lambda seed: lists(sampler(prompts, 12, temperature=20.0, seed=seed).tokens)
  assert draw(1) == draw(1) == draw(jax.random.key(1))
  assert draw(1) != draw(2)
  assert draw(None) != draw(None)
  assert len(set(map(tuple, draw(1)))) == 4  # equal prompts, different rows


def test_temperature_alone_samples(sampler):
  prompt = [[5, 6, 7]]
  cold = lists(sampler(prompt, 12).tokens)
  assert lists(sampler(prompt, 12, temperature=1e-6, seed=0).tokens) == cold
  assert lists(sampler(prompt, 12, temperature=50.0, seed=0).tokens) != cold


def test_eos_ends_rows_and_is_kept_on_demand(sampler):
  prompts = toy_ids.prompts(3, longest=10)
  free = sampler(prompts, 10, return_logprobs=True)
  eos = int(free.tokens[1][4])
  cut = sampler(prompts, 10, eos_tokens=[95, eos], return_logprobs=True)
  kept = sampler(prompts, 10, eos_tokens=[95, eos], include_eos=True)
  for row in range(3):
    whole = free.tokens[row].tolist()
    ends = [i for i, token in enumerate(whole) if token in (95, eos)]
    end = ends[0] if ends else 10
    assert cut.tokens[row].tolist() == whole[:end]
    assert kept.tokens[row].tolist() == whole[: end + 1]
    assert cut.text[row] == kept.text[row] == " ".join(map(str, whole[:end]))
    np.testing.assert_allclose(cut.logprobs[row], free.logprobs[row][:end], atol=1e-5)
  assert any(len(row) < 10 for row in cut.tokens)


def test_the_tokenizers_eos_ids_are_the_default():
  class Ending(toy_ids.Ids):
    def eos_id(self):
      return eos

  model, prompt = toy_ids.sharp_model(num_layers=1), [[5, 6, 7]]
  free = Sampler(model, toy_ids.Ids())(prompt, 10).tokens[0].tolist()
  eos = free[4]
  ending = Sampler(model, Ending())
  assert ending(prompt, 10).tokens[0].tolist() == free[: free.index(eos)]
  assert ending(prompt, 10, eos_tokens=[]).tokens[0].tolist() == free


def test_forbidden_tokens(sampler):
  prompts = toy_ids.prompts(3, longest=10)
  free = sampler(prompts, 10)
  banned = sorted({int(t) for row in free.tokens for t in row})
  out = sampler(prompts, 10, forbidden_tokens=banned)
  assert not {int(t) for row in out.tokens for t in row} & set(banned)


def test_echo_and_padded_output(sampler):
  free = sampler(["5 6 7", "8"], 6)
  eos = int(free.tokens[0][2])
  end = free.tokens[0].tolist().index(eos)
  options = {"eos_tokens": [eos], "return_logprobs": True, "return_logits": True}
  plain = sampler(["5 6 7", "8"], 6, **options)
  echoed = sampler(["5 6 7", "8"], 6, echo=True, **options)
  assert echoed.tokens[0].tolist() == [5, 6, 7, *plain.tokens[0]]
  assert echoed.text[1].startswith("8 ") and echoed.text[1].endswith(plain.text[1])
  assert len(echoed.logprobs[0]) == len(echoed.logits[0]) == end
  padded = sampler(["5 6 7", "8"], 6, pad_output=True, **options)
  assert padded.tokens.shape == (2, 6) and padded.tokens.dtype == np.int32
  assert padded.tokens[0].tolist() == [*plain.tokens[0], *[0] * (6 - end)]
  assert padded.logprobs.shape == (2, 6) and padded.logprobs[0, end:].tolist() == [
    0
  ] * (6 - end)
  assert padded.logits.shape == (2, 6, toys.VOCAB)
  both = sampler(["5 6 7", "8"], 6, pad_output=True, echo=True, **options)
  prompts = both.padded_prompt_tokens
  assert prompts.shape == (2, 16) and prompts[1].tolist() == [0] * 15 + [8]
  np.testing.assert_array_equal(
    both.tokens, np.concatenate([prompts, padded.tokens], axis=1)
  )


def test_strings_get_bos_and_ids_are_taken_as_they_are():
  tokenizer = toys_text.chat_tokenizer("llama3")
  model = toys.model(vocab_size=tokenizer.vocab_size, num_layers=1)
  sampler = Sampler(model, tokenizer)
  bos, ids = tokenizer.bos_id(), tokenizer.encode("hello there")
  chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello there"}])
  given = ["hello there", ids, np.asarray(ids, np.int64), chat]
  prompts = sampler(given, 2, max_prompt_length=64).padded_prompt_tokens
  ended = lambda row, wanted: row[-len(wanted) :].tolist() == wanted
  assert ended(prompts[0], [bos, *ids]) and prompts[0][-len(ids) - 2] != bos
  assert ended(prompts[1], [tokenizer.pad_id(), *ids])
  np.testing.assert_array_equal(prompts[1], prompts[2])
  assert (prompts[3] == bos).sum() == 1 and ended(prompts[3], tokenizer.encode(chat))
  assert sampler("hello there", 2).text == sampler(["hello there"], 2).text


def test_a_padding_id_outside_the_models_vocabulary():
  class Padding(toy_ids.Ids):
    def pad_id(self):
      return 100_000

  model = toy_ids.sharp_model(num_layers=1)
  plain, far = Sampler(model, toy_ids.Ids()), Sampler(model, Padding())
  found = far([[5, 6], [1, 2, 3]], 6, pad_output=True, return_logprobs=True)
  assert found.text == plain([[5, 6], [1, 2, 3]], 6).text
  assert found.padded_prompt_tokens[0, 0] == 100_000
  assert np.isfinite(found.logprobs).all()


def test_the_models_current_weights_are_read(sampler):
  model = toy_ids.sharp_model(num_layers=1)
  live = Sampler(model, toy_ids.Ids())
  before = live([[5, 6, 7]], 6)
  nnx.update(model, nnx.state(toy_ids.sharp_model(num_layers=1, seed=1)))
  after = live([[5, 6, 7]], 6)
  assert after.text != before.text
  fresh = Sampler(toy_ids.sharp_model(num_layers=1, seed=1), toy_ids.Ids())
  assert after.text == fresh([[5, 6, 7]], 6).text


def test_a_sampler_leaves_the_model_alone():
  model = toy_ids.sharp_model(num_layers=1)
  before = jax.tree.map(np.array, nnx.state(model))
  Sampler(model, toy_ids.Ids())([[1, 2]], 3)
  jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


def test_user_models_without_a_cache_are_run_anew_for_every_token():
  for model in (toys.TokensOnly(nnx.Rngs(0)), toys.FourArguments(nnx.Rngs(0))):
    out = Sampler(model, toy_ids.Ids())(toy_ids.prompts(3, longest=10), 5)
    assert [len(row) for row in out.tokens] == [5, 5, 5]


def test_cache_sizes():
  model = toy_ids.sharp_model(num_layers=1)
  prompts = [np.arange(20)]
  free = Sampler(model, toy_ids.Ids())(prompts, 10)
  # 20 + 10 fit exactly, although the next power of two does not.
  tight = Sampler(model, toy_ids.Ids(), CacheConfig(cache_size=30))
  assert tight(prompts, 10).text == free.text
  assert tight(prompts, 10).padded_prompt_tokens.shape == (1, 30)
  # A model that keeps its own cache cannot be moved in it: its padding shrinks.
  own = Sampler(toy_ids.OwnCache(97), toy_ids.Ids(), CacheConfig(cache_size=30))
  assert own(prompts, 10).padded_prompt_tokens.shape == (1, 20)
  with pytest.raises(
    ValueError, match=r"20 prompt tokens .* need 31 slots, and the cache has 30"
  ):
    tight(prompts, 11)
  with pytest.raises(ValueError, match=r"24 prompt tokens .* Raise CacheConfig"):
    tight(prompts, 10, max_prompt_length=24)


def test_cache_config_is_checked_against_the_model():
  good = CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=8)
  model = toys.model()
  assert Sampler(model, toy_ids.Ids(), good)("1 2", 2).text
  with pytest.raises(ValueError, match="num_kv_heads is 4, the model has 2"):
    Sampler(model, toy_ids.Ids(), CacheConfig(cache_size=64, num_kv_heads=4))
  with pytest.raises(ValueError, match="cache_size is 0"):
    CacheConfig(cache_size=0)


@pytest.mark.parametrize(
  ("prompts", "options", "error", "words"),
  [
    ([], {}, ValueError, "there are no prompts"),
    ([""], {}, ValueError, "has no tokens"),
    ([[]], {}, ValueError, "has no tokens"),
    ([1, 2, 3], {}, TypeError, "neither a string nor a flat sequence"),
    ([[0.5]], {}, TypeError, "neither a string nor a flat sequence"),
    ([[96]], {}, ValueError, "token id 96; expected ids of the model, from 0 to 95"),
    ([[-1]], {}, ValueError, "token id -1"),
    (["1"], {"eos_tokens": [96]}, ValueError, "eos_tokens has token id 96"),
    (["1"], {"forbidden_tokens": [96]}, ValueError, "forbidden_tokens has token id"),
    (["1"], {"forbidden_tokens": range(96)}, ValueError, "names every token"),
    (["1"], {"temperature": -0.5}, ValueError, "temperature is -0.5"),
    (["1"], {"temperature": float("nan")}, ValueError, "temperature is nan"),
    (["1"], {"temperature": 1.0, "seed": "x"}, TypeError, "seed is 'x'"),
    (["1"], {"max_generation_steps": 0}, ValueError, "max_generation_steps is 0"),
    (["1"], {"max_generation_steps": [4, 0]}, ValueError, "max_generation_steps is"),
    (["1"], {"max_generation_steps": [4, 4]}, ValueError, "2 entries for 1 prompts"),
    (["1"], {"max_generation_steps": 1.5}, ValueError, "max_generation_steps is 1.5"),
    (["1"], {"num_samples": 0}, ValueError, "num_samples is 0"),
    (["1"], {"max_generation_steps": 10**9}, ValueError, "Generate at most 8191 to"),
    (["1"], {"num_samples": 10**9}, ValueError, "num_samples is 1.* at most [0-9]+ fi"),
    (["1"], {"beam_size": 10**9}, ValueError, "beam_size is 1.* at most [0-9]+ fits"),
    (["1"], {"temperature": 1, "top_k": 0}, ValueError, "top_k is 0"),
    (["1"], {"temperature": 1, "top_p": 0.0}, ValueError, "top_p is 0.0"),
    (["1"], {"temperature": 1, "min_p": 1.5}, ValueError, "min_p is 1.5"),
    (["1"], {"top_p": 0.9}, ValueError, "top_p is 0.9, and at temperature 0"),
    (["1"], {"top_k": 3}, ValueError, "top_k is 3, and at temperature 0"),
    (["1"], {"stop_strings": [3]}, TypeError, r"stop_strings\[0\] is 3"),
    (["1"], {"stop_strings": [""]}, ValueError, "stop_strings has an empty string"),
    (["1"], {"length_penalty": 2.0}, ValueError, "length_penalty is 2.0 and only"),
    (["1"], {"beam_size": 0}, ValueError, "beam_size is 0"),
    (["1"], {"beam_size": 2, "num_samples": 3}, ValueError, "num_samples is 3 of 2"),
    (["1"], {"beam_size": 2, "temperature": 1}, ValueError, "temperature cannot be"),
    (["1"], {"beam_size": 2, "stop_strings": "a"}, ValueError, "stop_strings cannot"),
    (["1"], {"beam_size": 2, "return_logits": True}, ValueError, "return_logits can"),
    (
      ["1 2 3"],
      {"max_prompt_length": 2},
      ValueError,
      "3 tokens and max_prompt_length is 2",
    ),
  ],
)
def test_bad_requests(sampler, prompts, options, error, words):
  with pytest.raises(error, match=words):
    sampler(prompts, **{"max_generation_steps": 4, **options})


def test_no_row_goes_beyond_the_models_positions():
  sampler = Sampler(toys.model(max_position=8), toy_ids.Ids())
  assert sampler("1 2", 6).tokens[0].size <= 6
  with pytest.raises(
    ValueError, match=r"expected at most 8, .* Generate at most 6 tokens"
  ):
    sampler("1 2", 7)
  with pytest.raises(ValueError, match="Generate at most 6 tokens"):
    sampler.stream("1 2", 10**9)
  endless = Sampler(toys.model(max_position=None), toy_ids.Ids())
  with pytest.raises(ValueError, match=r"steps is 1000000000: .* at most \d+ fits"):
    endless("1 2", 10**9)
