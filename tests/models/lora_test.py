import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models import lora, lora_modules
from tunix.models.automodel import AutoModel
from tunix.utils import tree

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
GOLDEN = checkpoints.GOLDEN / "llama3p1"


def state(model, kind=nnx.Param):
  return tree.flatten(nnx.state(model, kind))


def test_fresh_adapter_changes_nothing_and_shares_the_base():
  model = toys.model()
  adapted = lora.apply(model, lora.LoraConfig(rank=4))
  np.testing.assert_array_equal(adapted(TOKENS)[0], model(TOKENS)[0])
  assert not lora_modules.adapted(model)
  base = {k: v for k, v in state(adapted).items() if "lora" not in k}
  for path, value in state(model).items():
    assert base[path] is value
  assert len(state(adapted, nnx.LoRAParam)) == 2 * 7


def test_initial_values():
  # rows of q_proj: 32, so A is uniform in +-1/sqrt(32) = +-0.1768.
  adapted = lora.apply(toys.model(), lora.LoraConfig(rank=64, targets=("q_proj",)))
  params = state(adapted, nnx.LoRAParam)
  a = np.asarray(params["layers.attn.q_proj.lora_a"])
  assert a.shape == (2, 32, 64) and not np.any(params["layers.attn.q_proj.lora_b"])
  assert 0.17 < np.abs(a).max() <= 32**-0.5
  # Variance of a uniform on +-l is l^2 / 3.
  assert abs(a.std() - 32**-0.5 / 3**0.5) < 0.004


def test_seed_decides_and_a_module_s_draw_does_not_depend_on_the_others():
  model, name = toys.model(), "layers.attn.v_proj.lora_a"
  one = state(lora.apply(model, lora.LoraConfig(rank=2), seed=1), nnx.LoRAParam)
  only = lora.LoraConfig(rank=2, targets=("v_proj",))
  np.testing.assert_array_equal(
    one[name], state(lora.apply(model, only, seed=1), nnx.LoRAParam)[name]
  )
  for other in ({"seed": 2}, {"rngs": nnx.Rngs(params=3)}):
    two = state(lora.apply(model, only, **other), nnx.LoRAParam)
    assert np.abs(one[name] - two[name]).max() > 0.01


@pytest.mark.parametrize(
  "targets, modules",
  [
    (("q_proj",), ["layers.attn.q_proj"]),
    (("attn.q_proj", "mlp.up_proj"), ["layers.attn.q_proj", "layers.mlp.up_proj"]),
    ((r".*\.(k|v)_proj",), ["layers.attn.k_proj", "layers.attn.v_proj"]),
  ],
)
def test_targets(targets, modules):
  assert lora.match(toys.model(), targets) == modules


@pytest.mark.parametrize(
  "targets, message",
  [
    (("w1",), r"target 'w1': it matches no module; modules are layers.attn.k_proj, "),
    (("q_proj", "proj"), r"target 'proj': it matches no module"),
    (("lm_head",), r"target 'lm_head': lm_head cannot be adapted"),
    ((".*embed.*",), r"embed_tokens cannot be adapted"),
    (("input_layernorm",), r"it matches no module"),
  ],
)
def test_targets_that_match_nothing(targets, message):
  with pytest.raises(ValueError, match=message):
    lora.apply(toys.model(), lora.LoraConfig(rank=2, targets=targets))


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"rank": 0}, "rank is 0"),
    ({"rank": 2, "alpha": -1.0}, "alpha is -1.0"),
    ({"rank": 2, "targets": ()}, r"targets \(\) must be a tuple"),
    ({"rank": 2, "targets": "q_proj"}, "targets 'q_proj' must be a tuple"),
    ({"rank": 2, "targets": ("(",)}, r"'\(' is no regular expression"),
  ],
)
def test_config_refuses_nonsense(fields, message):
  with pytest.raises(ValueError, match=message):
    lora.LoraConfig(**fields)


def test_scale_and_output_by_hand():
  # y = x W + alpha / r * (x A) B on one module.
  adapted = toys.model(lora_rank=4)  # alpha is 2 * rank
  linear = lora_modules.adapted(adapted.unstack())["layers.1.mlp.down_proj"]
  x = jax.random.normal(jax.random.key(0), (3, 64))
  a, b = lora_modules.pair_of(linear)
  want = np.asarray(x) @ np.asarray(linear.kernel[...])
  want = want + 2.0 * (np.asarray(x) @ np.asarray(a)) @ np.asarray(b)
  np.testing.assert_allclose(linear(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stacked", [True, False])
def test_merged_model_computes_the_same(stacked):
  adapted = toys.model(lora_rank=4)
  adapted = adapted if stacked else adapted.unstack()
  merged = lora.merge(adapted)
  assert not state(merged, nnx.LoRAParam)
  assert checkpoints.relative(merged(TOKENS)[0], adapted(TOKENS)[0]) < 1e-5
  assert state(merged)["norm.scale"] is state(adapted)["norm.scale"]
  assert lora_modules.adapted(adapted), "the adapted model stays adapted"


def test_merging_is_done_in_float32():
  # 1 + 2^-9 needs 9 bits of mantissa: bfloat16 sums would lose half an update that
  # float32 rounds once, at the end.
  adapted = toys.model(lora_rank=2, param_dtype=jnp.bfloat16)
  linear = lora_modules.adapted(adapted)["layers.attn.q_proj"]
  a, b = (np.asarray(x, np.float32) for x in lora_modules.pair_of(linear))
  exact = np.asarray(linear.kernel[...], np.float32) + linear.lora_scale * (a @ b)
  merged = lora_modules.linears(lora.merge(adapted))["layers.attn.q_proj"].kernel[...]
  assert merged.dtype == jnp.bfloat16
  np.testing.assert_array_equal(merged, exact.astype(jnp.bfloat16))


def test_dtype_of_the_adapters():
  model = toys.model(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
  default = lora.apply(model, lora.LoraConfig(rank=2))
  assert {x.dtype for x in state(default, nnx.LoRAParam).values()} == {
    np.dtype(np.float32)
  }
  half = lora.apply(model, lora.LoraConfig(rank=2, dtype=jnp.bfloat16))
  assert {x.dtype for x in state(half, nnx.LoRAParam).values()} == {
    np.dtype(jnp.bfloat16)
  }
  assert half(TOKENS, return_hidden=True)[0].dtype == jnp.bfloat16


def test_adapters_lie_on_the_base_s_mesh(mesh_fsdp4_tp2):
  model = AutoModel.from_config(toys.config(), mesh_fsdp4_tp2)
  params = state(lora.apply(model, lora.LoraConfig(rank=4)), nnx.LoRAParam)
  # q_proj [L, D, NH] is split (fsdp, tp): A [L, D, r] along D, B [L, r, NH] along NH.
  shard = {k: v.addressable_shards[0].data.shape for k, v in params.items()}
  assert shard["layers.attn.q_proj.lora_a"] == (2, 32 // 4, 4)
  assert shard["layers.attn.q_proj.lora_b"] == (2, 4, 32 // 2)
  # o_proj [L, NH, D] is split (tp, fsdp).
  assert shard["layers.attn.o_proj.lora_a"] == (2, 32 // 2, 4)
  assert shard["layers.attn.o_proj.lora_b"] == (2, 4, 32 // 4)
  plain = lora.apply(AutoModel.from_config(toys.config()), lora.LoraConfig(rank=4))
  for path, value in state(plain, nnx.LoRAParam).items():
    np.testing.assert_array_equal(params[path], value)


def test_describe():
  text = lora.describe(
    lora.apply(toys.model(), lora.LoraConfig(rank=2, targets=("q_proj",)))
  )
  first, total = text.splitlines()
  # A: 2 * 32 * 2, B: 2 * 2 * 32.
  assert first.split() == [
    "layers.attn.q_proj",
    *["2", "x", "32", "x", "32", "rank", "2", "256"],
  ]
  assert total.startswith("trainable 256 of ")


def test_adapting_twice_and_not_at_all(tmp_path):
  model = toys.model()
  adapted = lora.apply(model, lora.LoraConfig(rank=2))
  lora.save_adapter(adapted, saved := tmp_path / "adapter")
  for again in (
    lambda: lora.apply(adapted, lora.LoraConfig(rank=2)),
    lambda: lora.load_adapter(adapted, saved),
  ):
    with pytest.raises(ValueError, match="has adapters already: merge them first"):
      again()
  for without in (
    lambda: lora.merge(model),
    lambda: lora.describe(model),
    lambda: lora.save_adapter(model, "nowhere"),
  ):
    with pytest.raises(ValueError, match=r"has no adapters: call lora.apply"):
      without()


@pytest.mark.parametrize("stacked", [True, False])
def test_adapter_survives_the_way_there_and_back(stacked, tmp_path):
  model = toys.model()
  model = model if stacked else model.unstack()
  adapted = toys.model(lora_rank=4)
  adapted = adapted if stacked else adapted.unstack()
  lora.save_adapter(adapted, tmp_path / "adapter", base="somewhere")
  back = lora.load_adapter(model, tmp_path / "adapter")
  np.testing.assert_array_equal(back(TOKENS)[0], adapted(TOKENS)[0])
  config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  assert (config["r"], config["lora_alpha"]) == (4, 8.0)
  assert config["base_model_name_or_path"] == "somewhere"
  assert config["target_modules"] == sorted(lora.ALL_LINEAR)


def test_loaded_adapter_is_sharded(mesh_fsdp8):
  model = AutoModel.from_pretrained(GOLDEN, mesh_fsdp8)
  adapted = lora.load_adapter(model, GOLDEN / "adapter")
  a = state(adapted, nnx.LoRAParam)["layers.attn.q_proj.lora_a"]
  assert a.addressable_shards[0].data.shape == (2, 16 // 8, 4)


@pytest.fixture
def adapter(tmp_path):
  return checkpoints.copy("llama3p1/adapter", tmp_path / "adapter")


def set_field(adapter, **fields):
  path = adapter / "adapter_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_rank_stabilised_scale(adapter):
  set_field(adapter, use_rslora=True)
  model = lora.load_adapter(AutoModel.from_pretrained(GOLDEN), adapter)
  # alpha 8, rank 4: 8 / sqrt(4) instead of 8 / 4.
  assert {m.lora_scale for m in lora_modules.adapted(model).values()} == {4.0}


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"use_dora": True}, "use_dora is True, supported is only False"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    ({"r": None}, "r is missing"),
    ({"r": 5}, r"lora_A.weight' is of shape \(4, 16\), expected shape \(5, 16\)"),
  ],
)
def test_adapters_that_cannot_be_loaded(adapter, fields, message):
  set_field(adapter, **fields)
  with pytest.raises(ValueError, match=message):
    lora.load_adapter(AutoModel.from_pretrained(GOLDEN), adapter)


def test_adapter_tensors_that_do_not_fit(adapter):
  from safetensors import numpy as st

  model = AutoModel.from_pretrained(GOLDEN)
  file = adapter / "adapter_model.safetensors"
  good = st.load_file(file)
  key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
  st.save_file({k: v for k, v in good.items() if k != key}, file)
  with pytest.raises(ValueError, match=f"'{key}' is missing.*leaves out layers"):
    lora.load_adapter(model, adapter)
  extra = {"base_model.model.lm_head.lora_A.weight": np.ones((4, 16), np.float32)}
  st.save_file(good | extra, file)
  with pytest.raises(ValueError, match=r"lm_head.lora_A.weight'\] name no module"):
    lora.load_adapter(model, adapter)
  file.unlink()
  with pytest.raises(FileNotFoundError, match=r"lacks adapter_config\.json or"):
    lora.load_adapter(model, adapter)


def test_adapters_of_different_scale_cannot_share_a_folder(tmp_path):
  adapted = toys.model(lora_rank=2)
  lora_modules.adapted(adapted)["layers.attn.q_proj"].lora_scale = 7.0
  with pytest.raises(ValueError, match="cannot be saved in one folder"):
    lora.save_adapter(adapted, tmp_path / "adapter")
  assert not (tmp_path / "adapter").exists()


def test_gradients_reach_the_adapters_only():
  adapted = toys.model(lora_rank=2)
  graph, params, rest = nnx.split(adapted, nnx.LoRAParam, ...)

  def loss(params):
    return jnp.var(nnx.merge(graph, params, rest)(TOKENS)[0])

  gradients = tree.flatten(jax.grad(loss)(params))
  assert len(gradients) == 14
  assert all(float(jnp.abs(g).max()) > 0 for g in gradients.values())


@pytest.mark.filterwarnings("ignore")  # qwix uses names that flax deprecates
def test_qwix_adapts_an_unstacked_model():
  qwix = pytest.importorskip("qwix")
  model = toys.model().unstack()
  provider = qwix.LoraProvider(module_path=".*q_proj|.*up_proj", rank=2, alpha=4.0)
  adapted = qwix.apply_lora_to_model(
    model, provider, rngs=nnx.Rngs(0), **model.get_model_input()
  )
  assert len(state(adapted, nnx.LoRAParam)) == 2 * 2 * 2
  np.testing.assert_array_equal(adapted(TOKENS)[0], model(TOKENS)[0])
