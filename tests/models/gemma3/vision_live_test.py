"""The vision side against the installed transformers, with sizes the golden lacks.

Runs where the `parity` extra is installed; vision_test.py runs everywhere.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import checkpoints
from tests.models.gemma3 import towers
from tunix.models.gemma3 import image_tokens, vision_params
from tunix.models.gemma3.image_tokens import ImageTokens
from tunix.models.gemma3.vision import VisionConfig
from tunix.models.transformer.visibility import Visibility

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")

TOLERANCE = 1e-5
CONFIG = VisionConfig(
  num_layers=3,
  embed_dim=24,
  hidden_dim=40,
  num_heads=3,
  patch_size=8,
  image_size=48,
  norm_eps=1e-5,
  tokens_per_image=4,
)
TEXT = {"model_type": "gemma3_text", "hidden_size": 20, "num_attention_heads": 2}


def published_config():
  tokens = ImageTokens(per_image=CONFIG.tokens_per_image)
  return vision_params.config_to_hf(CONFIG, tokens, TEXT)


@pytest.fixture(scope="module")
def theirs():
  """Their tower and projector, and the tensors under published names."""
  torch.manual_seed(0)
  config = transformers.Gemma3Config(**published_config())
  config.vision_config._attn_implementation = "eager"
  tower = transformers.SiglipVisionModel(config.vision_config).eval()
  projector = gemma3.Gemma3MultiModalProjector(config).eval()
  parts = {"vision_tower.": tower, "multi_modal_projector.": projector}
  weights = {
    vision_params.canonical_key(prefix + name): value
    for prefix, part in parts.items()
    for name, value in part.named_parameters()
  }
  for value in weights.values():
    noise = torch.randn_like(value) * 0.2
    value.data += noise
  return tower, projector, weights


def inputs():
  rng = np.random.default_rng(0)
  pixels = rng.uniform(-1, 1, (2, 48, 48, 3)).astype(np.float32)
  return pixels, rng.normal(size=(2, 4, 20)).astype(np.float32)


def test_features_and_gradients(theirs):
  tower, projector, weights = theirs
  pixels, cotangent = inputs()
  patches = tower(torch.tensor(pixels.transpose(0, 3, 1, 2))).last_hidden_state
  features = projector(patches)
  (features * torch.tensor(cotangent)).sum().backward()

  ours = towers.build(CONFIG, 20, {k: v.detach().numpy() for k, v in weights.items()})
  got = ours.vision_tower(pixels)
  assert checkpoints.relative(got, patches.detach().numpy()) < TOLERANCE
  got = ours.multi_modal_projector(got)
  assert checkpoints.relative(got, features.detach().numpy()) < TOLERANCE
  want = {key: value.grad.numpy() for key, value in weights.items()}
  towers.assert_equal_gradients(towers.gradients(ours, pixels, cotangent), want)


def test_config_is_read_by_transformers():
  config = transformers.Gemma3Config(**published_config())
  defaults = ImageTokens()
  assert config.image_token_id == defaults.soft
  assert (config.boi_token_id, config.eoi_token_id) == (defaults.start, defaults.end)
  assert vision_params.vision_config_from_hf(config.to_dict()) == CONFIG


def test_who_sees_whom():
  window = 3
  config = transformers.Gemma3TextConfig(
    hidden_size=16, num_attention_heads=2, num_hidden_layers=2, sliding_window=window
  )
  config._attn_implementation = "eager"
  tokens = np.array(
    [[5, 9, 9, 9, 9, 5, 5, 9, 9, 9, 9, 5], [0, 0, 5, 9, 9, 9, 9, 9, 9, 9, 9, 5]]
  )
  valid = tokens != 0
  is_image = torch.tensor(tokens == 9).long()
  masks = gemma3.create_masks_for_vision_model(
    config,
    torch.zeros(*tokens.shape, 16),
    torch.tensor(valid).long(),
    None,  # the cache, whose name depends on transformers' version
    None,
    gemma3.get_block_sequence_ids_for_mask(is_image),
  )
  groups = image_tokens.image_groups(jnp.asarray(tokens), 9)
  length = tokens.shape[1]
  visible = Visibility(jnp.arange(length), groups=groups)
  ours = {
    "full_attention": visible.dense(length),
    "sliding_attention": visible.dense(length, window),
  }
  for kind, mask in ours.items():
    want = masks[kind][:, 0].numpy() == 0
    mask = np.asarray(mask) & valid[:, None, :]
    np.testing.assert_array_equal(mask[valid], want[valid], err_msg=kind)


def test_what_transformers_writes_has_our_names(tmp_path):
  model = transformers.Gemma3ForConditionalGeneration.from_pretrained(towers.GOLDEN)
  golden = set(checkpoints.tensors(towers.GOLDEN))
  model.save_pretrained(tmp_path / "as_read")
  assert set(st_keys(tmp_path / "as_read")) == golden
  fresh = transformers.Gemma3ForConditionalGeneration(model.config)
  fresh.save_pretrained(tmp_path / "fresh")
  keys = st_keys(tmp_path / "fresh")
  assert set(keys) != golden
  assert {vision_params.canonical_key(key) for key in keys} == golden
  in_memory = {vision_params.canonical_key(k) for k, _ in fresh.named_parameters()}
  assert in_memory == golden


def st_keys(folder):
  safetensors = pytest.importorskip("safetensors")
  with safetensors.safe_open(folder / "model.safetensors", "np") as file:
    return list(file.keys())
