import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models.automodel import AutoModel
from tunix.models.transformer.attention import rope
from tunix.models.transformer.attention.layer import attend
from tunix.models.transformer.config import RopeConfig, ShardingRules
from tunix.models.transformer.dense.layers import RMSNorm
from tunix.models.transformer.hf import rope as hf_rope
from tunix.models.transformer.shards import sharding
from tunix.utils import mesh as mesh_lib, tree

TOKENS = np.random.default_rng(0).integers(0, toys.VOCAB, (2, 10)).astype(np.int32)


def with_config(model, **changes):
  graph, state = nnx.split(model)
  model = nnx.merge(graph, state, copy=True)
  model.config = dataclasses.replace(model.config, **changes)
  return model


def value_and_grad(model):
  graph, state = nnx.split(model)

  def loss(state):
    logits, _ = nnx.merge(graph, state)(TOKENS)
    return jnp.mean(jax.nn.logsumexp(logits, -1) * logits[..., 3])

  return jax.jit(jax.value_and_grad(loss))(state)


@pytest.fixture(scope="module")
def model():
  return toys.model(scan_layers=False)


@pytest.fixture(scope="module")
def reference(model):
  return value_and_grad(model)


@pytest.mark.parametrize(
  "changes",
  [
    {"scan_layers": True},
    {"remat": "block"},
    {"scan_layers": True, "remat": "dots"},
    {"scan_layers": True, "remat": "offload"},
  ],
  ids=str,
)
def test_scan_and_remat_change_no_value_and_no_gradient(model, reference, changes):
  value, grads = value_and_grad(with_config(model, **changes))
  assert abs(float(value - reference[0])) < 1e-5 * abs(float(reference[0]))
  want = tree.flatten(reference[1])
  for path, got in tree.flatten(grads).items():
    assert checkpoints.relative(got, want[path]) < 1e-5, path


def test_offloading_needs_memory_on_the_host(model, monkeypatch):
  device = types.SimpleNamespace(
    addressable_memories=lambda: [types.SimpleNamespace(kind="device")]
  )
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  with pytest.raises(
    ValueError, match="pinned host memory, and the cpu devices have only device"
  ):
    with_config(model, remat="offload")(TOKENS)


def lowered(model, tokens=TOKENS):
  graph, state = nnx.split(model)

  def loss(state):
    return jnp.sum(nnx.merge(graph, state)(tokens)[0])

  return jax.jit(jax.grad(loss)).lower(state)


def test_remat_policies_keep_different_amounts(model):
  # Residuals kept for the backward pass, as XLA would hold them without remat.
  def matmuls(**changes):
    text = lowered(with_config(model, **changes)).as_text()
    return text.count("stablehlo.dot_general")

  names = ("none", "dots", "block", "offload")
  none, dots, block, offload = (matmuls(remat=name) for name in names)
  # "dots" recomputes only the batched products of attention, "block" all of them.
  assert none < dots < block == offload


def test_scanned_program_does_not_grow_with_depth():
  def size(layers):
    model = toys.model(num_layers=layers, scan_layers=True)
    return len(lowered(model).as_text().splitlines())

  assert size(6) == size(2)


def test_depth_decides_when_nobody_says(monkeypatch):
  config = toys.config()
  assert not config.scanned
  assert dataclasses.replace(config, num_layers=40).scanned
  assert dataclasses.replace(config, scan_layers=True).scanned
  assert not dataclasses.replace(config, num_layers=40, scan_layers=False).scanned
  # What counts is the platform traced for: a plan's, which this machine need not have.
  monkeypatch.setattr(mesh_lib, "context_platform", lambda: "tpu")
  assert config.scanned


def test_named_scopes_reach_the_program(model):
  text = lowered(model).as_text(debug_info=True)
  for scope in ("embed", "layer_1", "attn", "qkv_matmul", "rope", "scores", "mlp"):
    assert f"/{scope}/" in text or f"({scope})/" in text, scope
  for scope in ("values", "out_proj", "final_norm", "unembed"):
    assert f"{scope}" in text, scope


def test_unstacked_model_is_the_same(model):
  loose = model.unstack()
  assert len(loose.layers) == 2 and loose.unstack() is loose
  np.testing.assert_allclose(
    toys.logits(loose, TOKENS), toys.logits(model, TOKENS), rtol=1e-6, atol=1e-6
  )
  kernel = loose.layers[1].mlp.up_proj.kernel
  assert kernel.shape == (32, 64)
  assert kernel.get_metadata("out_sharding") == (("fsdp", "ep", "cp"), "tp")
  np.testing.assert_array_equal(kernel[...], model.layers.mlp.up_proj.kernel[...][1])
  loose.norm.scale.set_value(jnp.zeros(32))
  assert float(model.norm.scale[...].min()) == 1.0, "the original is untouched"


@pytest.mark.parametrize("stacked", [True, False])
def test_cache_equals_full_forward(model, stacked):
  cached = model if stacked else model.unstack()
  cache = cached.init_cache(2, 12)
  assert cache.size == 12
  call = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache))
  first, cache = call(cached, TOKENS[:, :7], cache)
  rest, cache = call(cached, TOKENS[:, 7:], cache)
  assert int(cache.index) == 10
  got = jnp.concatenate([first, rest], axis=1)
  np.testing.assert_allclose(got, toys.logits(model, TOKENS), rtol=1e-5, atol=1e-6)


def test_cache_with_left_padding(model):
  # Row 1 has three tokens of padding: its logits must be those of the bare row.
  padded = np.array(TOKENS)
  padded[1, 3:] = TOKENS[1, :7]
  mask = np.ones((2, 12), bool)
  mask[1, :3] = False
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  visible = np.tril(np.ones((12, 12), bool))[None] & mask[:, None]
  call = nnx.jit(lambda model, *given: model(*given))
  cache = model.init_cache(2, 12)
  parts = []
  for piece in (slice(0, 6), slice(6, 10)):
    logits, cache = call(
      model, padded[:, piece], positions[:, piece], cache, visible[:, piece]
    )
    parts.append(logits)
  got = jnp.concatenate(parts, axis=1)
  bare = toys.logits(model, TOKENS[1:, :7])
  np.testing.assert_allclose(got[1, 3:], bare[0], rtol=1e-5, atol=1e-6)


def test_packed_rows(model):
  segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]] * 2, np.int32)
  logits = toys.logits(model, TOKENS, segment_ids=segments)
  np.testing.assert_allclose(
    logits[:, 4:9], toys.logits(model, TOKENS[:, 4:9]), rtol=1e-5, atol=1e-6
  )
  with pytest.raises(ValueError, match="segment_ids cannot be combined"):
    model(TOKENS, attention_mask=np.ones((2, 10, 10), bool), segment_ids=segments)


def test_a_row_that_sees_nothing_gives_numbers(model):
  mask = np.tril(np.ones((2, 10, 10), bool))
  mask[0, :4] = False

  def loss(x):
    return jnp.sum(model(TOKENS, attention_mask=mask)[0] * x)

  value, gradient = jax.jit(jax.value_and_grad(loss))(1.0)
  assert np.isfinite(value) and np.isfinite(gradient)


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_states_and_unembedding_make_the_logits(tied):
  model = toys.model(tie_embeddings=tied)
  hidden = toys.logits(model, TOKENS, return_hidden=True)
  table, layout = model.unembedding()
  assert layout.transposed == tied and layout.mesh is None
  logits = hidden @ (table.T if tied else table)
  np.testing.assert_allclose(logits, toys.logits(model, TOKENS), rtol=1e-5, atol=1e-6)


def test_bfloat16_computes_in_bfloat16_and_gives_float32_logits():
  model = toys.model(dtype=jnp.bfloat16)
  assert toys.logits(model, TOKENS, return_hidden=True).dtype == jnp.bfloat16
  assert toys.logits(model, TOKENS).dtype == jnp.float32
  assert model.init_cache(1, 4).k[0].dtype == jnp.bfloat16
  assert (
    checkpoints.relative(toys.logits(model, TOKENS), toys.logits(toys.model(), TOKENS))
    < 0.02
  )


def test_attention_by_hand():
  # One head of size 4, two tokens; query 1 scores 2/sqrt(4) and 0 on keys 0 and 1.
  query = jnp.array([[[[1.0, 0, 0, 0]], [[2.0, 0, 0, 0]]]])
  key = jnp.array([[[[1.0, 0, 0, 0]], [[0, 1.0, 0, 0]]]])
  value = jnp.array([[[[1.0, 0, 0, 0]], [[0, 0, 0, 1.0]]]])
  out = attend(query, key, value, jnp.tril(jnp.ones((1, 2, 2), bool)))
  share = math.e / (math.e + 1)
  np.testing.assert_allclose(out[0, 0, 0], [1, 0, 0, 0], atol=1e-6)
  np.testing.assert_allclose(out[0, 1, 0], [share, 0, 0, 1 - share], atol=1e-6)


def test_grouped_heads_share_keys_in_order():
  # 4 query heads on 2 kv heads: heads 0, 1 read kv head 0 and heads 2, 3 kv head 1.
  value = jnp.array([10.0, 20.0]).reshape(1, 1, 2, 1) * jnp.ones((1, 1, 2, 2))
  ones = jnp.ones((1, 1, 4, 2))
  out = attend(ones, jnp.ones((1, 1, 2, 2)), value, jnp.ones((1, 1, 1), bool))
  np.testing.assert_allclose(out[0, 0, :, 0], [10, 10, 20, 20])


def test_rms_norm_by_hand():
  # rms of (3, 4) is sqrt(12.5); scale 2 on the first, offset 1 adds to both.
  norm = RMSNorm(2, eps=0.0, offset=1.0, spec=(None,))
  norm.scale.set_value(jnp.array([2.0, 0.0]))
  want = [3 * 3 / math.sqrt(12.5), 4 / math.sqrt(12.5)]
  np.testing.assert_allclose(norm(jnp.array([3.0, 4.0])), want, rtol=1e-6)
  fresh = RMSNorm(2, eps=0.0, offset=1.0, spec=(None,))
  np.testing.assert_allclose(fresh(jnp.array([3.0, 4.0])), np.array(want) / [3, 1])


def test_rope_turns_pairs_half_a_head_apart():
  # theta 100, H 4: frequencies 1 and 100^(-1/2) = 0.1; position 2.
  sin_cos = rope.angles(jnp.array([[2]]), 4, RopeConfig(theta=100.0))
  out = rope.rotate(jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4), sin_cos)
  a, b = 2.0, 0.2
  want = [
    math.cos(a) - 3 * math.sin(a),
    2 * math.cos(b) - 4 * math.sin(b),
    3 * math.cos(a) + math.sin(a),
    4 * math.cos(b) + 2 * math.sin(b),
  ]
  np.testing.assert_allclose(out[0, 0, 0], want, rtol=1e-5)


# What transformers 5 computes in float32 (heads of 12), whose bits we want: a table of
# fields that round badly.
TRANSFORMERS_FREQUENCIES = {
  "linear": (
    {"rope_theta": 1e4, "rope_type": "linear", "factor": 3.7},
    [0.27027026, 0.058227956, 0.012544833, 0.0027027025, 0.0005822795, 0.00012544836],
  ),
  "llama3": (
    {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.3}
    | {"high_freq_factor": 3.9, "original_max_position_embeddings": 1000},
    [1.0, 0.11224619, 0.004565144, 0.00017677668, 1.9842508e-05, 2.2272475e-06],
  ),
  "yarn": (
    {"rope_theta": 1e4, "rope_type": "yarn", "factor": 5.3, "beta_fast": 17.0}
    | {"original_max_position_embeddings": 100, "beta_slow": 0.7},
    [1.0, 0.15717886, 0.021310436, 0.0018867925, 0.000406497, 8.7577166e-05],
  ),
  "yarn with a ramp between dimensions": (
    {"rope_theta": 1e6, "rope_type": "yarn", "factor": 8.0, "beta_fast": 5.5}
    | {"original_max_position_embeddings": 513, "beta_slow": 0.31, "truncate": False},
    [1.0, 0.099999994, 0.004196385, 0.000125, 1.2499996e-05, 1.2500004e-06],
  ),
  "yarn with a ramp of no width": (
    {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}
    | {"original_max_position_embeddings": 4},
    [1.0, 0.05386086, 0.011603971, 0.0025, 0.0005386086, 0.000116039737],
  ),
}


@pytest.mark.parametrize("name", TRANSFORMERS_FREQUENCIES)
def test_scaled_frequencies_have_the_bits_of_transformers(name):
  fields, want = TRANSFORMERS_FREQUENCIES[name]
  config = hf_rope.rope_of(fields, fields["rope_theta"])
  got = np.asarray(rope.frequencies(12, config))
  assert got.dtype == np.float32
  np.testing.assert_array_max_ulp(got, np.array(want, np.float32), 1)
  # One rounding of the angle itself is what remains at the far end of a long text.
  positions = np.arange(2048)
  sin, cos, _ = rope.angles(jnp.asarray(positions)[None], 12, config)
  exact = positions[:, None] * got.astype(np.float64)
  factor = rope.length_factor(config)
  far = 2048 * 2.0**-24 * factor
  np.testing.assert_allclose(sin[0, :, 0], factor * np.sin(exact), atol=far, rtol=0)
  np.testing.assert_allclose(cos[0, :, 0], factor * np.cos(exact), atol=far, rtol=0)


def test_scaled_rope_frequencies_by_hand():
  # theta 10^4, H 8: frequencies 1, 1/10, 1/100, 1/1000, wavelengths 2 pi times 1, 10,
  # 100, 1000 = 6.3, 62.8, 628, 6283 tokens.
  plain = [1.0, 0.1, 0.01, 0.001]
  np.testing.assert_allclose(rope.frequencies(8, RopeConfig()), plain, rtol=1e-6)
  linear = RopeConfig(scaling="linear", factor=4.0)
  np.testing.assert_allclose(
    rope.frequencies(8, linear), np.array(plain) / 4, rtol=1e-6
  )
  # Context 256, low 1, high 4: wavelengths below 256 / 4 = 64 are kept (6.3, 62.8),
  # above 256 / 1 divided by 8 (628, 6283).
  llama = RopeConfig(
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=256,
  )
  np.testing.assert_allclose(
    rope.frequencies(8, llama), [1.0, 0.1, 0.01 / 8, 0.001 / 8], rtol=1e-6
  )
  # Context 1256.637 = 2 * 628.3: 628 makes 2 turns, (2 - 1) / (4 - 1) = 1/3 of the way.
  ramp = dataclasses.replace(llama, original_max_position=1257)
  turns = 1257 * 0.01 / (2 * math.pi)
  keep = (turns - 1) / 3
  want = keep * 0.01 + (1 - keep) * 0.01 / 8
  assert 0.3 < keep < 0.35
  np.testing.assert_allclose(rope.frequencies(8, ramp)[2], want, rtol=1e-5)


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"num_layers": 0}, "num_layers is 0"),
    ({"num_kv_heads": 3}, "num_kv_heads 3 must divide num_heads 4"),
    ({"head_dim": 7}, "head_dim 7 must be even"),
    ({"remat": "some"}, "remat 'some' must be"),
  ],
)
def test_config_refuses_nonsense(fields, message):
  with pytest.raises(ValueError, match=message):
    toys.config(**fields)


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"scaling": "dynamic"}, "'dynamic' is not supported"),
    ({"theta": 0.0}, "theta is 0.0: it must be"),
    ({"factor": 0.5}, "factor is 0.5"),
    (
      {"scaling": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0},
      "high_freq_factor 4.0 must exceed",
    ),
  ],
)
def test_rope_config_refuses_nonsense(fields, message):
  with pytest.raises(ValueError, match=message):
    RopeConfig(**fields)


def test_sharded_model_computes_the_same(model, mesh_fsdp4_tp2):
  split = AutoModel.from_config(model.config, mesh_fsdp4_tp2)
  tokens = np.tile(TOKENS, (2, 1))
  graph, state = nnx.split(split)
  with jax.set_mesh(mesh_fsdp4_tp2):
    logits = jax.jit(lambda s: nnx.merge(graph, s)(tokens)[0])(state)
  assert checkpoints.relative(logits, toys.logits(model, tokens)) < 1e-5


def test_activations_are_pinned_to_the_batch(mesh_fsdp8):
  split = AutoModel.from_config(toys.config(scan_layers=False), mesh_fsdp8)
  graph, state = nnx.split(split)
  tokens = np.tile(TOKENS, (4, 1))
  with jax.set_mesh(mesh_fsdp8):
    hidden = jax.jit(
      lambda s: nnx.merge(graph, s)(tokens, return_hidden=True)[0]
    ).lower(state)
    text = hidden.as_text()
    out = hidden.compile()(state)
  # After the embedding, attention and MLP of each of two layers.
  assert text.count("sdy.sharding_constraint") >= 5
  assert '[{"fsdp"}, {}, {}]' in text
  assert out.addressable_shards[0].data.shape == (1, 10, 32)


def test_weight_specs_and_axes_that_do_not_fit(mesh_fsdp4_tp2):
  rules = ShardingRules()
  assert rules.batch_axes == ("dp", "fsdp", "ep")
  both = ShardingRules(fsdp=("fsdp", "sp"), ep=None)
  assert both.batch_axes == ("dp", "fsdp", "sp")
  assert ShardingRules(batch=("data",)).batch_axes == ("data",)
  dim = ("fsdp", "ep", "cp")
  assert sharding.weight_spec("in_out", rules, True) == (None, dim, "tp")
  assert sharding.weight_spec("out_in", rules, False) == ("tp", dim)
  experts = sharding.weight_spec("in_out", rules, True, experts=True)
  assert experts == (None, "ep", ("fsdp", "cp"), "tp")
  # 95 tokens are not divisible by tp = 2: that dimension stays whole.
  odd = AutoModel.from_config(toys.config(vocab_size=95), mesh_fsdp4_tp2)
  table = tree.flatten(nnx.state(odd))["embed_tokens.embedding"]
  assert table.addressable_shards[0].data.shape == (95, 8)


def test_model_input_is_accepted(model):
  logits, cache = model(**model.get_model_input())
  assert logits.shape[-1] == toys.VOCAB and cache is None


def test_partial_rope_turns_the_first_dimensions_and_keeps_the_rest():
  # R = 2 of H = 4 dimensions: one pair (1, 2), turned by 2 radians at position 2.
  config = RopeConfig(theta=100.0, partial=0.5)
  angles = rope.angles(jnp.array([[2]]), 4, config)
  x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
  sin, cos = np.sin(2.0), np.cos(2.0)
  want = [cos - 2 * sin, 2 * cos + sin, 3.0, 4.0]
  np.testing.assert_allclose(rope.rotate(x, angles)[0, 0, 0], want, rtol=1e-6)


def test_longrope_takes_the_length_of_each_sequence_of_a_packed_row():
  # Sequences of 3 and 2 tokens, padding; the original context has 2 tokens. One pair,
  # whose frequency 1 is divided by 4 in the longer sequence and by 2 in the other.
  config = RopeConfig(
    scaling="longrope",
    factor=8.0,
    original_max_position=2,
    short_factors=(2.0,),
    long_factors=(4.0,),
  )
  angles = rope.angles(jnp.array([[0, 1, 2, 0, 1, 0, 0]]), 2, config)
  # Queries and keys are multiplied by sqrt(1 + ln 8 / ln 2) = 2.
  want = 2 * np.sin([0, 0.25, 0.5, 0, 0.5, 0, 0])
  np.testing.assert_allclose(angles.sin[0, :, 0, 0], want, rtol=1e-6)
  with pytest.raises(ValueError, match="short_factors has 0 numbers"):
    dataclasses.replace(config, short_factors=())
  with pytest.raises(ValueError, match="rope has 1 short_factors and long_factors; "):
    rope.angles(jnp.array([[0]]), 4, config)


def test_kinds_without_rope_keep_queries_and_keys():
  config = RopeConfig(theta=100.0, original_max_position=4, query_beta=0.5)
  angles = rope.angles_by_kind(jnp.array([[5]]), [(4, config), (4, None)])
  still = jax.tree.map(lambda by_kind: by_kind[1], angles)
  x = jnp.arange(4.0).reshape(1, 1, 1, 4)
  np.testing.assert_array_equal(rope.rotate(x, still.for_queries()), x)
  # Position 5 lies in the second context of 4 tokens: 1 + 0.5 ln(1 + 1).
  np.testing.assert_allclose(angles.query[:, 0, 0, 0, 0], [1 + 0.5 * np.log(2), 1])
