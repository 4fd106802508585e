import json

import numpy as np
from flax import nnx

from tests import toys
from tunix.generate.mappings import MappingConfig
from tunix.models import lora, safetensors_saver
from tunix.models.files import tensor_files
from tunix.utils import tree


def test_a_checkpoint_is_what_the_mappings_say(tmp_path):
  model = toys.model()
  mapped = MappingConfig.from_model(model)
  safetensors_saver.save_pretrained(model, tmp_path / "out")
  tensors = tensor_files.open_folder(tmp_path / "out")
  flat = tree.flatten(nnx.state(model, nnx.Param))
  assert flat.keys() == mapped.to_hf_mappings.keys()
  assert {k for keys in mapped.to_hf_mappings.values() for k in keys} == set(tensors)
  for path, keys in mapped.to_hf_mappings.items():
    value = np.asarray(flat[path])
    layers = value if len(keys) > 1 else value[None]
    if len(keys) == 1 and value.ndim == 3:
      layers = value
    for layer, key in zip(layers, keys):
      turned = layer.T if path in mapped.to_hf_transpose_keys else layer
      assert tensors[key].shape == turned.shape, key


def test_adapters_name_the_weights_they_adapt():
  config = lora.LoraConfig(rank=2, alpha=2.0, targets=("q_proj",))
  mapped = MappingConfig.from_model(lora.apply(toys.model(), config))
  keys = mapped.lora_to_hf_mappings["layers.attn.q_proj.lora_a"]
  assert keys == mapped.to_hf_mappings["layers.attn.q_proj.kernel"]
  assert keys[1] == "model.layers.1.self_attn.q_proj.weight"
  assert json.dumps(mapped.lora_to_hf_mappings)
