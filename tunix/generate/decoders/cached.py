"""Prefill and decode step for models with a KV cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.generate.decoders.memory import Memory, pinned
from tunix.models import calling
from tunix.ops import masks


def prefill(
  model,
  tokens: Int[Array, "B P"],
  mask: Bool[Array, "B P"],
  slots: int,
  images: Any = None,
) -> tuple[Float[Array, "B V"], Memory]:
  """Runs the prompts into a fresh cache.

  Args:
    model: a module with `init_cache`.
    tokens: prompts, padded on the left.
    mask: True on the tokens of the prompts.
    slots: S, tokens that a row of the cache holds.
    images: the images of each row, see `VisionLanguageModel`; None: there are none.

  Returns:
    The logits after each prompt's last token, and the state for `step`.
  """
  batch, width = tokens.shape
  cache = pinned(model, model.init_cache(batch, slots))
  positions = masks.positions_from_mask(mask)
  # Padding stays hidden for the whole request. Slots after the prompt are marked
  # visible from the start; as long as they are empty, the causal mask hides them here,
  # and `filled` hides them in `step`.
  visible = jnp.pad(mask, ((0, 0), (0, slots - width)), constant_values=True)
  causal = masks.causal_mask(jnp.arange(width), jnp.arange(slots))
  options = {} if images is None else {"images": images}
  logits, cache = _last_logits(
    model, tokens, positions, cache, causal & visible[:, None], **options
  )
  after = positions[:, -1] + 1
  return logits, Memory(
    cache=cache,
    visible=visible,
    positions=after if images is None else after + model.position_shift(tokens, images),
    slot=jnp.asarray(width, jnp.int32),
  )


def step(
  model, tokens: Int[Array, " B"], memory: Memory
) -> tuple[Float[Array, "B V"], Memory]:
  """Runs one token per row through the cache.

  Returns:
    The logits after that token, and the state for the next step.
  """
  # The token of this step is written to `memory.slot` and attends to itself, hence <=.
  filled = jnp.arange(memory.visible.shape[1]) <= memory.slot
  logits, cache = _last_logits(
    model,
    tokens[:, None],
    memory.positions[:, None],
    memory.cache,
    (memory.visible & filled)[:, None],
  )
  return logits, dataclasses.replace(
    memory, cache=cache, positions=memory.positions + 1, slot=memory.slot + 1
  )


def _last_logits(model, tokens, positions, cache, mask, **options):
  """Returns float32 [B, V] logits of the last position, and the new cache."""
  adapted = calling.adapt(model)
  # With a prompt of 1,024 tokens and a vocabulary of 152,000, the float32 logits of one
  # row would take 600 MB. If the model returns hidden states, only the hidden state of
  # the last position is multiplied by the unembedding.
  hidden = {} if adapted.builds_logits else {"return_hidden": True}
  states, cache = model(tokens, positions, cache, mask, **hidden, **options)
  return adapted.unembed(states[:, -1:])[:, 0].astype(jnp.float32), cache
