import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models import families
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import Qwen3
from tunix.models.transformer.config import ShardingRules
from tunix.utils import mesh as mesh_lib, tree

TOKENS = np.arange(3, 35, dtype=np.int32).reshape(8, 4)


def leaves(model):
  return tree.flatten(nnx.state(model))


@pytest.fixture
def llama(tmp_path):
  return checkpoints.copy("llama3p1", tmp_path / "model")


def test_dtype_is_the_checkpoint_s_own(tmp_path):
  folder = checkpoints.copy("qwen3", tmp_path / "model")
  model = AutoModel.from_pretrained(folder)
  assert isinstance(model, Qwen3)
  assert model.config.param_dtype == model.config.dtype == jnp.float32
  values = {k: v.astype(jnp.bfloat16) for k, v in checkpoints.tensors(folder).items()}
  checkpoints.rewrite(folder, values)
  checkpoints.change_config(folder, dtype=None)
  half = AutoModel.from_pretrained(folder)
  assert half.config.param_dtype == half.config.dtype == jnp.bfloat16
  assert {x.dtype for x in leaves(half).values()} == {np.dtype(jnp.bfloat16)}
  checkpoints.change_config(folder, torch_dtype="float32")
  assert AutoModel.from_pretrained(folder).config.param_dtype == jnp.float32


def test_dtypes_are_arguments(llama):
  model = AutoModel.from_pretrained(llama, dtype="bfloat16")
  assert model.config.param_dtype == model.config.dtype == jnp.bfloat16
  mixed = AutoModel.from_pretrained(llama, dtype=jnp.bfloat16, param_dtype=jnp.float32)
  assert (mixed.config.param_dtype, mixed.config.dtype) == (jnp.float32, jnp.bfloat16)
  full = leaves(AutoModel.from_pretrained(llama))
  for path, value in leaves(model).items():
    np.testing.assert_array_equal(value, full[path].astype(jnp.bfloat16))


def test_remat_and_scan_are_arguments(llama):
  model = AutoModel.load(llama, remat="block", scan_layers=True)
  assert model.config.remat == "block" and model.config.scanned


@pytest.mark.parametrize("name", ["llama3p2_tied", "qwen3"])
@pytest.mark.parametrize("fixture", ["mesh_fsdp8", "mesh_fsdp4_tp2"])
def test_sharded_loading(name, fixture, request):
  mesh = request.getfixturevalue(fixture)
  folder = checkpoints.GOLDEN / name
  plain, split = (
    AutoModel.from_pretrained(folder),
    AutoModel.from_pretrained(folder, mesh),
  )
  for path, value in leaves(split).items():
    np.testing.assert_array_equal(value, leaves(plain)[path])
  # [L, D, N * H]: D over fsdp, heads over tp.
  q = leaves(split)["layers.attn.q_proj.kernel"]
  shard = (2, 16 // mesh.shape["fsdp"], 32 // mesh.shape.get("tp", 1))
  assert q.addressable_shards[0].data.shape == shard
  table = leaves(split)["embed_tokens.embedding"]
  assert len({str(s.index) for s in table.addressable_shards}) == 8
  with jax.set_mesh(mesh):
    logits, _ = jax.jit(lambda state: nnx.merge(nnx.graphdef(split), state)(TOKENS))(
      nnx.state(split)
    )
  assert checkpoints.relative(logits, plain(TOKENS)[0]) < 1e-5


def test_mesh_of_the_context_is_used(mesh_fsdp8):
  with jax.set_mesh(mesh_fsdp8):
    model = AutoModel.from_pretrained(checkpoints.GOLDEN / "qwen3")
  assert mesh_lib.mesh_of(nnx.state(model)) == mesh_fsdp8


def test_sharding_rules_are_an_argument(mesh_fsdp8):
  rules = ShardingRules(fsdp=None, tp="fsdp")
  model = AutoModel.from_pretrained(
    checkpoints.GOLDEN / "qwen3", mesh_fsdp8, sharding=rules
  )
  q = leaves(model)["layers.attn.q_proj.kernel"]
  assert q.addressable_shards[0].data.shape == (2, 16, 4)


def test_own_family(llama):
  # A checkpoint whose names lack the usual prefix, under a model_type of its own.
  values = checkpoints.tensors(llama)
  renamed = {k.replace("model.", "backbone."): v for k, v in values.items()}
  checkpoints.rewrite(llama, renamed)
  checkpoints.change_config(llama, model_type="mine")
  base = families.FAMILIES["llama3"]
  names = {
    path: dataclasses.replace(name, key=name.key.replace("model.", "backbone."))
    for path, name in base.names.items()
  }
  mine = dataclasses.replace(base, name="mine", model_types=("mine",), names=names)
  with pytest.raises(ValueError, match=r"model_type 'mine' is unknown.*family="):
    AutoModel.from_pretrained(llama)
  model = AutoModel.from_pretrained(llama, family=mine)
  original = AutoModel.from_pretrained(checkpoints.GOLDEN / "llama3p1")
  np.testing.assert_array_equal(model(TOKENS)[0], original(TOKENS)[0])


def test_harmless_extra_tensors(tmp_path):
  folder = checkpoints.copy("llama3p2_tied", tmp_path / "model")
  values = checkpoints.tensors(folder)
  values["lm_head.weight"] = values["model.embed_tokens.weight"]
  values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  checkpoints.rewrite(folder, values)
  want = AutoModel.from_pretrained(checkpoints.GOLDEN / "llama3p2_tied")(TOKENS)[0]
  np.testing.assert_array_equal(AutoModel.from_pretrained(folder)(TOKENS)[0], want)


@pytest.mark.parametrize(
  "change, message",
  [
    (
      lambda v: v.pop("model.norm.weight"),
      "'model.norm.weight' is missing.*norm.scale",
    ),
    (
      lambda v: v.pop("model.layers.1.mlp.up_proj.weight"),
      "'model.layers.1.mlp.up_proj.weight' is missing",
    ),
    (lambda v: v.pop("lm_head.weight"), "lm_head.*tie_word_embeddings"),
    (lambda v: v.update(odd=np.ones(1)), "has the tensors 'odd', which a llama3 model"),
    (
      lambda v: v.update({"model.norm.weight": np.ones(15, np.float32)}),
      r"'model.norm.weight' in .* has shape \(15,\), norm.scale needs \(16,\)",
    ),
    (
      lambda v: v.update({"model.norm.weight": np.ones(16, np.int8)}),
      "holds int8, expected floating point",
    ),
  ],
)
def test_tensors_that_do_not_fit(llama, change, message):
  values = checkpoints.tensors(llama)
  change(values)
  checkpoints.rewrite(llama, values)
  with pytest.raises(ValueError, match=message) as error:
    AutoModel.from_pretrained(llama)
  assert "\n" not in str(error.value)


def test_bad_folders(tmp_path, llama):
  def fails(error, match, folder=llama):
    with pytest.raises(error, match=match) as caught:
      AutoModel.from_pretrained(folder)
    assert "\n" not in str(caught.value)

  fails(FileNotFoundError, r"there is no folder .*nowhere", tmp_path / "nowhere")
  fails(FileNotFoundError, r"is a file", llama / "config.json")
  (tmp_path / "empty").mkdir()
  fails(FileNotFoundError, r"has no config.json", tmp_path / "empty")

  checkpoints.change_config(llama, model_type="gpt2")
  fails(
    ValueError,
    r"config.json: model_type 'gpt2' is unknown, known are \['deepseek_v3'.*'llama'",
  )
  checkpoints.change_config(llama, model_type="llama", dtype="float99")
  fails(ValueError, r"dtype 'float99' is unknown")
  checkpoints.change_config(llama, dtype="float32", hidden_act="relu")
  fails(ValueError, r"hidden_act is 'relu'")
  (llama / "config.json").write_text("{")
  fails(ValueError, r"config.json is not valid JSON")
  (llama / "config.json").write_text("[]")
  fails(ValueError, r"config.json holds list")


def test_mistyped_path_beside_existing_folders_is_no_hub_id(llama, monkeypatch):
  monkeypatch.chdir(llama.parent.parent)
  name = f"{llama.parent.name}/typo"
  with pytest.raises(FileNotFoundError, match="there is no folder"):
    AutoModel.from_pretrained(name)


def test_fresh_weights_depend_on_the_seed_and_not_on_the_mesh(mesh_fsdp4_tp2):
  config = toys.config()
  one, two = (
    AutoModel.from_config(config, seed=1),
    AutoModel.from_config(config, seed=2),
  )
  split = AutoModel.from_config(config, mesh_fsdp4_tp2, seed=1)
  name = "layers.mlp.up_proj.kernel"
  np.testing.assert_array_equal(leaves(one)[name], leaves(split)[name])
  assert len({str(s.index) for s in leaves(split)[name].addressable_shards}) == 8
  assert np.abs(leaves(one)[name] - leaves(two)[name]).max() > 0
  rngs = AutoModel.from_config(config, rngs=nnx.Rngs(params=5))
  assert np.abs(leaves(rngs)[name] - leaves(one)[name]).max() > 0


def test_from_config_takes_presets_and_options():
  small = toys.config()
  model = AutoModel.from_config(small, dtype=jnp.bfloat16, remat="dots")
  assert model.config.param_dtype == jnp.bfloat16 and model.config.remat == "dots"
  assert {x.dtype for x in leaves(model).values()} == {np.dtype(jnp.bfloat16)}
  with pytest.raises(ValueError, match="llama4"):
    AutoModel.from_config("llama4")
  base = families.FAMILIES["llama3"]
  mine = dataclasses.replace(base, presets={})
  assert AutoModel.from_config(small, family=mine)(TOKENS)[0].shape == (
    8,
    4,
    toys.VOCAB,
  )


def test_preset_by_name(mesh_fsdp8):
  model = nnx.eval_shape(lambda: AutoModel.from_config("llama3p2_1b", mesh_fsdp8))
  assert leaves(model)["layers.mlp.up_proj.kernel"].shape == (16, 2048, 8192)


def test_index_that_cannot_be_trusted(llama):
  index = llama / "model.safetensors.index.json"
  good = json.loads(index.read_text())
  key = "model.norm.weight"

  def with_place(place):
    changed = good | {"weight_map": good["weight_map"] | {key: place}}
    index.write_text(json.dumps(changed))
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
      AutoModel.from_pretrained(llama)
    return str(caught.value)

  assert "names model-9.safetensors, which does not exist" in with_place(
    "model-9.safetensors"
  )
  outside = pathlib.Path("..") / llama.name / good["weight_map"][key]
  assert "leaves the folder" in with_place(str(outside))
  assert "leaves the folder" in with_place(str((llama / "x.safetensors").resolve()))
  other = next(f for f in good["weight_map"].values() if f != good["weight_map"][key])
  assert f"lists '{key}' in {other}, which does not have it" in with_place(other)
  index.write_text("{}")
  with pytest.raises(ValueError, match="weight_map"):
    AutoModel.from_pretrained(llama)
