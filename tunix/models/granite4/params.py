"""Dense Granite 4 checkpoints: `config.json`, tensor names and the family."""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.granite import params as granite
from tunix.models.granite4.model import Granite4, ModelConfig
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config, values as hf_values
from tunix.models.transformer.params import DECODER, HfName, NameTable

# Field -> the values that this family supports: no experts, and below no recurrence.
_SUPPORTED = {
  "num_local_experts": (0,),
  "position_embedding_type": ("rope", "nope", None),
}
# transformers' values of absent fields.
_DEFAULTS = {"num_local_experts": 8, "shared_intermediate_size": 1024}
_ATTENTION = ("attention", "full_attention")
_MLP = "model.layers.{i}.shared_mlp."

NAMES: NameTable = {
  **DECODER,
  "layers.mlp.gate_up_proj.kernel": HfName(f"{_MLP}input_linear.weight", True),
  "layers.mlp.down_proj.kernel": HfName(f"{_MLP}output_linear.weight", True),
}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "granitemoehybrid".

  Raises:
    ValueError: see `hf_config.decoder_fields`; or the model has experts, or layers
      that are not attention.
  """
  hf = {**_DEFAULTS, **hf}
  hf_config.check_supported(hf, _SUPPORTED)
  layers = hf_values.layers(hf)
  types = hf.pop("layer_types", None) or hf.pop("layers_block_type", None)
  if not isinstance(types, list) or [x in _ATTENTION for x in types] != [True] * layers:
    raise ValueError(
      f"layer_types is {types!r}; expected 'attention' for each of the {layers} "
      "layers. Granite 4 models with Mamba layers are not supported"
    )
  hf["intermediate_size"] = hf_values.integer(hf, "shared_intermediate_size")
  fields = hf_config.decoder_fields(hf) | granite.read_factors(hf)
  if hf.get("position_embedding_type") != "rope":
    fields["layer_types"] = ("nope",) * layers
  return ModelConfig(**fields)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a dense Granite 4 model.

  Raises:
    ValueError: some layers have rotary embedding and others do not.
  """
  kinds = set(config.layer_types or ("full",))
  if kinds not in ({"full"}, {"nope"}):
    raise ValueError(
      f"layer_types is {config.layer_types}; expected 'full' for all layers, or 'nope' "
      "for all. Save the model as another family"
    )
  architecture = "GraniteMoeHybridForCausalLM"
  hf = hf_config.write_decoder(config, "granitemoehybrid", architecture)
  del hf["head_dim"]  # not a field: it is hidden_size / heads
  if config.head_dim * config.num_heads != config.embed_dim:
    raise ValueError(
      f"head_dim is {config.head_dim}; expected embed_dim / num_heads, which "
      "config.json of Granite 4 implies. Save the model as another family"
    )
  return (
    hf
    | granite.write_factors(config)
    | {
      "num_local_experts": 0,
      "num_experts_per_tok": 0,
      "shared_intermediate_size": config.hidden_dim,
      "layer_types": ["full_attention"] * config.num_layers,
      "position_embedding_type": "rope" if kinds == {"full"} else None,
      # Sizes of Mamba layers, which are checked although there are none.
      "mamba_n_heads": config.num_heads,
      "mamba_expand": 2,
      "mamba_d_head": 2 * config.embed_dim // config.num_heads,
    }
  )


FAMILY = Family(
  name="granite4",
  model_types=("granitemoehybrid",),
  config_class=ModelConfig,
  model_class=Granite4,
  names=NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
  hub_names={
    f"granite-4.0-{size}{ending}": f"granite4_{size}"
    for size in ("1b", "micro")
    for ending in ("", "-base")
  },
)
