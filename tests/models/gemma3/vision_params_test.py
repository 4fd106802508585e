import json

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models import checkpoints
from tests.models.gemma3 import towers
from tunix.models.gemma3 import vision_params
from tunix.models.gemma3.image_tokens import ImageTokens
from tunix.models.gemma3.vision import VisionConfig
from tunix.models.transformer import params
from tunix.models.transformer.shards import sharding
from tunix.utils import tree

NORM = "vision_tower.vision_model.post_layernorm.weight"
PROJECTION = "multi_modal_projector.mm_input_projection_weight"
TEXT = "language_model.model.norm.weight"


def golden_hf():
  return json.loads((towers.GOLDEN / "config.json").read_text())


@pytest.mark.parametrize(
  "key, want",
  [
    (NORM, NORM),
    ("vision_tower.post_layernorm.weight", NORM),
    ("model.vision_tower.post_layernorm.weight", NORM),
    ("model.vision_tower.vision_model.post_layernorm.weight", NORM),
    (PROJECTION, PROJECTION),
    ("model." + PROJECTION, PROJECTION),
    (TEXT, TEXT),
    ("model.language_model.norm.weight", TEXT),
    ("lm_head.weight", "language_model.lm_head.weight"),
    ("language_model.lm_head.weight", "language_model.lm_head.weight"),
    ("model.norm.weight", "model.norm.weight"),
  ],
)
def test_spellings(key, want):
  assert vision_params.canonical_key(key) == want
  assert vision_params.canonical_key(want) == want


def test_every_parameter_and_every_tensor_has_its_name():
  config = towers.golden_config()
  _, state = sharding.abstract(lambda: towers.Sight(config, 64, rngs=nnx.Rngs(0)))
  paths = tree.flatten(state)
  assert sorted(paths) == sorted(vision_params.VISION)
  named = {
    key: place.tensor_shape(paths[path].shape)
    for path in paths
    for place in [params.place(vision_params.VISION, path, config)]
    for key in place.keys
  }
  stored = {
    key: value.shape
    for key, value in checkpoints.tensors(towers.GOLDEN).items()
    if not key.startswith("language_model.")
  }
  assert named == stored


def test_names_of_the_text_inside():
  names = vision_params.nested_text(params.DECODER)
  assert names["norm.scale"].key == TEXT
  q_proj = names["layers.attn.q_proj.kernel"]
  assert q_proj.key == "language_model.model.layers.{i}.self_attn.q_proj.weight"
  assert q_proj.transpose


def test_config():
  assert vision_params.vision_config_from_hf(golden_hf()) == VisionConfig(
    num_layers=2,
    embed_dim=16,
    hidden_dim=24,
    num_heads=2,
    image_size=56,
    tokens_per_image=4,
  )
  tokens = vision_params.image_tokens_from_hf(golden_hf())
  assert (tokens.start, tokens.soft, tokens.end, tokens.per_image) == (77, 79, 78, 4)


def test_published_config():
  hf = {
    "model_type": "gemma3",
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "image_token_index": 262_144,
    "mm_tokens_per_image": 256,
    "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text"},
    "vision_config": {
      "hidden_size": 1152,
      "image_size": 896,
      "intermediate_size": 4304,
      "model_type": "siglip_vision_model",
      "num_attention_heads": 16,
      "num_hidden_layers": 27,
      "patch_size": 14,
      "vision_use_head": False,
    },
  }
  config = vision_params.vision_config_from_hf(hf, param_dtype=jnp.bfloat16)
  assert config == VisionConfig(param_dtype=jnp.bfloat16)
  assert vision_params.image_tokens_from_hf(hf) == ImageTokens()
  assert vision_params.text_config(hf) == {
    "hidden_size": 2560,
    "tie_word_embeddings": True,
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
  }


def test_config_there_and_back():
  hf = golden_hf()
  config = vision_params.vision_config_from_hf(hf)
  tokens = vision_params.image_tokens_from_hf(hf)
  written = vision_params.config_to_hf(config, tokens, vision_params.text_config(hf))
  assert json.loads(json.dumps(written)) == written
  assert vision_params.vision_config_from_hf(written) == config
  assert vision_params.image_tokens_from_hf(written) == tokens
  assert vision_params.text_config(written)["sliding_window"] == 3


def test_newer_names_of_the_ids():
  hf = {"image_token_id": 7, "boi_token_id": 5, "eoi_token_index": 6}
  tokens = vision_params.image_tokens_from_hf(hf)
  assert (tokens.start, tokens.soft, tokens.end) == (5, 7, 6)


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("hidden_act", "relu", "hidden_act is 'relu', supported is only 'gelu_pytorch"),
    ("num_channels", 1, "num_channels is 1"),
    ("model_type", "clip_vision_model", "clip_vision_model"),
    ("hidden_size", "16", "hidden_size is '16'"),
    ("image_size", [56, 56], "image_size is"),
  ],
)
def test_refused(field, value, message):
  hf = golden_hf()
  hf["vision_config"][field] = value
  with pytest.raises(ValueError, match=message):
    vision_params.vision_config_from_hf(hf)


def test_text_only_config_is_refused():
  with pytest.raises(ValueError, match="vision_config is None"):
    vision_params.vision_config_from_hf({"model_type": "gemma3_text"})
