"""How a model of any make is called: what its `__call__` takes decides."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.ops import masks

Parameters = Mapping[str, inspect.Parameter]


def call_parameters(model: nnx.Module) -> dict[str, inspect.Parameter]:
  """Parameters of the model's `__call__`, without self."""
  parameters = inspect.signature(type(model).__call__).parameters
  return dict(list(parameters.items())[1:])


def takes(accepted: Parameters, name: str) -> bool:
  """Whether a call may name this argument."""
  anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
  return anything or name in accepted


def gives_hidden(model: nnx.Module) -> bool:
  """Whether the model offers its final hidden states (`return_hidden=`), and what
  turns them into logits (`unembedding()`)."""
  seam = takes(call_parameters(model), "return_hidden")
  return seam and hasattr(model, "unembedding")


def hidden(
  model: Any,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  attention_mask: Bool[Array, "B T T"] | None = None,
  *,
  extra: Mapping[str, Any] | None = None,
) -> Float[Array, "B T D"]:
  """Final hidden states of a model that `gives_hidden`.

  Args: see `logits`. A mask stands for the segments too, where both are given.
  """
  segments = None if attention_mask is not None else segment_ids
  arguments = {"segment_ids": segments, "return_hidden": True, **(extra or {})}
  return model(tokens, positions, None, attention_mask, **arguments)[0]


def logits(
  model: Any,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  attention_mask: Bool[Array, "B T T"] | None = None,
  *,
  extra: Mapping[str, Any] | None = None,
  remedy: str = "",
) -> Float[Array, "B T V"]:
  """What a model says of every position, called as
  `(tokens, positions, cache, attention_mask)` or with tokens alone.

  Args:
    model: its call gives the logits, or a tuple that begins with them.
    tokens, positions, segment_ids: of right-padded or packed rows; None: one example a
      row, positions counted from 0.
    attention_mask: True where a query may look; None: causal, inside segments.
    extra: further arguments by name.
    remedy: what a user can do about a call of another form.

  Raises:
    TypeError: the model's call has another form, or cannot be told of the mask.
  """
  accepted, extra = call_parameters(model), dict(extra or {})
  name = f"{type(model).__name__}.__call__"
  if {"positions", "cache", "attention_mask"} <= accepted.keys():
    if positions is None:
      positions = (
        jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if segment_ids is None
        else masks.positions_from_segments(segment_ids)
      )
    if attention_mask is None:
      attention_mask = _dense_mask(tokens, segment_ids)
    out = model(tokens, positions, None, attention_mask, **extra)
  elif sum(_required(p) for p in accepted.values()) <= 1 and accepted:
    mask = attention_mask
    if mask is None and segment_ids is not None and "segment_ids" not in accepted:
      mask = _dense_mask(tokens, segment_ids)
    if mask is not None and segment_ids is None and "attention_mask" not in accepted:
      raise TypeError(f"there is an attention_mask, which {name} does not take{remedy}")
    arguments = {
      "positions": positions,
      "segment_ids": segment_ids,
      "attention_mask": mask,
    }
    named = {k: v for k, v in arguments.items() if v is not None and k in accepted}
    out = model(tokens, **named, **extra)
  else:
    raise TypeError(
      f"{name} takes ({', '.join(accepted)}): models are called with (tokens, "
      f"positions, cache, attention_mask) or with tokens alone{remedy}"
    )
  return out[0] if isinstance(out, tuple) else out


def _dense_mask(tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
  """Causal and inside segments, bool [B, T, T]."""
  index = jnp.arange(tokens.shape[1])
  mask = masks.causal_mask(index, index, segments, segments)
  return jnp.broadcast_to(mask, (tokens.shape[0], *mask.shape[1:]))


def _required(parameter: inspect.Parameter) -> bool:
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return parameter.default is parameter.empty and parameter.kind not in variadic
