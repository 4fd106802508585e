"""Folders of Qwen3.5 with a tower of images, and settings that are refused."""

import json

import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tunix.models import families
from tunix.models.automodel import AutoModel
from tunix.models.files import fused_experts, tensor_files
from tunix.models.qwen3_5_moe.model import ModelConfig
from tunix.utils import tree


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_folder_with_a_tower_and_mtp(name, tmp_path):
  folder = checkpoints.copy(name, tmp_path / "vision")
  want = tree.flatten(nnx.state(AutoModel.from_pretrained(folder)))
  values = {
    key.replace("model.", "model.language_model.", 1): value
    for key, value in checkpoints.fuse_experts(checkpoints.tensors(folder)).items()
  }
  more = (
    *("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"),
    "model.visual.patch_embed.proj.weight",
  )
  checkpoints.rewrite(folder, values | dict.fromkeys(more, np.ones((2, 2), np.float32)))
  text = json.loads((folder / "config.json").read_text())
  outer = {"model_type": name, "text_config": text, "vision_config": {}}
  (folder / "config.json").write_text(json.dumps(outer))
  got = tree.flatten(nnx.state(AutoModel.from_pretrained(folder)))
  assert got.keys() == want.keys()
  for path, value in want.items():
    np.testing.assert_array_equal(got[path], value)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"layer_types": ["sliding_attention"]}, "layer_types is .*expected a list of"),
    ({"model_type": "qwen3_5"}, "text_config is None; expected the settings"),
    ({"model_type": "qwen3_5_moe"}, "expected .* of model_type 'qwen3_5_moe_text'"),
    ({"linear_num_key_heads": 3}, "num_key_heads is 3; expected a divisor"),
  ],
)
def test_wrong_settings_are_refused(fields, message):
  hf = {"num_hidden_layers": 1, "model_type": "qwen3_5_text"} | fields
  with pytest.raises(ValueError, match=message):
    families.by_model_type(hf["model_type"]).config_from_hf(hf)


def test_a_mixture_with_dense_layers_is_not_saved():
  config = ModelConfig.qwen3p5_35b_a3b(moe=None)
  with pytest.raises(
    ValueError, match="moe is None; expected fused experts in every layer"
  ):
    families.of_config(config).config_to_hf(config)


def test_slices_of_separate_experts():
  folder = checkpoints.GOLDEN / "qwen3_5_moe"
  names = families.FAMILIES["qwen3_5_moe"].names
  joined = fused_experts.join(tensor_files.open_folder(folder), names)
  for key, want in checkpoints.fuse_experts(checkpoints.tensors(folder)).items():
    view = joined[key].map()
    for rows in (slice(0, 3), slice(6, 11), slice(8, 16)) if "experts" in key else ():
      at = (slice(1, 3), rows, slice(2, 7))
      np.testing.assert_array_equal(view[at], want[at])


def test_separate_experts_that_do_not_belong_together_are_refused(tmp_path):
  folder = checkpoints.copy("qwen3_5_moe", tmp_path / "odd")
  values = checkpoints.tensors(folder)
  key = "model.layers.0.mlp.experts.1.up_proj.weight"
  checkpoints.rewrite(folder, values | {key: values[key][1:].copy()})
  with pytest.raises(ValueError, match=r"1.up_proj.weight' is float32\(7, 16\); expec"):
    AutoModel.from_pretrained(folder)
  checkpoints.rewrite(folder, {k: v for k, v in values.items() if k != key})
  with pytest.raises(ValueError, match=r"1.up_proj.weight' is missing; .* 4 experts"):
    AutoModel.from_pretrained(folder)
