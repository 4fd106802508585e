"""The sampler over the engine: the call of the padded sampler, and its answers."""

import numpy as np
import pytest
from flax import nnx

from tests import toys, toys_text
from tunix.generate import engine_sampler
from tunix.generate.engine_sampler import EngineSampler
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.automodel import AutoModel
from tunix.utils import mesh as mesh_lib

VOCAB = 600
TOKENIZER = toys_text.chat_tokenizer()
PROMPTS = ["the sea", [5, 6, 7], "a list of five"]


@pytest.fixture(scope="module")
def model():
  return toys.model(vocab_size=VOCAB, num_layers=1)


@pytest.fixture(scope="module")
def both(model):
  return EngineSampler(model, TOKENIZER), Sampler(model, TOKENIZER)


OPTIONS = {
  "greedy": {},
  "echo and padding": {"echo": True, "pad_output": True, "max_prompt_length": 20},
  "samples": {"temperature": 1.0, "seed": 3, "num_samples": 2, "top_k": 50},
  "part of a batch": {"temperature": 1.0, "seed": 3, "first_prompt": 4},
  "log-probs": {"return_logprobs": True, "temperature": 0.8, "seed": 1},
  "exact": {"return_logprobs": True, "exact": True, "temperature": 1.0, "seed": 1},
  "forbidden": {"forbidden_tokens": [5, 6, 7], "include_eos": True},
  "beams": {"beam_size": 2},
  "logits": {"return_logits": True},
  "a limit for each": {"max_generation_steps": [3, 9, 1]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_are_those_of_the_padded_sampler(both, name):
  options = {"max_generation_steps": 8, **OPTIONS[name]}
  ours, theirs = (sampler(PROMPTS, **options) for sampler in both)
  assert ours.text == theirs.text and ours.finish_reasons == theirs.finish_reasons
  for field in ("tokens", "padded_prompt_tokens"):
    for a, b in zip(getattr(ours, field), getattr(theirs, field)):
      np.testing.assert_array_equal(a, b)
  for field in ("logprobs", "sampling_logprobs", "logits"):
    a, b = getattr(ours, field), getattr(theirs, field)
    assert (a is None) == (b is None)
    for x, y in zip(a or (), b or ()):
      if name == "exact":
        np.testing.assert_array_equal(x, y)
      else:
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_stream_joins_to_the_call(both):
  ours, _ = both
  whole = ours(PROMPTS, 12, temperature=1.0, seed=2)
  parts = [""] * 3
  for part in ours.stream(PROMPTS, 12, every=2, temperature=1.0, seed=2):
    parts[part.row] += part.text
  assert parts == whole.text


def test_a_call_reads_the_current_weights_and_leaves_nothing():
  sizes = {"vocab_size": VOCAB, "num_layers": 1}
  model, other = (toys.model(seed=seed, **sizes) for seed in (0, 1))
  sampler = EngineSampler(model, TOKENIZER)
  first = sampler(PROMPTS, 6)
  nnx.update(model, nnx.state(other))
  assert sampler(PROMPTS, 6).text == Sampler(other, TOKENIZER)(PROMPTS, 6).text
  assert first.text != sampler(PROMPTS, 6).text
  assert sampler._engine._device._keeper is None  # the cache


def test_frozen_weights_keep_the_cache(model):
  sampler = EngineSampler(model, TOKENIZER, frozen=True)
  prompt = np.arange(1, 50)
  sampler([prompt], 4)
  sampler([np.concatenate([prompt, [7, 8]])], 4)
  assert sampler._engine.stats().prefilled_tokens == 49 + 51 - 48


def test_the_size_of_an_engine_does_not_depend_on_earlier_calls(model):
  """It changes last bits, and a run that is resumed does not repeat earlier calls."""
  for frozen, slots in ((False, 8), (True, 32)):
    sampler = EngineSampler(model, TOKENIZER, frozen=frozen)
    for rows in (32, 5):
      with sampler.session(rows, 64) as engine:
        pass
    assert engine.config.slots == slots


def test_slots_bound_the_rows_that_run(model):
  sampler = EngineSampler(model, TOKENIZER, slots=2)
  out = sampler(PROMPTS, 6, num_samples=3)
  assert len(out.text) == 9 and sampler._engine.config.slots == 2


def test_what_does_not_fit_is_refused(both, model):
  ours, _ = both
  small = EngineSampler(model, TOKENIZER, CacheConfig(cache_size=16))
  for call, message in (
    (lambda: small(PROMPTS, 30), "Raise CacheConfig.cache_size"),
    (lambda: ours([[VOCAB]], 3), f"token id {VOCAB}"),
    (lambda: ours([], 3), "no prompts"),
    (lambda: ours(PROMPTS, 3, engine_options={"a": 1}), "does not honor"),
  ):
    with pytest.raises(ValueError, match=message):
      call()


def test_models_that_do_not_suit_get_the_padded_sampler(model):
  other = toys.TokensOnly(nnx.Rngs(0))
  assert not engine_sampler.suits(other) and engine_sampler.suits(model)
  assert isinstance(engine_sampler.sampler_of(other, TOKENIZER), Sampler)
  made = engine_sampler.sampler_of(model, TOKENIZER, frozen=True)
  assert isinstance(made, EngineSampler)


WIDE = {"num_heads": 8, "num_kv_heads": 8, "embed_dim": 64, "num_layers": 1}


def test_a_split_layout_draws_what_the_padded_sampler_draws(mesh_fsdp8):
  model = AutoModel.from_config(toys.config(vocab_size=640, **WIDE), mesh=mesh_fsdp8)
  ours = EngineSampler(model, TOKENIZER, gather_weights="split", frozen=True)
  theirs = Sampler(model, TOKENIZER, gather_weights="split")
  for options in ({}, {"temperature": 1.0, "seed": 3, "num_samples": 2}):
    options = {"return_logprobs": True, **options}
    got, want = ours(PROMPTS, 12, **options), theirs(PROMPTS, 12, **options)
    for a, b in zip(got.tokens, want.tokens, strict=True):
      np.testing.assert_array_equal(a, b)
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)
  rows = ours._engine._device._keeper.store.rows_k[0]
  assert rows.sharding.shard_shape(rows.shape)[1] == 1  # of 8 heads


def test_meshes_that_do_not_split_the_cache_get_the_padded_sampler(mesh_fsdp8):
  made = lambda axes, heads: AutoModel.from_config(
    toys.config(**{**WIDE, "num_kv_heads": heads}), mesh=mesh_lib.create_mesh(axes)
  )
  suits = engine_sampler.suits
  split = made({"fsdp": 4, "tp": 2}, 8)
  assert suits(split, "split")
  assert not any(suits(split, layout) for layout in (None, True, False))
  assert not suits(made({"fsdp": 4, "tp": 2}, 4), "split")  # 4 heads on 8 devices
  assert not suits(made({"dp": 2, "fsdp": 4}, 8), "split")  # dp splits no weight
  assert suits(made({"fsdp": 1, "tp": 8}, 8))
