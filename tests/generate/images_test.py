"""Prompts with images: the padded sampler and the engine against full recomputation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys, toys_images
from tunix.data.images import ImageReader
from tunix.data.turns.trained_spans import Segment
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.engine.cache.slot_state import makers_of
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.engine_sampler import EngineSampler
from tunix.generate.sampler import Sampler
from tunix.models.images.prompt_images import PromptImages, stacked

STEPS = 6
# Pictures of each prompt, by their seeds; a prompt without pictures is among them.
PICTURES = ((1,), (), (2, 3))


@pytest.fixture(scope="module", params=toys_images.NAMES)
def toy(request, tmp_path_factory):
  """A model, its tokenizer, prompts with pictures, and their images."""
  name = request.param
  folder = toys_images.folder(name, tmp_path_factory.mktemp("x") / name)
  model, tokenizer = toys_images.load(folder), toys_images.tokenizer(name)
  if name == "gemma4":
    model = without_shared_keys(model)
  reader = ImageReader(folder, model.config)
  prompts, images = [], []
  for number, seeds in enumerate([*PICTURES, (4,)]):
    levels = [
      np.random.default_rng(s).integers(0, 256, (20, 40, 3), np.uint8) for s in seeds
    ]
    pictures = reader.open(levels, None, "a test")
    mark = reader.processor.PLACEHOLDER
    [segment] = reader.expand(
      pictures, [Segment(f"look {mark * len(seeds)} at {number}", False)]
    )
    prompts.append(np.asarray(tokenizer.encode(segment.text), np.int32))
    images.append(reader.prompt(pictures, 24))
  *images, other = images
  return model, tokenizer, prompts[:-1], images, other


def without_shared_keys(model):
  """A random model whose last layers have keys of their own.

  Tokens of text then see what image tokens attend to in the layers without a window.
  """
  config = dataclasses.replace(model.config, shared_kv_layers=0)
  fresh = type(model)(config, rngs=nnx.Rngs(0))
  state = nnx.state(fresh, nnx.Param)
  nnx.update(fresh, jax.tree.map(lambda x: 15 * x if x.ndim > 1 else x, state))
  return fresh


@functools.partial(jax.jit, static_argnums=0)
def whole_row(graph, state, tokens, images):
  return nnx.merge(graph, state)(tokens, images=images)[0]


def check(model, prompt, images, drawn):
  """Compares a completion with the model's call on the whole row, without a cache."""
  row = np.concatenate([prompt, drawn.ids])
  padded = jnp.asarray(np.pad(row, (0, 64 - len(row)))[None])
  logits = np.array(whole_row(*nnx.split(model), padded, stacked([images]))[0])
  logits = logits[len(prompt) - 1 : len(row) - 1]
  logps = jax.nn.log_softmax(logits)[np.arange(len(drawn.ids)), drawn.ids]
  np.testing.assert_allclose(drawn.logps, logps, rtol=0, atol=2e-5)
  logits[:, toys_images.SOFT] = -np.inf
  return logits.argmax(1).tolist()


@pytest.mark.parametrize("toy", ["gemma3", "qwen3_5"], indirect=True)
def test_the_padded_sampler_equals_recomputation(toy):
  model, tokenizer, prompts, images, other = toy
  sample = Sampler(model, tokenizer)
  options = SamplingOptions(
    max_generation_steps=STEPS,
    images=images,
    eos_tokens=(),
    num_samples=2,
    return_logprobs=True,
  )
  rows = sample.complete(prompts, options)
  for number, drawn in enumerate(rows):
    found = check(model, prompts[number // 2], images[number // 2], drawn)
    assert found == drawn.ids.tolist()
  # Without the pixels, the same tokens have other log-probs.
  with pytest.raises(AssertionError, match="Not equal to tolerance"):
    check(model, prompts[0], other, rows[0])


def test_the_engine_equals_recomputation_and_shares_equal_images_alone(toy):
  """Rounds of 20 tokens in pages of 4 cut the prompts, but no image of Gemma 3."""
  model, tokenizer, prompts, images, other = toy
  sizes = {"slots": 3, "max_tokens": 64, "page_tokens": 4, "prefill_tokens": 20}
  engine = Engine(model, tokenizer, EngineConfig(rounds=4, **sizes))

  def run(prompt, images, **options):
    asked = request(prompt, images, temperature=1.0, seed=1, logprobs=True, **options)
    [rows] = engine.run([asked])
    for drawn in rows:
      check(model, prompt, images, drawn)
    return [x.ids.tolist() for x in rows]

  def cached(images):
    before = engine.stats().prefix_hit_tokens
    drawn = run(prompts[0], images)
    return engine.stats().prefix_hit_tokens - before, drawn

  for prompt, pictures in zip(prompts, images):
    run(prompt, pictures, num_samples=2)
  # The same image twice shares its pages; another one with the same tokens does not.
  length, first = len(prompts[0]), int(np.argmax(prompts[0] == toys_images.SOFT))
  _, drawn = cached(images[0])
  again = PromptImages(images[0].pixels, images[0].counts, images[0].digests)
  shares = not any(makers_of(model))  # recurrent layers share no prompt
  assert cached(again) == (shares * ((length - 1) // 4 * 4), drawn)
  assert cached(other)[0] == shares * (first // 4 * 4)
  engine.audit()


def request(prompt, images, **options):
  return EngineRequest(
    prompt=prompt, images=images, max_tokens=STEPS, stop_ids=(), **options
  )


@pytest.mark.parametrize("toy", ["gemma3"], indirect=True)
def test_the_engine_sampler_equals_the_padded_one(toy):
  model, tokenizer, prompts, images, _ = toy
  options = {"images": images, "temperature": 1.0, "seed": 1, "return_logprobs": True}
  one, two = (
    kind(model, tokenizer)(prompts, STEPS, **options)
    for kind in (Sampler, EngineSampler)
  )
  for a, b in zip(one.tokens, two.tokens):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(one.logprobs, two.logprobs):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_what_is_refused(toy):
  model, tokenizer, prompts, images, _ = toy
  sample = Sampler(model, tokenizer)

  def message(call, *arguments, **options):
    with pytest.raises(ValueError) as caught:
      call(*arguments, **options)
    return str(caught.value)

  first = int(np.argmax(prompts[0] == toys_images.SOFT))
  cut = np.delete(prompts[0], first)
  found = message(sample, [cut], STEPS, images=images[:1])
  assert "image tokens (id 79) and images of" in found
  found = message(sample, prompts[:2], STEPS, images=[None, images[0]])
  assert "images of [] tokens" in found
  assert "images has 1 entries for 2 prompts" in message(
    sample, prompts[:2], STEPS, images=images[:1]
  )
  exact = {"exact": True, "return_logprobs": True}
  assert "scores rows without images" in message(
    sample, prompts, STEPS, images=images, **exact
  )
  text = Sampler(toys.model(), tokenizer)
  assert "expected a model with a vision tower" in message(
    text, prompts[:1], STEPS, images=images[:1]
  )
  assert "prompt_logprobs is True and the prompt has images" in message(
    request, prompts[0], images[0], prompt_logprobs=True
  )
  if model.attends_within_images:
    sizes = {"page_tokens": 4, "prefill_tokens": 8}
    engine = Engine(model, tokenizer, EngineConfig(**sizes))
    assert (
      f"expected at least {12 + images[0].counts[0]}, so that one round prefills them"
      in message(engine.submit, request(prompts[0], images[0]))
    )
    engine = Engine(model, tokenizer, EngineConfig(attention="gather"))
    assert "which reads pages here; expected 'rows'" in message(
      engine.submit, request(prompts[0], images[0])
    )
