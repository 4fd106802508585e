"""Checkpoints of SmolVLM2, SmolVLM and Idefics3: `config.json`, names and the family.

The two model types are one architecture. Models are written as "smolvlm".
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family
from tunix.models.llama3 import params as llama3
from tunix.models.smolvlm.model import ModelConfig, SmolVLM
from tunix.models.transformer import params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config
from tunix.models.transformer.hf.values import integer
from tunix.models.transformer.params import HfName, NameTable
from tunix.models.vision import params as tower_params
from tunix.models.vision.siglip import SiglipConfig
from tunix.utils import checks

_TEXT = "model.text_model."
NAMES: NameTable = {
  **tower_params.siglip_names("model.vision_model."),
  "multi_modal_projector.proj.kernel": HfName(
    "model.connector.modality_projection.proj.weight", transpose=True
  ),
  **{
    path: HfName(name.key.replace("model.", _TEXT, 1), name.transpose)
    for path, name in params.DECODER.items()
  },
}

# Values of absent fields in transformers.
_VISION_DEFAULTS = {
  "num_hidden_layers": 12,
  "hidden_size": 1152,
  "intermediate_size": 3072,
  "num_attention_heads": 16,
  "patch_size": 32,
  "image_size": 224,
}
_TEXT_DEFAULTS = {"rms_norm_eps": 1e-5}
_TYPES = ("smolvlm_vision", "idefics3_vision", "smolvlm", "idefics3")


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of model_type "smolvlm" or "idefics3".

  Raises:
    ValueError: see `hf_config.decoder_fields` and `vision.params`; or the text model is
      no Llama.
  """
  text = tower_params.text_section(hf, tied=False)
  hf_config.check_supported(text, {"model_type": ("llama",)}, "text_config.")
  fields = vars(llama3.config_from_hf(_TEXT_DEFAULTS | text))
  fields |= {"num_scores": hf_config.read_scores(hf)}
  sizes = tower_params.read_siglip(hf, _VISION_DEFAULTS, *_TYPES)
  return ModelConfig(
    **fields,
    vision=SiglipConfig(**sizes),
    shuffle=integer({"scale_factor": 2, **hf}, "scale_factor"),
    image_token_id=integer(
      {"image_token_id": 128_257, **hf}, "image_token_id", checks.NOT_NEGATIVE
    ),
  )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a SmolVLM2."""
  assert isinstance(config, ModelConfig)
  vision = tower_params.write_siglip(config.vision, _TYPES[0])
  text = llama3.config_to_hf(config)
  hf = tower_params.write_model(config, "smolvlm", "SmolVLM", text, vision)
  return hf | {
    "scale_factor": config.shuffle,
    "image_token_id": config.image_token_id,
  }


FAMILY = tower_params.with_text_only(
  llama3.FAMILY,
  Family(
    name="smolvlm",
    model_types=("smolvlm", "idefics3"),
    config_class=ModelConfig,
    model_class=SmolVLM,
    names=NAMES,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
  ),
  {_TEXT: "model."},
  r"model\.(vision_model|connector)\..*",
)
