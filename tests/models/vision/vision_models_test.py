"""Models of images and text against what transformers computed.

The expected values are committed (tests/golden/make_vision_models.py).
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import checkpoints
from tests.models.vision import seeing
from tunix.models import families
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.vision import layers, pixtral, qwen
from tunix.utils import mesh as mesh_lib

NAMES = ("smolvlm", "ministral3", "gemma4", "qwen3_5", "qwen3_vl")


def folder_of(name):
  return checkpoints.GOLDEN / f"{name}_vision"


@pytest.fixture(scope="module", params=NAMES)
def name(request):
  return request.param


@pytest.fixture(scope="module")
def want(name):
  return checkpoints.expected(f"{name}_vision")


def load(name, **options):
  return AutoModel.from_pretrained(
    folder_of(name), dtype=jnp.float32, images=True, **options
  )


def test_logits_loss_and_every_gradient(name, want):
  seeing.assert_equal(load(name), want)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_vl"])
def test_scanned_layers_with_features_and_positions(kind):
  model = load(kind, scan_layers=True, remat="block")
  seeing.assert_equal(model, checkpoints.expected(f"{kind}_vision"))


def test_features(name, want):
  model = load(name, scan_layers=True)
  images = seeing.images(want)
  features = np.asarray(jax.jit(model.image_features)(images))
  features = features.reshape(-1, features.shape[-1])
  assert checkpoints.relative(features, want["features"]) < seeing.TOLERANCE


def test_there_and_back(name, tmp_path):
  model = load(name)
  save_pretrained(model, tmp_path / "out", source=folder_of(name))
  back = AutoModel.from_pretrained(tmp_path / "out", images=True)
  assert back.config == model.config
  original = checkpoints.tensors(folder_of(name))
  canonical = families.of_config(model.config).canonical_key
  original = {canonical(key): value for key, value in original.items()}
  saved = checkpoints.tensors(tmp_path / "out")
  assert sorted(saved) == sorted(original)
  for key, value in original.items():
    np.testing.assert_array_equal(saved[key], value.astype(np.float32), err_msg=key)


@pytest.mark.parametrize("name", ("gemma3", *NAMES))
def test_text_alone(name, tmp_path):
  """images=False leaves the tower out, and computes the same logits for texts."""
  want = checkpoints.expected(f"{name}_vision")
  model = AutoModel.from_pretrained(folder_of(name), dtype=jnp.float32, images=False)
  assert not hasattr(model, "vision_tower")
  tokens, expected = want["tokens"][1:2, 5:], want["logits"][1:2, 5:]  # no images
  logits, _ = jax.jit(lambda tokens: model(tokens))(tokens)
  assert checkpoints.relative(logits, expected) < seeing.TOLERANCE
  save_pretrained(model, tmp_path / "out", source=folder_of(name))
  assert AutoModel.from_pretrained(tmp_path / "out").config == model.config


def test_which_folders_load_a_tower_unasked():
  kinds = ("gemma3", "smolvlm", "idefics3", "qwen3_vl")
  with_tower = ["gemma3_multimodal", "smolvlm", "smolvlm", "qwen3_vl"]
  assert [families.by_model_type(kind).name for kind in kinds] == with_tower
  texts = [families.by_model_type(kind, images=False).name for kind in kinds]
  assert texts == ["gemma3", "llama3", "llama3", "qwen3"]
  for kind in ("mistral3", "gemma4", "qwen3_5", "qwen3_5_moe"):
    text, same, asked = (families.by_model_type(kind, x) for x in (None, False, True))
    assert text is same and asked.name == f"{text.name}_multimodal"
  with pytest.raises(ValueError, match="model_type 'qwen2_5_vl' is unknown"):
    families.by_model_type("qwen2_5_vl", images=True)
  with pytest.raises(ValueError, match="images is True, and of model_type 'llama'"):
    families.by_model_type("llama", images=True)
  with pytest.raises(ValueError, match="model_type 'gemma4_unified' is unknown"):
    families.by_model_type("gemma4_unified", images=True)
  with pytest.raises(ValueError, match="images is False and family is 'smolvlm'"):
    AutoModel.from_pretrained(
      folder_of("smolvlm"), images=False, family=families.FAMILIES["smolvlm"]
    )


@pytest.mark.parametrize("kind", families.FAMILIES)
def test_subclasses_of_a_configuration_keep_its_family(kind):
  family = families.FAMILIES[kind]
  subclass = type("Mine", (family.config_class,), {})
  assert families.of_config(object.__new__(subclass)) is family


@pytest.mark.parametrize("name", ("ministral3", "gemma4", "qwen3_vl"))
def test_images_of_rows_with_padding(name):
  """Rows keep their images; missing images and padding change no logits."""
  want = checkpoints.expected(f"{name}_vision")
  model = load(name)
  given = seeing.arguments(want)
  values, grid = given["images"]
  counts = grid.prod(1)
  split = [values[: counts[:2].sum()], values[:0], values[counts[:2].sum() :]]
  longest = max(map(len, split)) + 4
  padded = [np.pad(x, ((0, longest - len(x)), (0, 0))) for x in split]
  none = np.zeros((2, grid.shape[1]), np.int32)
  grids = np.stack([grid[:2], none, np.stack([grid[2], none[0]])])
  run = jax.jit(lambda images: model(want["tokens"], **given | {"images": images})[0])
  logits = run((np.stack(padded), grids))
  assert checkpoints.relative(seeing.valid(logits, want), want["logits"]) < 1e-5
  # An image that the tokens have a place for is missing, or is not made of squares.
  odd = grids[2].copy()
  odd[0, -1] += 1
  for row, wrong in ((0, none), (2, odd)):
    changed = grids.copy()
    changed[row] = wrong
    logits = run((np.stack(padded), changed))
    finite = np.isfinite(seeing.valid(logits, want)).all(axis=(1, 2))
    np.testing.assert_array_equal(finite, np.arange(3) != row)


SLOW_MESHES = ({"fsdp": 8}, {"dp": 2, "fsdp": 4})


@pytest.mark.long
@pytest.mark.parametrize(
  "axes",
  [
    {"fsdp": 4, "tp": 2},
    *(pytest.param(axes, marks=pytest.mark.slow) for axes in SLOW_MESHES),
  ],
  ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_rows_over_devices(name, axes):
  """Gradients of four rows with images of their own, on eight devices and on one."""
  want = checkpoints.expected(f"{name}_vision")
  rows = {key: np.stack([want[key][0]] * 4) for key in ("tokens", "mask")}
  rows["tokens"][:, -4:] = np.arange(16).reshape(4, 4)
  if name == "smolvlm":
    rng = np.random.default_rng(0)
    rows["images"] = rng.uniform(-1, 1, (4, 2, 24, 24, 3)).astype(np.float32)
  else:
    rows |= {key: np.stack([want[key]] * 4) for key in ("values", "grid")}
  _, one, expected = seeing.loss_and_gradients(load(name), rows)
  mesh = mesh_lib.create_mesh(axes)
  with mesh_lib.use_mesh(mesh):
    _, many, got = seeing.loss_and_gradients(load(name, mesh=mesh), rows)
  np.testing.assert_allclose(many, one, rtol=1e-5)
  total = np.sqrt(sum(np.sum(np.square(x)) for x in expected.values()))
  for path, gradient in expected.items():
    size = max(np.linalg.norm(gradient), 1e-3 * total)
    error = np.linalg.norm(np.asarray(got[path]) - gradient) / size
    # The gradient of a limit is a sum over the few clipped values, whose signs differ.
    is_limit = path.endswith(("_min", "_max"))
    assert error < (10 if is_limit else 1) * seeing.TOLERANCE, (path, error)


def test_positions_of_qwen_by_hand():
  """Two images of 1 x 3 and 2 x 1 soft tokens; a packed row counts anew."""
  config = load("qwen3_vl").config  # the pairs turn with time, height, width, time
  soft = config.soft_token
  tokens = jnp.array([[5, soft, soft, soft, 6, 7, soft, soft, 8]])
  grid = jnp.array([[[1, 2, 6], [1, 4, 2], [0, 0, 0]]])
  found = jnp.arange(9)[:, None] + qwen.rope_offsets(tokens, grid, config)[0]
  assert found.T.tolist() == [
    [0, 1, 1, 1, 4, 5, 6, 6, 8],
    [0, 1, 1, 1, 4, 5, 6, 7, 8],
    [0, 1, 2, 3, 4, 5, 6, 6, 8],
    [0, 1, 1, 1, 4, 5, 6, 6, 8],
  ]
  shared = qwen.rope_offsets(jnp.repeat(tokens, 2, axis=0), grid, config)
  assert (jnp.arange(9)[:, None] + shared == found).all() and len(shared) == 2
  wide = jnp.array([[[1, 4, 4]]])
  tokens = jnp.array([[5, soft, soft, soft, soft, 6, 9, 9]])
  segments = jnp.array([[1] * 6 + [2] * 2])
  found = qwen.rope_offsets(tokens, wide, config, segments)[0, :, 0]
  assert found.tolist() == [0, 0, -1, -2, -3, -2, 0, 0]
  segments = jnp.array([[1] * 6 + [0, 1]])  # a padded completion, and another one
  found = qwen.rope_offsets(tokens, wide, config, segments)[0, :, 0]
  assert found.tolist() == [0, 0, -1, -2, -3, -2, -2, -2]
  at = qwen.places(wide, 16, 2)
  assert at.row[0].tolist() == [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2
  assert at.column[0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3] * 2


def test_places_and_squares_by_hand():
  grid = jnp.array([[[2, 4], [2, 2]]])
  at = pixtral.places(grid, 13)
  np.testing.assert_array_equal(at.owner[0], [0] * 8 + [1] * 4 + [2])
  np.testing.assert_array_equal(at.row[0, :12], [0] * 4 + [1] * 4 + [0, 0, 1, 1])
  np.testing.assert_array_equal(at.column[0, :12], [0, 1, 2, 3] * 2 + [0, 1] * 2)
  index, valid = pixtral.squares(grid, 16, 2)
  np.testing.assert_array_equal(
    index[0, :3], [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 10, 11]]
  )
  np.testing.assert_array_equal(valid[0], [True, True, True, False])
  too_many = pixtral.squares(grid, 8, 2)[1]
  assert not too_many.any()


SPELLINGS = (
  ("vision_tower.ln_pre.weight", "vision_tower.ln_pre.weight"),
  ("model.vision_tower.ln_pre.weight", "vision_tower.ln_pre.weight"),
  ("model.multi_modal_projector.norm.weight", "multi_modal_projector.norm.weight"),
  ("model.language_model.norm.weight", "language_model.model.norm.weight"),
  ("language_model.model.norm.weight", "language_model.model.norm.weight"),
  ("language_model.lm_head.weight", "language_model.lm_head.weight"),
  ("lm_head.weight", "language_model.lm_head.weight"),
)


@pytest.mark.parametrize("key, want", SPELLINGS)
def test_spellings_of_ministral3(key, want):
  canonical = families.FAMILIES["ministral3_multimodal"].canonical_key
  assert canonical(key) == canonical(want) == want


def test_absent_fields_of_qwens_have_the_values_of_transformers():
  text = {"model_type": "qwen3_vl_text", "vocab_size": 9, "hidden_size": 3584}
  text |= {"num_hidden_layers": 3, "num_attention_heads": 32, "intermediate_size": 9}
  hf = {"text_config": text, "vision_config": {}}
  config = families.by_model_type("qwen3_vl").config_from_hf(hf)
  assert config.vision == qwen.QwenConfig(
    num_layers=27,
    embed_dim=1152,
    hidden_dim=4304,
    num_heads=16,
    patch_size=16,
    deepstack=(8, 16, 24),
  )
  assert (config.image_token_id, config.mrope_sections) == (151_655, (24, 20, 20))
  assert config.rope.theta == 500_000 and config.num_kv_heads == 32


def test_a_tower_of_sounds_is_left_out(tmp_path):
  folder = checkpoints.copy("gemma4_vision", tmp_path / "sounds")
  sound = {"model.audio_tower.norm.weight": np.ones(3, np.float32)}
  checkpoints.rewrite(folder, checkpoints.tensors(folder) | sound)
  checkpoints.change_config(folder, audio_config={"model_type": "gemma4_audio"})
  model = AutoModel.from_pretrained(folder, images=True)
  save_pretrained(model, tmp_path / "out", source=folder)
  assert not sound.keys() & checkpoints.tensors(tmp_path / "out").keys()
  saved = json.loads((tmp_path / "out" / "config.json").read_text())
  assert saved["audio_config"] is None


def test_more_columns_than_positions():
  """The golden model has 12 positions; an image of 15 columns has no vectors."""
  features = jax.jit(load("gemma4").image_features)
  for columns in (12, 15):
    values, grid = np.ones((45, 48), np.float32), np.array([[3, columns]])
    vectors = features((values, grid))[0, : columns // 3]
    assert np.isfinite(vectors).all() == (columns == 12)


@pytest.mark.parametrize(
  "name, section, field, value, message",
  [
    ("smolvlm", None, "scale_factor", 4, "shuffle is 4 .* divisor of 6"),
    ("smolvlm", "vision_config", "hidden_act", "relu", "hidden_act is 'relu'"),
    ("smolvlm", "text_config", "model_type", "qwen2", "supported is only 'llama'"),
    ("smolvlm", None, "vision_config", None, "vision_config is None"),
    ("ministral3", None, "vision_feature_layer", -2, "vision_feature_layer is -2"),
    ("ministral3", "vision_config", "num_attention_heads", 2, "expected a multiple"),
    ("ministral3", "vision_config", "head_dim", 8, "vision_config.head_dim is 8"),
    ("ministral3", "vision_config", "model_type", "clip", "supported is only 'pixtral"),
    ("ministral3", "vision_config", "num_channels", 1, "num_channels is 1"),
    ("gemma4", None, "vision_config", None, "vision_config is None"),
    ("gemma4", "vision_config", "num_key_value_heads", 1, "num_key_value_heads is 1"),
    ("gemma4", "vision_config", "hidden_size", 16, "head_dim is 4, supported is only"),
    ("gemma4", "text_config", "use_bidirectional_attention", "all", "is 'all'"),
    ("qwen3_5", "vision_config", "temporal_patch_size", 1, "patch_size is 1, supp"),
    ("qwen3_5", "vision_config", "out_hidden_size", 8, "is 8; expected 16, the text"),
    ("qwen3_5", "vision_config", "num_position_embeddings", 8, "8; expected a square"),
    ("qwen3_5", "vision_config", "deepstack_visual_indexes", [0], r"supported .* \[\]"),
    ("qwen3_vl", "vision_config", "deepstack_visual_indexes", [2, 0], "increasing ord"),
    ("qwen3_vl", "vision_config", "deepstack_visual_indexes", [3], "from 0 to 2"),
    ("qwen3_vl", "vision_config", "num_heads", 8, "expected a multiple of 4"),
    ("qwen3_vl", "vision_config", "model_type", "qwen2_5_vl", "only 'qwen3_vl_vision"),
    ("qwen3_vl", "text_config", "model_type", "qwen2", "only 'qwen3_vl_text'"),
    ("qwen3_vl", "text_config", "num_hidden_layers", 1, "deepstack has 2 layers"),
  ],
)
def test_refused_settings(name, section, field, value, message):
  hf = json.loads((folder_of(name) / "config.json").read_text())
  (hf if section is None else hf[section])[field] = value
  if field == "num_attention_heads":
    del hf[section]["head_dim"]
  family = families.by_model_type(hf["model_type"], images=True)
  with pytest.raises(ValueError, match=message):
    family.config_from_hf(hf)


def test_other_sizes_of_patches_are_refused():
  model = load("ministral3")
  with pytest.raises(ValueError, match=r"values have shape \(1, 4, 27\), expected"):
    model.image_features((np.zeros((4, 27)), np.array([[2, 2]])))


@pytest.mark.parametrize(
  "values, grid, message",
  [
    (np.zeros((4, 48), np.uint8), [[2, 2]], "pixels are uint8; expected float"),
    (np.zeros((4, 48)), [[1, 2, 2]], r"grid has shape \(1, 1, 3\)"),
    (np.zeros((1, 4, 48)), [[2, 2]], r"grid has shape \(1, 2\), expected \[1, images"),
    (np.zeros((4, 48)), [[2.0, 2.0]], "grid is float32, expected integers"),
  ],
)
def test_unfit_patches_are_refused(values, grid, message):
  with pytest.raises((TypeError, ValueError), match=message):
    load("ministral3").image_features((values, np.array(grid)))


def test_levels_are_no_pixels():
  with pytest.raises(TypeError, match="pixels are uint8; expected float"):
    load("smolvlm").image_features(np.zeros((1, 24, 24, 3), np.uint8))


def test_no_images(name):
  model = load(name)
  none = {"smolvlm": np.zeros((0, 24, 24, 3), np.float32)}
  numbers = 3 if name.startswith("qwen") else 2
  patches = np.zeros((0, 48), np.float32), np.zeros((0, numbers), np.int32)
  assert model.image_features(none.get(name, patches)).size == 0


def test_blocks_of_queries():
  """A number of patches without small divisors is computed in few blocks, alike."""
  rng = np.random.default_rng(0)
  query, key, value = rng.normal(size=(3, 2, 13, 1, 4)).astype(np.float32)
  owners = np.array([[0] * 7 + [1] * 6, [0] * 13])

  def total(q, k, v, block):
    return jnp.sum(jnp.sin(layers.attend_all(q, k, v, block, owners)))

  whole = jax.grad(total, (0, 1, 2))(query, key, value, 13)
  parts = jax.grad(total, (0, 1, 2))(query, key, value, 5)
  for a, b in zip(whole, parts, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  program = str(jax.make_jaxpr(lambda q: layers.attend_all(q, key, value, 5))(query))
  assert "length=3" in program
