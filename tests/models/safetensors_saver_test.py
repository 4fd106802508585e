import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models import families, lora
from tunix.models.automodel import AutoModel
from tunix.models.files import tensor_files
from tunix.models.llama3 import model as llama3
from tunix.models.safetensors_saver import save_pretrained
from tunix.utils import tree

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


def leaves(model):
  return tree.flatten(nnx.state(model, nnx.Param))


def assert_equal(model, other):
  for path, value in leaves(model).items():
    np.testing.assert_array_equal(leaves(other)[path], value, err_msg=path)


@pytest.mark.parametrize("name", checkpoints.NAMES)
def test_saved_tensors_are_those_that_were_loaded(name, tmp_path):
  source = checkpoints.GOLDEN / name
  model = AutoModel.from_pretrained(source)
  save_pretrained(model, tmp_path / "out")
  canonical = families.of_config(model.config).canonical_key
  want = {canonical(key): x for key, x in checkpoints.tensors(source).items()}
  if name == "qwen3_5_moe":  # we write what the hub has, transformers other tensors
    want = checkpoints.fuse_experts(want)
  got = checkpoints.tensors(tmp_path / "out")
  assert sorted(got) == sorted(want)
  for key, value in want.items():
    np.testing.assert_array_equal(got[key], value)


@pytest.mark.parametrize("shards", [10**9, 20_000])
def test_there_and_back(shards, tmp_path):
  model = toys.model(max_position=64)
  save_pretrained(model, tmp_path / "out", max_shard_bytes=shards)
  assert (tmp_path / "out" / "model.safetensors").exists() == (shards == 10**9)
  back = AutoModel.from_pretrained(tmp_path / "out")
  assert back.config == model.config
  assert_equal(model, back)


def test_unstacked_model(tmp_path):
  model = toys.model()
  save_pretrained(model.unstack(), tmp_path / "out")
  assert_equal(model, AutoModel.from_pretrained(tmp_path / "out"))


def test_sharded_model_and_no_host_copy_kept(tmp_path, mesh_fsdp4_tp2):
  model = AutoModel.from_config(toys.config(), mesh_fsdp4_tp2)
  save_pretrained(model, tmp_path / "out")
  assert_equal(toys.model(), AutoModel.from_pretrained(tmp_path / "out"))
  # jax keeps the host copy of an array in this attribute: the whole model again.
  assert all(x._npy_value is None for x in leaves(model).values())


def test_dtype(tmp_path):
  model = toys.model()
  save_pretrained(model, tmp_path / "out", dtype=jnp.bfloat16)
  back = AutoModel.from_pretrained(tmp_path / "out")
  assert back.config.param_dtype == jnp.bfloat16
  assert_equal(
    jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)), nnx.state(back)
  )


def test_adapters_are_merged(tmp_path):
  adapted = toys.model(lora_rank=2)
  save_pretrained(adapted, tmp_path / "out")
  assert_equal(lora.merge(adapted), AutoModel.from_pretrained(tmp_path / "out"))
  assert leaves(adapted)["layers.attn.q_proj.lora_a"].shape == (2, 32, 2)


def test_source_gives_tokenizer_and_token_ids(tmp_path):
  source = checkpoints.copy("llama3p1", tmp_path / "source")
  (source / "tokenizer.json").write_text("{}")
  (source / "unrelated.bin").write_text("x")
  save_pretrained(AutoModel.from_pretrained(source), tmp_path / "out", source=source)
  names = {f.name for f in (tmp_path / "out").iterdir()}
  assert names == {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
  }
  hf = json.loads((tmp_path / "out" / "config.json").read_text())
  assert (hf["bos_token_id"], hf["eos_token_id"], hf["pad_token_id"]) == (1, 2, 0)
  with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
    save_pretrained(toys.model(), tmp_path / "x", source=tmp_path / "nowhere")
  assert not (tmp_path / "x").exists()


def test_what_a_source_holds_and_a_model_does_not_change_is_kept(tmp_path):
  source = checkpoints.copy("llama3p1", tmp_path / "source")
  (source / "additional_chat_templates").mkdir()
  (source / "additional_chat_templates" / "rag.jinja").write_text("rag")
  unknown = {"use_cache": True, "our_notes": {"a": [1]}, "transformers_version": "4.40"}
  dropped = {"quantization_config": {"bits": 4}, "auto_map": {"AutoModel": "x.Y"}}
  dropped["partial_rotary_factor"] = 0.5  # would be read as another model
  model = AutoModel.from_pretrained(source)
  checkpoints.change_config(source, **unknown, **dropped)
  for out in (tmp_path / "out", source):
    save_pretrained(model, out, source=source)
    hf = json.loads((out / "config.json").read_text())
    assert {name: hf[name] for name in unknown} == unknown
    assert not hf.keys() & dropped.keys()
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "rag"
    assert AutoModel.from_pretrained(out).config == model.config


def test_more_fields_and_old_shards(tmp_path):
  model = toys.model()
  save_pretrained(model, tmp_path / "out", max_shard_bytes=20_000)
  save_pretrained(model, tmp_path / "out", hf_fields={"eos_token_id": [7, 8]})
  names = sorted(f.name for f in (tmp_path / "out").iterdir())
  assert names == ["config.json", "model.safetensors"]
  hf = json.loads((tmp_path / "out" / "config.json").read_text())
  assert hf["eos_token_id"] == [7, 8]


def test_saving_over_the_folder_it_was_loaded_from(tmp_path):
  folder = checkpoints.copy("qwen3", tmp_path / "model")
  model = AutoModel.from_pretrained(folder)
  save_pretrained(model, folder, source=folder)
  assert_equal(model, AutoModel.from_pretrained(folder))
  assert not (folder / tensor_files.INDEX).exists()
  assert (folder / "expected.npz").exists(), "other files stay"


def test_parameter_without_a_name(tmp_path):
  model = toys.model()
  model.norm.bias = nnx.Param(jnp.zeros(32))
  with pytest.raises(
    ValueError, match=r"parameter 'norm.bias' has no Hugging Face name"
  ):
    save_pretrained(model, tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  "changes",
  [
    {"layer_types": ("sliding", "full"), "sliding_window": 4},
    {"norm_offset": 1.0},
    {"scale_embeddings": True},
    {"final_softcap": 5.0},
    {"query_scale": 0.3},
    {"qk_norm": "head"},
    {"norms": "both"},
  ],
)
def test_what_config_json_cannot_say_is_not_saved(changes, tmp_path):
  model = AutoModel.from_config(llama3.ModelConfig(**SIZES, **changes))
  name = next(iter(changes))
  with pytest.raises(
    ValueError, match=f"{name} is .*config.json of llama3 cannot express"
  ):
    save_pretrained(model, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_other_words_for_the_same_function_are_saved(tmp_path):
  same = {"query_scale": 8**-0.5, "layer_types": ("full", "full"), "sliding_window": 4}
  model = AutoModel.from_config(llama3.ModelConfig(**SIZES, **same))
  save_pretrained(model, tmp_path / "out")
  back = AutoModel.from_pretrained(tmp_path / "out")
  np.testing.assert_allclose(
    toys.logits(back, TOKENS), toys.logits(model, TOKENS), rtol=1e-6
  )


SIZES = {
  "num_layers": 2,
  "vocab_size": 48,
  "embed_dim": 16,
  "hidden_dim": 24,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 8,
}
