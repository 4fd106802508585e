"""FP8 with scales: numbers by hand, and folders that hold it."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tunix.models import automodel
from tunix.models.automodel import AutoModel
from tunix.models.files import stored_formats, tensor_files
from tunix.models.safetensors_saver import save_pretrained

BLOCK = (16, 8)
SETTINGS = {
  "quant_method": "fp8",
  "activation_scheme": "dynamic",
  "weight_block_size": BLOCK,
}
PER_MATRIX = SETTINGS | {"activation_scheme": "static", "weight_block_size": None}
E4M3 = ml_dtypes.float8_e4m3fn
TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


def grid(shape, block):
  return tuple(-(-size // part) for size, part in zip(shape[-2:], block))


def blocks(shape, block):
  """An index for every block of the matrices of a tensor."""
  height, width = block
  for row, column in np.ndindex(grid(shape, block)):
    at = np.s_[row * height : (row + 1) * height, column * width : (column + 1) * width]
    yield (row, column), (..., *at)


def as_stored(value, block):
  """Numbers, scales and decoded numbers of matrices, by loops over the blocks."""
  block = block or value.shape[-2:]
  numbers, decoded = np.zeros(value.shape, E4M3), np.zeros(value.shape, np.float32)
  scales = np.zeros((*value.shape[:-2], *grid(value.shape, block)), np.float32)
  for (row, column), at in blocks(value.shape, block):
    scale = np.abs(value[at]).max((-2, -1), keepdims=True) / np.float32(448)
    numbers[at] = (value[at] / scale).astype(E4M3)
    scales[..., row : row + 1, column : column + 1] = scale
    decoded[at] = numbers[at].astype(np.float32) * scale
  return numbers, scales, decoded


def is_linear(key, value):
  return value.ndim >= 2 and "_proj" in key and "conv" not in key


def folders(path, name, settings):
  """A golden folder in FP8, and one with the same numbers in float32."""
  packed = checkpoints.copy(name, path / "packed")
  plain = checkpoints.copy(name, path / "plain")
  values, numbers = {}, checkpoints.tensors(plain)
  for key, value in list(numbers.items()):
    if not is_linear(key, value):
      values[key] = value
      continue
    value = value.astype(np.float32)
    values[key], scales, numbers[key] = as_stored(value, settings["weight_block_size"])
    static = settings["activation_scheme"] == "static"
    if static:
      values[key.removesuffix("weight") + "activation_scale"] = np.ones((), np.float32)
    values[f"{key}_scale_inv"] = scales.reshape(()) if static else scales
  checkpoints.rewrite(packed, values)
  checkpoints.rewrite(plain, numbers)
  checkpoints.change_config(packed, quantization_config=settings)
  return packed, plain


def load(folder):
  return AutoModel.from_pretrained(folder, dtype=jnp.float32)


@pytest.mark.parametrize(
  "name, settings",
  [
    ("deepseek_v3", SETTINGS),
    ("qwen3_5_moe", SETTINGS),
    ("ministral3", PER_MATRIX),
  ],
)
def test_a_folder_equals_its_decoded_numbers(name, settings, tmp_path):
  packed, plain = folders(tmp_path, name, settings)
  states = (nnx.state(load(folder)) for folder in (packed, plain))
  jax.tree.map(np.testing.assert_array_equal, *states)
  assert automodel.config_of_folder(packed) == automodel.config_of_folder(plain)


@pytest.mark.parametrize("place", ["config.json", "text_config"])
def test_text_of_a_folder_with_a_tower(place, tmp_path):
  packed, plain = folders(tmp_path, "qwen3_5_moe", SETTINGS)
  text = json.loads((packed / "config.json").read_text())
  fields = {"model_type": "qwen3_5_moe", "text_config": text}
  if place == "config.json":
    fields["quantization_config"] = text.pop("quantization_config")
  (packed / "config.json").write_text(json.dumps(fields))
  stored = tensor_files.open_folder(packed)
  values = {
    key.replace("model.", "model.language_model.", 1): np.asarray(tensor.map())
    for key, tensor in stored.items()
  }
  mtp = "mtp.layers.0.mlp.up_proj.weight"
  values |= {mtp: MATRIX["x"], f"{mtp}_scale_inv": MATRIX["x_scale_inv"]}
  values["mtp.fc.weight"] = np.ones((2, 2), np.float32)
  checkpoints.rewrite(packed, values)
  states = (nnx.state(load(folder)) for folder in (packed, plain))
  jax.tree.map(np.testing.assert_array_equal, *states)


def test_each_device_decodes_its_part(tmp_path):
  packed, _ = folders(tmp_path, "qwen3", SETTINGS)
  mesh = jax.make_mesh((2, 4), ("fsdp", "tp"))
  spread = AutoModel.from_pretrained(packed, mesh, dtype=jnp.float32)
  assert len(spread.layers.mlp.up_proj.kernel.sharding.device_set) == 8
  whole = map(np.asarray, jax.tree.leaves(nnx.state(load(packed))))
  for got, want in zip(jax.tree.leaves(nnx.state(spread)), whole, strict=True):
    np.testing.assert_array_equal(np.asarray(got), want)


def test_what_is_saved_is_plain(tmp_path):
  packed, _ = folders(tmp_path, "qwen3", SETTINGS)
  model = load(packed)
  save_pretrained(model, tmp_path / "saved", source=packed)
  assert "quantization_config" not in tensor_files.read_json(
    tmp_path / "saved" / "config.json"
  )
  states = (nnx.state(it) for it in (load(tmp_path / "saved"), model))
  jax.tree.map(np.testing.assert_array_equal, *states)


def one(tmp_path, values, **changes):
  """The tensors of a folder with one matrix, decoded."""
  checkpoints.rewrite(tmp_path, values)
  settings = {"quantization_config": SETTINGS | changes}
  return stored_formats.decoded(settings, tensor_files.open_folder(tmp_path))


def test_decoding_by_hand(tmp_path):
  # Rows of two, columns of three; the last blocks are cut by the edge.
  values = np.array([[1, 2, 4, 8], [-1, 0.5, 1, 1], [2, 2, 2, 2]], E4M3)
  scales = np.array([[0.5, 3], [10, 0.25]], ml_dtypes.bfloat16)
  tensors = one(
    tmp_path, {"x": values, "x_scale_inv": scales}, weight_block_size=[2, 3]
  )
  want = [[0.5, 1, 2, 24], [-0.5, 0.25, 0.5, 3], [20, 20, 20, 0.5]]
  whole = tensors["x"].map()[:, :]
  np.testing.assert_array_equal(whole, want)
  np.testing.assert_array_equal(tensors["x"].map()[1:3, 2:4], whole[1:3, 2:4])


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e8m0fnu, np.uint8])
def test_scales_may_be_powers_of_two(dtype, tmp_path):
  values = {"x": np.full((2, 2), 3, E4M3)}
  scales = np.full((1, 1), 0.25, ml_dtypes.float8_e8m0fnu)  # the byte 125
  values["x_scale_inv"] = scales.view(dtype)
  values["flags"] = np.ones(3, np.bool_)  # of a part that is not loaded
  assert one(tmp_path, values)["x"].map()[:, :].tolist() == [[0.75] * 2] * 2


@pytest.mark.parametrize(
  "scales, want", [([[2], [3]], [2] * 128 + [3]), (5, [5] * 129), ([5], [5] * 129)]
)
def test_a_missing_block_size_means_128(scales, want, tmp_path):
  values = {"x": np.ones((129, 1), E4M3), "x_scale_inv": np.array(scales, np.float32)}
  checkpoints.rewrite(tmp_path, values)
  settings = {"quantization_config": {"quant_method": "fp8"}}
  tensors = stored_formats.decoded(settings, tensor_files.open_folder(tmp_path))
  assert tensors["x"].map()[:, :].ravel().tolist() == want


MATRIX = {"x": np.ones((32, 8), E4M3), "x_scale_inv": np.ones((2, 1), np.float32)}


@pytest.mark.parametrize(
  "values, changes, message",
  [
    ({"x": MATRIX["x"]}, {}, "'x' is float8_e4m3fn without scales"),
    ({"x_scale_inv": MATRIX["x_scale_inv"]}, {}, "'x' is missing"),
    (MATRIX, {"weight_block_size": [8, 8]}, r"blocks of \(8, 8\)"),
    (MATRIX, {"weight_block_size": None}, "one scale a matrix"),
    (MATRIX, {"weight_block_size": [16]}, r"weight_block_size is \[16\]"),
    (MATRIX, {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    (MATRIX | {"x": np.ones((32, 8), np.float32)}, {}, "expected float8_e4m3fn"),
  ],
)
def test_damaged_folders_are_refused(values, changes, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    one(tmp_path, values, **changes)


@pytest.mark.parametrize("name", ["qwen3", "ministral3", "qwen3_moe"])
def test_transformers_reads_the_same_numbers(name, tmp_path):
  transformers = pytest.importorskip("transformers")
  torch = pytest.importorskip("torch")
  # transformers derives blocks from the number of scales: these divide each matrix.
  divides = SETTINGS | {"weight_block_size": [4, 4]}
  settings = PER_MATRIX if name == "ministral3" else divides
  packed, _ = folders(tmp_path, name, settings)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    packed,
    dtype=torch.float32,
    quantization_config=transformers.FineGrainedFP8Config(
      dequantize=True, weight_block_size=settings["weight_block_size"]
    ),
  )
  want = theirs(torch.tensor(TOKENS)).logits.detach().numpy()
  assert checkpoints.relative(load(packed)(TOKENS)[0], want) < 1e-5


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_no_layer_computes_in_the_stored_dtype(dtype, tmp_path):
  packed, _ = folders(tmp_path, "qwen3", SETTINGS)
  checkpoints.change_config(packed, dtype=dtype)
  for read in (AutoModel.from_pretrained, automodel.config_of_folder):
    with pytest.raises(ValueError, match=f"{dtype}' is no dtype to compute in"):
      read(packed)
