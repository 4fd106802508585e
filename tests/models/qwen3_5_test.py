"""Folders of Qwen3.5 with a tower of images, and settings that are refused."""

import json

import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tunix.models.automodel import AutoModel
from tunix.models.qwen3_5 import params
from tunix.utils import tree


def test_the_text_model_of_a_folder_with_a_tower_and_mtp(tmp_path):
  folder = checkpoints.copy("qwen3_5", tmp_path / "vision")
  want = tree.flatten(nnx.state(AutoModel.from_pretrained(folder)))
  values = {
    key.replace("model.", "model.language_model.", 1): value
    for key, value in checkpoints.tensors(folder).items()
  }
  more = ("mtp.layers.0.mlp.up_proj.weight", "model.visual.patch_embed.proj.weight")
  checkpoints.rewrite(folder, values | dict.fromkeys(more, np.ones((2, 2), np.float32)))
  text = json.loads((folder / "config.json").read_text())
  outer = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
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
    ({"linear_num_key_heads": 3}, "num_key_heads is 3; expected a divisor"),
  ],
)
def test_wrong_settings_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    params.config_from_hf({"num_hidden_layers": 1} | fields)
