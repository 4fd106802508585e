"""Reader and writer of the decoder's configuration as Hugging Face's `config.json`.

A field with a value that the decoder cannot compute is an error. All unknown fields
(bookkeeping of other libraries) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from tunix.models.transformer.config import (
  Activation,
  LayerType,
  TransformerConfig,
)
from tunix.models.transformer.hf.rope import read_rope, write_rope
from tunix.models.transformer.hf.values import (
  HfConfig as HfConfig,
  flag,
  integer,
  layers,
  listed,
  number,
  text,
)

IsSliding = Callable[[int], bool]

# Field -> the values that the decoder supports. An absent field is always accepted.
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
  "mlp_bias": (False, None),
  "attention_dropout": (0, None),
  "partial_rotary_factor": (1, None),
  "use_bidirectional_attention": (False, None),
  "quantization_config": (None,),
}

# Hugging Face's names of activations and kinds of layer. If two names have one meaning,
# the first one is written.
_ACTIVATIONS: Mapping[str, Activation] = {
  "silu": "silu",
  "swish": "silu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu": "gelu",
  "relu2": "relu2",
}
_LAYER_TYPES: Mapping[str, LayerType] = {
  "full_attention": "full",
  "sliding_attention": "sliding",
}


def check_supported(
  hf: HfConfig,
  supported: Mapping[str, tuple[Any, ...]] = SUPPORTED,
  prefix: str = "",
) -> None:
  """Refuses fields with an unsupported value.

  Args:
    hf: the parsed `config.json`, or a section of it.
    supported: the accepted values by field.
    prefix: name of the section in messages, with a dot.

  Raises:
    ValueError: a field has another value; the message names it and the supported one.
  """
  for field, accepted in supported.items():
    if field in hf and hf[field] not in accepted:
      raise ValueError(
        f"{prefix}{field} is {hf[field]!r}, supported is only {accepted[0]!r}: the "
        "model would compute another function than the checkpoint's"
      )


def read_activation(hf: HfConfig, field: str = "hidden_act") -> Activation:
  """Returns an activation function, the MLP's; an absent field means "silu".

  Args:
    hf: the parsed `config.json`, or a section of it.
    field: the field with its name.

  Raises:
    ValueError: the decoder does not have this activation.
  """
  name = text(hf, field, "silu")
  if name not in _ACTIVATIONS:
    raise ValueError(f"{field} is {name!r}, supported are {sorted(_ACTIVATIONS)}")
  return _ACTIVATIONS[name]


def read_layers(hf: HfConfig, sliding: IsSliding) -> dict[str, Any]:
  """Returns the fields `layer_types` and `sliding_window`; none if no layer slides.

  Args:
    hf: the parsed `config.json`.
    sliding: returns True if layer i slides; used if the file has no `layer_types`.

  Raises:
    ValueError: a type of layer is unknown, or sliding layers have no window.
  """
  count = layers(hf)
  named = listed(hf, "layer_types")
  if hf.get("layer_types") is None:
    types = tuple("sliding" if sliding(i) else "full" for i in range(count))
  elif not set(map(str, named)) <= set(_LAYER_TYPES):
    raise ValueError(
      f"layer_types is {named!r}, expected a list of {sorted(_LAYER_TYPES)}: correct "
      "config.json"
    )
  else:
    types = tuple(_LAYER_TYPES[name] for name in named)
  if "sliding" not in types:
    return {}
  return {"layer_types": types, "sliding_window": integer(hf, "sliding_window")}


def decoder_fields(
  hf: HfConfig,
  *,
  head_dim: int | None = None,
  tied: bool = False,
  sliding: IsSliding | None = None,
) -> dict[str, Any]:
  """Returns the arguments of a `TransformerConfig`.

  Absent fields get transformers' defaults.

  Args:
    hf: the parsed `config.json`.
    head_dim: value of an absent `head_dim`; None for hidden_size / heads.
    tied: value of an absent `tie_word_embeddings`.
    sliding: see `read_layers`; None for a family without sliding layers.

  Raises:
    ValueError: a field is missing, of the wrong kind, or has a value that the decoder
      does not support.
  """
  check_supported(hf)
  dim, heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
  if hf.get("head_dim") is not None:
    head_dim = integer(hf, "head_dim")
  elif head_dim is None:
    if dim % heads:
      raise ValueError(
        f"hidden_size {dim} is not a multiple of num_attention_heads {heads}: add "
        "head_dim to the config"
      )
    head_dim = dim // heads
  by_layer = read_layers(hf, sliding or (lambda i: False))
  if sliding is None and (by_layer or flag(hf, "use_sliding_window")):
    raise ValueError(
      f"layer_types is {hf.get('layer_types')!r} and use_sliding_window "
      f"{hf.get('use_sliding_window')!r}: this family has full attention only"
    )
  biased = flag(hf, "attention_bias")
  grouped = hf.get("num_key_value_heads") is not None
  positions = hf.get("max_position_embeddings") is not None
  return {
    "num_layers": layers(hf),
    "vocab_size": integer(hf, "vocab_size"),
    "embed_dim": dim,
    "hidden_dim": integer(hf, "intermediate_size"),
    "num_heads": heads,
    "num_kv_heads": integer(hf, "num_key_value_heads") if grouped else heads,
    "head_dim": head_dim,
    "norm_eps": number(hf, "rms_norm_eps", 1e-6),
    "activation": read_activation(hf),
    "qkv_bias": biased,
    "o_bias": biased,
    "rope": read_rope(hf),
    "tie_embeddings": flag(hf, "tie_word_embeddings", tied),
    "max_position": integer(hf, "max_position_embeddings") if positions else None,
    "num_scores": read_scores(hf),
    **by_layer,
  }


_SCORING = "ForSequenceClassification"


def read_scores(hf: HfConfig) -> int | None:
  """Returns the number of scores of a sequence classifier, such as a reward model.

  The result is None for a language model.

  Raises:
    ValueError: `id2label` is no table.
  """
  names = listed(hf, "architectures") or [""]
  if not str(names[0]).endswith(_SCORING):
    return None
  if hf.get("num_labels") is not None:
    return integer(hf, "num_labels")
  labels = hf.get("id2label", {"0": "", "1": ""})  # transformers' default: two labels
  if not isinstance(labels, Mapping) or not labels:
    raise ValueError(f"id2label is {labels!r}, expected a table of labels")
  return len(labels)


def write_scores(config: TransformerConfig, architecture: str) -> dict[str, Any]:
  """Returns the fields of the architecture, and of a score head's labels."""
  if config.num_scores is None:
    return {"architectures": [architecture]}
  labels = {str(i): f"LABEL_{i}" for i in range(config.num_scores)}
  return {
    "architectures": [architecture.removesuffix("ForCausalLM") + _SCORING],
    "id2label": labels,
    "label2id": {label: int(i) for i, label in labels.items()},
  }


def write_layers(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields `layer_types` and `sliding_window`."""
  names = {kind: name for name, kind in _LAYER_TYPES.items()}
  types = config.layer_types or ("full",) * config.num_layers
  hf: dict[str, Any] = {"layer_types": [names[kind] for kind in types]}
  if config.sliding_window is not None:  # transformers takes no null here
    hf["sliding_window"] = config.sliding_window
  return hf


def write_activation(activation: Activation) -> str:
  """Returns Hugging Face's name of an activation."""
  names = {kind: name for name, kind in reversed(list(_ACTIVATIONS.items()))}
  return names[activation]


def write_decoder(
  config: TransformerConfig, model_type: str, architecture: str
) -> dict[str, Any]:
  """Returns the `config.json` of a model, without token ids."""
  dtype = jnp.dtype(config.param_dtype).name
  hf = {
    **write_scores(config, architecture),
    "model_type": model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.embed_dim,
    "intermediate_size": config.hidden_dim,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": write_activation(config.activation),
    "attention_bias": config.o_bias,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tie_embeddings,
    "dtype": dtype,
    "torch_dtype": dtype,
    **write_rope(config.rope),
  }
  if config.max_position is not None:
    hf["max_position_embeddings"] = config.max_position
  return hf
