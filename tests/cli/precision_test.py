"""Trained weights are float32, whatever the checkpoint; folders keep their dtype."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from tests.cli import runs
from tests.models import checkpoints
from tunix.cli import config as config_lib
from tunix.cli.make import export as build_export, loading
from tunix.cli.run.settle import settle_values
from tunix.models import automodel, safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.models.files import tensor_files

PRESET = {
  "model__name": "qwen3_0p6b",
  "model__args": "{num_layers: 1, vocab_size: 520, embed_dim: 8, hidden_dim: 8, "
  "num_heads: 2, num_kv_heads: 1, head_dim: 4}",
}


@pytest.fixture(scope="module")
def half(model, tmp_path_factory):
  """The model in bfloat16."""
  folder = tmp_path_factory.mktemp("half") / "model"
  loaded = AutoModel.from_pretrained(model)
  safetensors_saver.save_pretrained(loaded, folder, source=model, dtype="bfloat16")
  return folder


def built(**keys):
  """(settled configuration, its model)."""
  config = settle_values(config_lib.load(runs.arguments(**keys)), None)
  return config, loading.ModelLoader(config, None).model()


def dtypes(folder):
  tensors = tensor_files.open_folder(folder).values()
  return {str(tensor.dtype) for tensor in tensors}


@pytest.mark.parametrize(
  ("keys", "weights", "computation", "export"),
  [
    ({}, "float32", "bfloat16", "bfloat16"),
    ({"model__param_dtype": "bfloat16"}, "bfloat16", "bfloat16", "bfloat16"),
    ({"model__dtype": "float32"}, "float32", "float32", "bfloat16"),
    ({"export__dtype": "float32"}, "float32", "bfloat16", "float32"),
    (
      {"lora__rank": 2, "export__kind": "merged"},
      "bfloat16",
      "bfloat16",
      "bfloat16",
    ),
  ],
)
def test_dtypes_of_a_bfloat16_checkpoint(half, keys, weights, computation, export):
  config, model = built(model__path=half, **keys)
  assert jnp.dtype(model.config.param_dtype) == weights
  assert jnp.dtype(model.config.dtype) == computation
  leaves = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.LoRAParam)))
  assert {str(leaf.dtype) for leaf in leaves} == {weights}
  assert str(build_export.export_dtype(config, model)) == export
  text = build_export.describe_precision(config, model)
  assert f"weights {weights}, computation {computation}, export {export}" in text


def test_a_float32_checkpoint_stays_float32(model):
  config, loaded = built(model__path=model)
  assert jnp.dtype(loaded.config.param_dtype) == jnp.float32
  assert build_export.export_dtype(config, loaded) == jnp.float32
  config, loaded = built(model__path=model, model__dtype="bfloat16")
  assert (loaded.config.dtype, loaded.config.param_dtype) == (jnp.bfloat16, jnp.float32)
  assert build_export.export_dtype(config, loaded) == jnp.float32


def test_a_checkpoint_that_names_no_dtype_has_that_of_its_weights(half, tmp_path):
  folder = tmp_path / "unnamed"
  shutil.copytree(half, folder)
  hf = json.loads((folder / "config.json").read_text())
  named = {"dtype", "torch_dtype"}
  assert named & hf.keys()
  hf = {key: value for key, value in hf.items() if key not in named}
  (folder / "config.json").write_text(json.dumps(hf))
  config, model = built(model__path=folder, model__dtype="float32")
  assert build_export.export_dtype(config, model) == jnp.bfloat16


def test_the_dtype_may_be_named_by_the_settings_of_the_text_model(tmp_path):
  folder = checkpoints.copy("qwen3_5_moe", tmp_path / "tower")  # weights in float32
  text = json.loads((folder / "config.json").read_text())
  text |= {"dtype": "bfloat16", "torch_dtype": None}
  fields = {"model_type": "qwen3_5_moe", "text_config": text}
  (folder / "config.json").write_text(json.dumps(fields))
  assert automodel.config_of_folder(folder).dtype == jnp.bfloat16
  config, model = built(model__path=folder, model__dtype="float32")
  assert build_export.export_dtype(config, model) == jnp.bfloat16


def test_a_folder_in_fp8_is_written_in_the_dtype_of_its_decoded_weights(half, tmp_path):
  folder = tmp_path / "packed"
  shutil.copytree(half, folder)
  tensors = checkpoints.tensors(folder)
  # The first tensor by name is one of those in FP8.
  name = "model.layers.0.mlp.down_proj.weight"
  tensors = {
    name: tensors[name].astype(jnp.float8_e4m3fn),
    f"{name}_scale_inv": np.ones((), np.float32),
    **{key: value for key, value in tensors.items() if key != name},
  }
  checkpoints.rewrite(folder, tensors)
  settings = {"quant_method": "fp8", "weight_block_size": None}
  checkpoints.change_config(
    folder, quantization_config=settings, dtype=None, torch_dtype=None
  )
  config, model = built(model__path=folder, model__dtype="float32")
  assert build_export.export_dtype(config, model) == jnp.bfloat16


def test_from_scratch_weights_are_float32_and_written_as_computed():
  config, model = built(**PRESET, model__dtype="bfloat16")
  assert (model.config.dtype, model.config.param_dtype) == (jnp.bfloat16, jnp.float32)
  assert build_export.export_dtype(config, model) == jnp.bfloat16


def test_small_updates_are_kept_and_the_folder_stays_bfloat16(half, settings, capsys):
  keys = settings | {"model__path": half, "training__max_steps": 2}
  # Adam moves a weight by about the rate: below half a bfloat16 step of most weights.
  keys |= {"training__learning_rate": "1e-5", "checkpoint__every_n_steps": 2}
  assert runs.tunix("train", *runs.arguments(**keys)) == 0
  line = "precision: weights float32, computation bfloat16, export bfloat16"
  assert line in capsys.readouterr().out
  out = keys["output_dir"]
  assert config_lib.load([str(out / "config.yaml")]).model.param_dtype == "float32"
  assert dtypes(out / "export") == {"bfloat16"}

  whole = out.parent / "whole"
  words = ["--run", out, "--to", whole, "--dtype", "float32"]
  assert runs.tunix("export", *words) == 0
  assert dtypes(whole) == {"float32"}
  before = tensor_files.open_folder(half)
  changed = 0.0
  for name, tensor in tensor_files.open_folder(whole).items():
    old = np.asarray(before[name].map(), np.float32)
    changed = max(changed, float(np.mean(tensor.map() != old)))
  assert changed > 0.9


@pytest.mark.parametrize(
  ("keys", "own", "adds"),
  [
    ({"tokenizer__messages": "given"}, None, None),
    ({"tokenizer__add_bos": "false"}, None, None),
    ({"tokenizer__add_bos": "false"}, True, False),
    ({"tokenizer__add_bos": "true"}, None, True),
    # A run that an older version began, which copied the files.
    (
      {
        "tokenizer__add_bos": "true",
        "tokenizer__messages": "given",
        "optimizer__decay_targets": "[.*]",
      },
      None,
      None,
    ),
  ],
)
def test_exports_copy_the_tokenizer_that_no_setting_changes(
  model, keys, own, adds, tmp_path
):
  folder = shutil.copytree(model, tmp_path / "model")
  rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  rust.post_processor = tokenizers.processors.ByteLevel()  # as SmolLM2's: without BOS
  rust.save(str(folder / "tokenizer.json"))
  file = folder / "tokenizer_config.json"
  fields = {"bos_token": "<s>", "add_bos_token": own}
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))
  config, loaded = built(model__path=folder, **keys)
  build_export.export(config, loaded, "full", tmp_path / "out")
  written = tmp_path / "out" / "tokenizer_config.json"
  assert json.loads(written.read_text()).get("add_bos_token") == adds
  assert (written.read_bytes() == file.read_bytes()) == (adds is None)
