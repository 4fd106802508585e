"""Checks an arriving request, and makes one sequence for each of its completions."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Sequence as Seq
from typing import Any

import jax
import numpy as np

from tunix.generate.decoders import decoders
from tunix.generate.engine.cache import keepers
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.request import Matcher, Ticket
from tunix.generate.engine.run import arrays
from tunix.generate.engine.scheduling.image_places import ImagePlaces
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.engine.scheduling.text import TextReader
from tunix.generate.padded import requests as requests_lib
from tunix.generate.sizes import batching
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.images.prompt_images import PromptImages
from tunix.models.transformer.experts import route_records
from tunix.models.transformer.model import Transformer
from tunix.models.vision.config import VisionLanguageConfig


def sequences_of(
  ticket: Ticket,
  model: Transformer,
  tokenizer: TokenizerAdapter,
  config: EngineConfig,
  orders: Iterator[int],
  adapter: int,
  streams: bool,
) -> list[Sequence]:
  """Returns the completions of a request.

  Args:
    ticket: the request.
    model: the model; its vocabulary and positions bound the request.
    tokenizer: turns tokens into text, and names the ids that end a completion.
    config: sizes of the engine.
    orders: yields the submission numbers.
    adapter: number of the request's adapter.
    streams: see `Engine.submit`.

  Raises:
    ValueError: the request can never run.
  """
  r = ticket.request
  requests_lib.check_prompt(model, r.prompt, r.images, model.config.vocab_size)
  requests_lib.check_ids(list(r.logit_bias), "logit_bias", model.config.vocab_size)
  limit = _limit(ticket, model, config)
  stop_ids = tokenizer.eos_ids() if r.stop_ids is None else r.stop_ids
  _check_sizes(ticket, stop_ids, config)
  key, filters = _key_data(r.seed), r.filters
  uses = arrays.uses_of(r)
  if model.config.batch_invariant:
    uses |= {"invariant"}
  form = route_records.form_of(model) if config.record_routes else None
  images = _image_places(ticket, model, config)
  return [
    Sequence(
      ticket=ticket,
      sample=sample,
      order=next(orders),
      tokens=np.concatenate([r.prompt, np.zeros(r.max_tokens, np.int32)]),
      length=len(r.prompt),
      limit=limit,
      key=key,
      stop_ids=tuple(map(int, stop_ids)),
      filters=filters,
      uses=uses,
      reader=TextReader(tokenizer.decode, r.stops, streams),
      adapter=adapter,
      matcher=_matcher(ticket, model.config.vocab_size),
      images=images,
      routes=None if form is None else form.empty(limit),
    )
    for sample in range(r.num_samples)
  ]


def _limit(ticket: Ticket, model: Transformer, config: EngineConfig) -> int:
  r, most = ticket.request, config.max_tokens
  positions = decoders.max_positions(model)
  most = most if positions is None else min(most, positions)
  limit = len(r.prompt) + r.max_tokens
  if limit > most:
    raise ValueError(
      f"{ticket.id}: a prompt of {len(r.prompt)} tokens and max_tokens={r.max_tokens} "
      f"need {limit} tokens, and the engine has {most} for a completion. Raise "
      "EngineConfig.max_tokens (at most the positions of the model), or ask for fewer"
    )
  return limit


def _image_places(
  ticket: Ticket, model: Any, config: EngineConfig
) -> ImagePlaces | None:
  r = ticket.request
  if r.images is None:
    return None
  places = ImagePlaces.of(
    *(r.prompt, r.images, model.config.soft_token, model.attends_within_images),
    _rope(model.config, r.prompt, r.images),
  )
  if places.last is not None and not keepers.has_rows(model, config):
    raise ValueError(
      f"{ticket.id}: the tokens of an image attend to each other in this model, and "
      f"EngineConfig.attention is {config.attention!r}, which reads pages here; "
      "expected 'rows'. Set it, or use the padded sampler"
    )
  # A run may begin and end within a page. Two pages of a layer with a window can be in
  # use by the tokens that the launch draws.
  needed = (config.pages_of(places.longest_run) + 3) * config.page_tokens
  if places.longest_run and needed > config.prefill_tokens:
    raise ValueError(
      f"{ticket.id}: EngineConfig.prefill_tokens is {config.prefill_tokens} and an "
      f"image has {places.longest_run} tokens that attend to each other; expected at "
      f"least {needed}, so that one round prefills them. Raise it"
    )
  return places


def _rope(
  config: VisionLanguageConfig, prompt: np.ndarray, images: PromptImages
) -> np.ndarray | None:
  """Returns `ImagePlaces.rope`."""
  tokens = np.full(batching.bucket(len(prompt) + 1), batching.NO_TOKEN, np.int32)
  tokens[: len(prompt)] = prompt
  offsets = _rope_offsets(config, tokens, images.pixels)
  return None if offsets is None else np.asarray(offsets)[0, : len(prompt) + 1]


@functools.partial(jax.jit, static_argnums=0)
def _rope_offsets(
  config: VisionLanguageConfig, tokens: jax.Array, pixels: Any
) -> jax.Array | None:
  return config.rope_offsets(tokens[None], jax.tree.map(lambda x: x[None], pixels))


def _check_sizes(ticket: Ticket, stop_ids: Seq[int], config: EngineConfig) -> None:
  r = ticket.request
  bounds = {
    "the number of stop_ids": (len(stop_ids), arrays.STOP_IDS),
    "the number of ids in logit_bias": (len(r.logit_bias), arrays.BIASES),
    "top_logprobs": (r.top_logprobs, config.max_top_logprobs),
  }
  for name, (have, most) in bounds.items():
    if have > most:
      raise ValueError(
        f"{ticket.id}: {name} is {have}, expected at most {most}: ask for fewer"
      )


def _matcher(ticket: Ticket, vocab_size: int) -> Matcher | None:
  constraint = ticket.request.constraint
  if constraint is None:
    return None
  matcher, words = constraint.matcher(), -(-vocab_size // 32)
  if (shape := matcher.mask().shape) != (words,):
    raise ValueError(
      f"{ticket.id}: the constraint's masks have shape {shape}, expected ({words},) "
      f"for {vocab_size} ids: make the constraint for the vocabulary of this model"
    )
  return matcher


def _key_data(seed: jax.Array | int | None) -> np.ndarray:
  """Returns the data of a request's random key, uint32 [2]."""
  if isinstance(seed, int):
    return _int_key(seed)
  if seed is None:  # any numbers are a key, and JAX would take half a millisecond
    return np.frombuffer(secrets.token_bytes(8), np.uint32)
  key = batching.random_key(seed)
  data = np.asarray(jax.random.key_data(key))
  if data.shape != (2,):  # another kind of key, from which a default one is drawn
    data = np.asarray(jax.random.bits(key, (2,), np.uint32))
  return data


@functools.lru_cache(maxsize=1024)
def _int_key(seed: int) -> np.ndarray:
  return np.asarray(jax.random.key_data(batching.random_key(seed)))
