"""The values that fields of `TransformerConfig` may have, and checks between fields."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any, Literal

import jax

from tunix.utils.setting import named_values

if TYPE_CHECKING:
  from tunix.models.transformer.config import TransformerConfig

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
LayerType = Literal["full", "sliding", "nope", "linear", "none"]
TypeFields = tuple[tuple[LayerType, tuple[tuple[str, Any], ...]], ...]

# Values of `attention`: "auto" and the names in `attention_paths.PATHS`, except for
# "invariant", which belongs to `batch_invariant`.
ATTENTION = ("auto", "plain", "blockwise", "splash", "cudnn")

# Checkpoint name of a layer's input, the only array that the policy "offload" keeps.
LAYER_INPUT = "layer_input"

# The arrays that the backward pass keeps of a layer, by value of `remat`. "none" keeps
# all and has no policy.
REMAT_POLICIES = {
  "block": None,
  "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
  ),
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def check(config: TransformerConfig) -> None:
  """Refuses fields with unknown values, and fields that contradict each other.

  Raises:
    ValueError: the message has the field, its value and what was expected.
  """
  choices = {
    "remat": ("none", *REMAT_POLICIES),
    "norms": ("pre", "post", "both"),
    "activation": typing.get_args(Activation),
    "parts": ("both", "mixer", "mlp"),
    "qk_norm": (None, "head", "all"),
    "attention": ATTENTION,
  }
  for name, value in named_values(config, choices).items():
    if value not in (allowed := choices[name]):
      raise ValueError(f"{name} {value!r} must be one of {allowed}")
  _check_layer_types(config)
  _check_shared_kv(config)
  _check_products(config)
  _check_mla(config)
  _check_invariant(config)


def _check_layer_types(config: TransformerConfig) -> None:
  if config.moe is not None and (late := max(config.moe.dense_layers, default=0)) >= (
    config.num_layers
  ):
    raise ValueError(
      f"dense_layers of moe names layer {late}, num_layers is {config.num_layers}"
    )
  if config.layer_types is None:
    if config.type_fields:
      raise ValueError(
        f"type_fields is {config.type_fields} and layer_types is None; expected the "
        "type of each layer in layer_types"
      )
    return
  if len(config.layer_types) != config.num_layers:
    raise ValueError(
      f"layer_types names {len(config.layer_types)} layers, num_layers is "
      f"{config.num_layers}"
    )
  if unknown := set(config.layer_types) - set(typing.get_args(LayerType)):
    names = ", ".join(map(repr, sorted(typing.get_args(LayerType))))
    raise ValueError(f"layer_types has {sorted(unknown)}, known: {names}")
  if unused := {name for name, _ in config.type_fields} - set(config.layer_types):
    raise ValueError(
      f"type_fields has {sorted(unused)}, and layer_types has no such layer; "
      f"expected some of {sorted(set(config.layer_types))}"
    )
  own = {name: dict(fields) for name, fields in config.type_fields}
  if "linear" in config.layer_types and own.get("linear", {}).get("mixer") is None:
    raise ValueError(
      "layer_types has linear layers and type_fields no mixer for them; expected "
      "fields_by_type(linear={'mixer': ...})"
    )
  if "sliding" in config.layer_types and (config.sliding_window or 0) < 1:
    raise ValueError(
      f"sliding_window is {config.sliding_window} and layer_types has sliding layers; "
      "expected the number of keys that a query attends to, at least 1"
    )


def _check_shared_kv(config: TransformerConfig) -> None:
  types = [name for name, _ in config.kind_names]
  first = config.num_layers - config.shared_kv_layers
  if unserved := set(types) - set(types[: max(first, 0)]):
    raise ValueError(
      f"shared_kv_layers is {config.shared_kv_layers} of {config.num_layers} layers; "
      f"expected an earlier layer of type {sorted(unserved)}, whose keys they read"
    )


def _check_products(config: TransformerConfig) -> None:
  if config.scale_embeddings and config.embedding_multiplier is not None:
    raise ValueError(
      f"embedding_multiplier is {config.embedding_multiplier} and scale_embeddings is "
      "True; expected one of the two. Set scale_embeddings=False"
    )
  ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None]
  for rope in ropes:
    dims = rope.rotated(config.head_dim)
    if dims % 2 or not dims or dims != ropes[0].rotated(config.head_dim):
      raise ValueError(
        f"rope partial {rope.partial} of head_dim {config.head_dim} rotates {dims} "
        "dimensions; expected an even number, the same for all layers. Change partial"
      )


def _check_mla(config: TransformerConfig) -> None:
  if config.mla is None:
    return
  want = {"head_dim": config.mla.head_dim, "num_kv_heads": config.num_heads}
  want |= {"qk_norm": None, "attention_sinks": False, "fused_qkv": False}
  want["attention_gate"] = False
  for name, value in named_values(config, want).items():
    if value != want[name]:
      raise ValueError(f"{name} is {value!r} with mla; expected {want[name]!r}")


def _check_invariant(config: TransformerConfig) -> None:
  if not config.batch_invariant:
    return
  if conflict := invariance_conflict(config):
    name, value, wanted = conflict
    raise ValueError(
      f"{name} is {value!r} with batch_invariant; expected {wanted!r}. Change "
      f"{name}, or set batch_invariant to False"
    )


def invariance_conflict(config: TransformerConfig) -> tuple[str, Any, Any] | None:
  """Returns name, value and expected value of a field that excludes `batch_invariant`.

  The field may belong to the layers of one type. None: no field excludes it.
  """
  want = {"attention": "auto", "moe": None, "mla": None, "mixer": None}
  want |= {"layer_input_dim": None, "layer_scalars": False}
  values = [*named_values(config, want).items()]
  values += [pair for _, own in config.type_fields for pair in own if pair[0] in want]
  found = ((name, x, want[name]) for name, x in values if x != want[name])
  return next(found, None)
