import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models import lora
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel
from tunix.utils import tree

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


def state(model, kind=nnx.Param):
  return tree.flatten(nnx.state(model, kind))


def widen(model):
  """Adds noise to the adapters, so that they do something."""
  key = jax.random.key(7)
  for _, node in nnx.iter_graph(model):
    if isinstance(node, nnx.LoRAParam):
      key, use = jax.random.split(key)
      noise = 0.3 * jax.random.normal(use, node.shape)
      node.set_value((node.get_value() + noise).astype(node.dtype))
  return model


def test_fresh_adapter_changes_nothing_and_shares_the_base():
  model = toys.model()
  adapted = lora.apply(model, lora.LoraConfig(rank=4))
  np.testing.assert_array_equal(
    toys.logits(adapted, TOKENS), toys.logits(model, TOKENS)
  )
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
    ({"rank": 2, "targets": ()}, "targets is empty: name modules"),
    ({"rank": 2, "targets": "q_proj"}, "targets is 'q_proj': it must be a list"),
    ({"rank": 2, "targets": ("(",)}, r"'\(' is no regular expression"),
    ({"rank": 2, "dropout": 1.0}, r"dropout is 1.0: it must be"),
    ({"rank": 2, "rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj is 0"),
    ({"rank": 2, "alpha_pattern": {"q_proj": 0.0}}, "alpha_pattern.q_proj is 0.0"),
    ({"rank": 2, "alpha_pattern": {"(": 1.0}}, r"'\(' is no regular expression"),
  ],
)
def test_config_refuses_nonsense(fields, message):
  with pytest.raises((TypeError, ValueError), match=message):
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
  assert (
    checkpoints.relative(toys.logits(merged, TOKENS), toys.logits(adapted, TOKENS))
    < 1e-5
  )
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
  assert toys.logits(half, TOKENS, return_hidden=True).dtype == jnp.bfloat16
  dora = lora.LoraConfig(rank=2, dtype=jnp.bfloat16, use_dora=True)
  magnitude = state(lora.apply(model, dora), nnx.LoRAParam)
  assert magnitude["layers.mlp.up_proj.lora_magnitude"].dtype == jnp.float32


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


def test_gradients_reach_the_adapters_only():
  adapted = toys.model(lora_rank=2)
  graph, params, rest = nnx.split(adapted, nnx.LoRAParam, ...)

  def loss(params):
    return jnp.var(nnx.merge(graph, params, rest)(TOKENS)[0])

  gradients = tree.flatten(jax.jit(jax.grad(loss))(params))
  assert len(gradients) == 14
  assert all(float(jnp.abs(g).max()) > 0 for g in gradients.values())


def test_rank_stabilised_scale():
  config = lora.LoraConfig(rank=4, alpha=8.0, use_rslora=True)
  assert config.scale == 4.0  # 8 / sqrt(4), where 8 / 4 is the ordinary one
  adapted = lora.apply(toys.model(), config)
  assert {m.lora_scale for m in lora_modules.adapted(adapted).values()} == {4.0}


def test_ranks_and_alphas_by_pattern():
  config = lora.LoraConfig(
    rank=4,
    alpha=8.0,
    rank_pattern={"q_proj": 2, r".*_proj": 3},
    alpha_pattern={"attn.v_proj": 1.5},
  )
  adapted = lora_modules.adapted(lora.apply(toys.model(), config))
  ranks = {p.split(".")[-1]: m.lora_a.shape[-1] for p, m in adapted.items()}
  assert ranks == dict.fromkeys(lora.ALL_LINEAR, 3) | {"q_proj": 2}
  assert adapted["layers.attn.q_proj"].lora_scale == 4.0
  assert adapted["layers.attn.v_proj"].lora_scale == 0.5


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_no_adapted_module(name):
  config = lora.LoraConfig(rank=2, targets=("q_proj",), **{name: {"v_proj": 3}})
  with pytest.raises(ValueError, match=f"{name} 'v_proj' matches none of the adapted"):
    lora.apply(toys.model(), config)


def test_fresh_dora_changes_nothing():
  model = toys.model()
  adapted = lora.apply(model, lora.LoraConfig(rank=4, use_dora=True))
  assert (
    checkpoints.relative(toys.logits(adapted, TOKENS), toys.logits(model, TOKENS))
    < 1e-6
  )
  assert len(state(adapted, nnx.LoRAParam)) == 3 * 7


def test_dora_by_hand():
  # m * (W + s A B) / ||W + s A B||, column by column.
  adapted = lora.apply(
    toys.model().unstack(), lora.LoraConfig(rank=3, alpha=6.0, use_dora=True)
  )
  linear = lora_modules.adapted(widen(adapted))["layers.1.mlp.down_proj"]
  x = jax.random.normal(jax.random.key(0), (2, 5, 64))
  a, b = (np.asarray(v, np.float64) for v in lora_modules.pair_of(linear))
  direction = np.asarray(linear.kernel[...], np.float64) + 2.0 * a @ b
  weight = direction / np.linalg.norm(direction, axis=0)
  weight = weight * np.asarray(linear.lora_magnitude[...])
  assert checkpoints.relative(linear(x), np.asarray(x) @ weight) < 1e-5
  merged = lora_modules.linears(lora.merge(adapted))["layers.1.mlp.down_proj"]
  assert checkpoints.relative(merged.kernel[...], weight) < 1e-5


def test_dora_holds_the_norm_constant_in_the_gradient():
  # d(sum y)/dB with a constant norm: s A^T x^T 1 m / ||V||.
  adapted = lora.apply(
    toys.model().unstack(), lora.LoraConfig(rank=3, targets=("up_proj",), use_dora=True)
  )
  linear = lora_modules.adapted(widen(adapted))["layers.0.mlp.up_proj"]
  graph, params, rest = nnx.split(linear, nnx.LoRAParam, ...)
  x = jax.random.normal(jax.random.key(0), (4, 32))

  def total(params):
    return nnx.merge(graph, params, rest)(x).sum()

  gradient = tree.flatten(jax.jit(jax.grad(total))(params))
  a, b = (np.asarray(v, np.float64) for v in lora_modules.pair_of(linear))
  norm = np.linalg.norm(np.asarray(linear.kernel[...]) + a @ b, axis=0)
  ratio = np.asarray(linear.lora_magnitude[...]) / norm
  want = (np.asarray(x) @ a).sum(0)[:, None] * ratio
  assert checkpoints.relative(gradient["lora_b"], want) < 1e-5
  plain = np.asarray(x) @ (np.asarray(linear.kernel[...]) + a @ b)
  assert checkpoints.relative(gradient["lora_magnitude"], plain.sum(0) / norm) < 1e-4


@pytest.mark.shipped
@pytest.mark.parametrize("use_dora", [False, True])
def test_scan_and_remat_compute_the_same(use_dora):
  config = lora.LoraConfig(rank=3, use_dora=use_dora, dropout=0.2)
  outs = []
  for changes in ({}, {"scan_layers": True}, {"scan_layers": True, "remat": "block"}):
    model = toys.model(**({"scan_layers": False} | changes))
    model = widen(lora.apply(model, config))
    model.train()
    graph, params, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(p, graph=graph, rest=rest):
      return jnp.var(nnx.merge(graph, p, rest, copy=True)(TOKENS)[0])

    outs.append(tree.flatten(jax.jit(jax.grad(loss))(params)))
  for other in outs[1:]:
    for path, want in outs[0].items():
      assert checkpoints.relative(other[path], want) < 1e-5, path


def test_merging_reports_what_rounding_cost(caplog):
  adapted = widen(
    lora.apply(
      toys.model(param_dtype=jnp.bfloat16),
      lora.LoraConfig(rank=2, targets=("q_proj", "v_proj")),
    )
  )
  errors = []
  lora.merge(adapted, report=errors.append)
  assert [e.module for e in errors] == ["layers.attn.q_proj", "layers.attn.v_proj"]
  # bfloat16 keeps 8 bits: half a unit is 2^-9, uniform errors have 1/sqrt(3) of it.
  assert all(0.0005 < e.of_kernel < 2**-9 for e in errors)
  exact = []
  lora.merge(
    widen(lora.apply(toys.model(), lora.LoraConfig(rank=2))), report=exact.append
  )
  assert all(e.of_kernel == 0 for e in exact)
  # An update below the resolution is lost whole.
  for linear in lora_modules.adapted(adapted).values():
    linear.lora_b.set_value(linear.lora_b[...] * 1e-5)
  tiny = []
  lora.merge(adapted, report=tiny.append)
  assert all(e.of_update > 0.9 for e in tiny)
  with caplog.at_level("INFO", logger="tunix"):
    lora.merge(adapted)
  assert "merged 2 adapters; rounding lost at most" in caplog.text
