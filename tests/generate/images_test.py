"""Prompts with images: the padded sampler and the engine against full recomputation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import toys, toys_images
from tunix.data.images import ImageReader
from tunix.data.turns.spans import Segment
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.engine_sampler import EngineSampler
from tunix.generate.sampler import Sampler
from tunix.generate.sglang_jax_sampler import SglangJaxSampler
from tunix.generate.vllm_sampler import VllmSampler
from tunix.models.images.prompt_images import PromptImages, stacked

STEPS = 6
# Pictures of each prompt, by their seeds; a prompt without pictures is among them.
PICTURES = ((1,), (), (2, 3), (2,))


@pytest.fixture(scope="module", params=toys_images.NAMES)
def toy(request, tmp_path_factory):
  """A model, its tokenizer, prompts with pictures, and their images."""
  name = request.param
  folder = toys_images.folder(name, tmp_path_factory.mktemp("x") / name)
  model, tokenizer = toys_images.load(folder), toys_images.tokenizer(name)
  reader = ImageReader(folder, model.config)
  prompts, images = [], []
  for number, seeds in enumerate(PICTURES):
    levels = [
      np.random.default_rng(s).integers(0, 256, (20, 40, 3), np.uint8) for s in seeds
    ]
    pictures = reader.open(levels, None, "a test")
    mark = reader.processor.PLACEHOLDER
    [segment] = reader.expand(
      pictures, [Segment(f"look {mark * len(seeds)} at {number}", False)]
    )
    prompts.append(np.asarray(tokenizer.encode(segment.text), np.int32))
    images.append(reader.prompt(pictures))
  return model, tokenizer, prompts, images


def recomputed(model, prompt, images):
  """The greedy tokens, by the model's call on the whole row for each of them."""
  row, soft = list(prompt), model.config.soft_token
  pixels = stacked([images])
  run = jax.jit(lambda tokens: model(tokens, images=pixels)[0])
  out = []
  for _ in range(STEPS):
    padded = np.zeros((1, len(prompt) + STEPS), np.int32)  # later tokens are not seen
    padded[0, : len(row)] = row
    logits = np.array(run(jnp.asarray(padded))[0, len(row) - 1])
    logits[soft] = -np.inf
    row.append(int(logits.argmax()))
    out.append(row[-1])
  return out


@pytest.fixture(scope="module")
def expected(toy):
  model, _, prompts, images = toy
  return [recomputed(model, *row) for row in zip(prompts, images)]


def test_the_padded_sampler_equals_recomputation(toy, expected):
  model, tokenizer, prompts, images = toy
  sample = Sampler(model, tokenizer)
  out = sample(prompts, STEPS, images=images, eos_tokens=(), num_samples=2)
  assert [list(x) for x in out.tokens] == [x for x in expected for _ in range(2)]


def request(prompt, images, **options):
  return EngineRequest(
    prompt=prompt, images=images, max_tokens=STEPS, stop_ids=(), **options
  )


def test_the_engine_equals_recomputation_and_shares_equal_images_alone(toy, expected):
  """Rounds of 20 tokens in pages of 4 cut the prompts, but no image of Gemma 3."""
  model, tokenizer, prompts, images = toy
  sizes = {"slots": 3, "max_tokens": 64, "page_tokens": 4, "prefill_tokens": 20}
  engine = Engine(model, tokenizer, EngineConfig(rounds=4, **sizes))

  def run(prompt, images, **options):
    ticket = engine.submit(request(prompt, images, **options))
    while engine.step():
      pass
    return [list(x.ids) for x in engine.collect(ticket)], ticket.cached_tokens

  drawn = [run(*row, num_samples=2)[0] for row in zip(prompts, images)]
  assert drawn == [[x, x] for x in expected]
  # The same image twice shares its pages; another one with the same tokens does not.
  length, first = len(prompts[0]), int(np.argmax(prompts[0] == toys_images.SOFT))
  again = PromptImages(*dataclasses.astuple(images[0]))
  assert run(prompts[0], again) == ([expected[0]], (length - 1) // 4 * 4)
  other, cached = run(prompts[0], images[3])
  assert cached == first // 4 * 4
  assert other == [recomputed(model, prompts[0], images[3])]
  engine.audit()


def test_the_engine_sampler_equals_the_padded_one(toy):
  model, tokenizer, prompts, images = toy
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
  model, tokenizer, prompts, images = toy
  sample = Sampler(model, tokenizer)

  def message(call, *arguments, **options):
    with pytest.raises(ValueError) as caught:
      call(*arguments, **options)
    return str(caught.value)

  found = message(sample, [prompts[0][:-20]], STEPS, images=images[:1])
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
  for other in (VllmSampler, SglangJaxSampler):
    assert "images" in other.not_honoured
  if model.attends_within_images:
    sizes = {"page_tokens": 4, "prefill_tokens": 8}
    engine = Engine(model, tokenizer, EngineConfig(**sizes))
    assert "expected at least 16, so that one round prefills them" in message(
      engine.submit, request(prompts[0], images[0])
    )
    engine = Engine(model, tokenizer, EngineConfig(attention="gather"))
    assert "which reads pages here; expected 'rows'" in message(
      engine.submit, request(prompts[0], images[0])
    )
