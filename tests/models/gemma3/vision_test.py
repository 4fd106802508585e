"""The tower against what transformers computed (tests/golden/make_gemma3_vision.py)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tests.models.gemma3 import towers
from tunix.models.gemma3 import vision
from tunix.models.gemma3.vision import LayerNorm, VisionConfig
from tunix.models.transformer.shards import sharding
from tunix.utils import mesh as mesh_lib, tree

TOLERANCE = 1e-5  # 5e-7 was reached
TINY = {"num_layers": 1, "embed_dim": 8, "hidden_dim": 12, "num_heads": 2}


@pytest.fixture(scope="module")
def want():
  return checkpoints.expected("gemma3_vision")


def golden(**options):
  return towers.build(towers.golden_config(**options), 64, towers.golden_tensors())


@pytest.mark.parametrize("scan", [True, False])
def test_patches_and_features(want, scan):
  model = golden(scan_layers=scan)
  patches = model.vision_tower(towers.golden_pixels(want))
  assert checkpoints.relative(patches, want["patches"]) < TOLERANCE
  features = model.multi_modal_projector(patches)
  assert features.shape == (4, 4, 64)
  assert checkpoints.relative(features, want["features"]) < TOLERANCE


@pytest.mark.parametrize(
  "options",
  [{"scan_layers": False}, {"scan_layers": True, "remat": "dots"}, {"remat": "block"}],
  ids=str,
)
def test_gradients(want, options):
  model = golden(**options)
  got = towers.gradients(model, towers.golden_pixels(want), want["cotangent"])
  prefix = "tower_grad/"
  grads = {k.removeprefix(prefix): v for k, v in want.items() if k.startswith(prefix)}
  towers.assert_equal_gradients(got, grads)


def test_images_do_not_see_each_other(want):
  model, pixels = golden(), towers.golden_pixels(want)
  assert checkpoints.relative(model(pixels[2:3]), want["features"][2:3]) < TOLERANCE


def test_blocks_of_queries_change_nothing():
  draw = lambda seed: jax.random.normal(jax.random.key(seed), (2, 12, 3, 4))
  q, k, v = draw(0), draw(1), draw(2)
  loss = lambda block: lambda *qkv: jnp.sum(vision.attend_all(*qkv, block=block) ** 2)
  both = lambda block: jax.jit(jax.value_and_grad(loss(block), argnums=(0, 1, 2)))
  whole, grads = both(12)(q, k, v)
  for block in (1, 5, 6):  # 5: blocks of 4
    value, got = both(block)(q, k, v)
    np.testing.assert_allclose(value, whole, rtol=1e-5)
    for a, b in zip(got, grads):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_no_array_of_patches_squared_is_held():
  shape = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
  step = jax.grad(lambda q, k, v: jnp.sum(vision.attend_all(q, k, v)))
  text = jax.jit(step).lower(shape, shape, shape).as_text()
  assert "1024x4096" in text
  assert "4096x4096" not in text and "4x1x1x1024x4096" not in text


def test_layer_norm_by_hand():
  norm = LayerNorm(2, 0.25, spec=(None,))
  norm.scale.set_value(jnp.array([2.0, 3.0]))
  norm.bias.set_value(jnp.array([0.5, 0.0]))
  # mean 2, deviations -1 and 1, variance 1
  want = np.array([-2.0, 3.0]) / np.sqrt(1.25) + np.array([0.5, 0.0])
  np.testing.assert_allclose(norm(jnp.array([1.0, 3.0])), want, rtol=1e-6)


def test_squares_of_patches_are_averaged():
  config = VisionConfig(**TINY, image_size=56, tokens_per_image=4, norm_eps=1e-12)
  projector = vision.Projector(config, 8, rngs=nnx.Rngs(0))
  projector.mm_input_projection.kernel.set_value(jnp.eye(8))
  rows, columns = np.divmod(np.arange(16), 4)
  patches = np.zeros((1, 16, 8), np.float32)
  # Marks which quarter a patch lies in; the norm makes a one-hot row sqrt(8).
  patches[0, np.arange(16), rows // 2 * 2 + columns // 2] = 1 + rows % 2
  want = np.eye(4, 8)[None] * np.sqrt(8)
  np.testing.assert_allclose(projector(jnp.asarray(patches)), want, rtol=1e-5)


def test_bfloat16_stays_close(want):
  model = golden(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  features = model(towers.golden_pixels(want))
  assert features.dtype == jnp.bfloat16
  assert checkpoints.relative(features.astype(np.float32), want["features"]) < 0.03


def test_published_sizes_and_their_shardings():
  config = VisionConfig()
  _, state = sharding.abstract(lambda: towers.Sight(config, 2560, rngs=nnx.Rngs(0)))
  shapes = {path: leaf.shape for path, leaf in tree.flatten(state).items()}
  assert shapes["vision_tower.layers.mlp.fc1.kernel"] == (27, 1152, 4304)
  assert shapes["vision_tower.position_embedding.embedding"] == (4096, 1152)
  # 416.9 million, as published (the projector counts apart)
  tower = sum(np.prod(s) for p, s in shapes.items() if p.startswith("vision_tower"))
  assert tower == 416_866_032
  mesh = mesh_lib.create_mesh({"fsdp": 4, "tp": 2})
  specs = {
    path: tuple(where.spec)
    for path, where in tree.flatten(sharding.named_shardings(state, mesh)).items()
  }
  layer = "vision_tower.layers."
  assert specs[layer + "attn.q_proj.kernel"] == (None, "fsdp", "tp")
  assert specs[layer + "attn.q_proj.bias"] == (None, "tp")
  assert specs[layer + "mlp.fc2.kernel"] == (None, "tp", "fsdp")
  assert specs["vision_tower.patch_embedding.kernel"] == (None, None, None, "fsdp")


def test_sharded_equals_single(want, mesh_fsdp4_tp2):
  model = golden(scan_layers=True)
  pixels = towers.golden_pixels(want)
  graph, state = nnx.split(model)
  where = sharding.named_shardings(state, mesh_fsdp4_tp2)
  state = jax.device_put(state, where)
  with mesh_lib.use_mesh(mesh_fsdp4_tp2):
    got = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, pixels)
  assert checkpoints.relative(got, want["features"]) < TOLERANCE


def test_other_image_sizes_are_refused():
  model = golden()
  with pytest.raises(ValueError, match=r"\(1, 28, 56, 3\), expected .*56, 56, 3"):
    model.vision_tower(jnp.zeros((1, 28, 56, 3)))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"num_layers": 0}, "num_layers is 0"),
    ({"num_heads": 7}, "num_heads 7 must divide embed_dim 1152"),
    ({"patch_size": 15}, "patch_size 15 must divide image_size 896"),
    ({"tokens_per_image": 255}, "tokens_per_image is 255"),
    ({"tokens_per_image": 9}, "divisor of 64"),
    ({"remat": "all"}, "remat 'all'"),
  ],
)
def test_config_refuses(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(VisionConfig(), **changes)
