"""MXFP4 by hand, folders that hold it, and kernels that keep it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models import lora, quantization
from tunix.models.automodel import AutoModel
from tunix.models.files import mxfp4, tensor_files
from tunix.models.gpt_oss import model as gpt_oss
from tunix.models.gpt_oss.model import ModelConfig
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.dense import quantized

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


def config(**changes):
  """Experts of 32 inputs and 64 hidden units: one and two blocks."""
  fields = {"num_layers": 2, "vocab_size": 48, "embed_dim": 32, "hidden_dim": 64}
  fields |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "sliding_window": 4}
  moe = gpt_oss.experts(3, hidden_dim=64, per_token=2)
  types = ("sliding", "full")
  return ModelConfig(**(fields | {"moe": moe, "layer_types": types} | changes))


def as_stored(value):
  """The blocks and scales of a tensor [E, in, out], by loops over the numbers."""
  columns = np.asarray(value, np.float32).swapaxes(1, 2)
  blocks = columns.reshape(*columns.shape[:2], -1, 32)
  power = np.floor(np.log2(np.abs(blocks).max(-1))).astype(int) - 2
  table = np.asarray(quantized.MXFP4)
  nearest = np.abs(blocks[..., None] / 2.0 ** power[..., None, None] - table)
  codes = nearest.argmin(-1).astype(np.uint8)
  packed = codes[..., 0::2] | codes[..., 1::2] << 4
  return packed.copy("C"), (power + 127).astype(np.uint8, "C")


def decoded(blocks, scales):
  """The numbers of blocks and scales, one at a time."""
  out = np.zeros((*blocks.shape[:-1], 32), np.float32)
  for at in np.ndindex(blocks.shape):
    for half, code in enumerate((blocks[at] & 15, blocks[at] >> 4)):
      number = quantized.MXFP4[code] * 2.0 ** (int(scales[at[:-1]]) - 127)
      out[(*at[:-1], 2 * at[-1] + half)] = number
  return out.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder in MXFP4, and one with the same numbers in bfloat16."""
  path = tmp_path_factory.mktemp("mxfp4")
  model = AutoModel.from_config(config(), dtype=jnp.float32)
  save_pretrained(model, path / "packed", dtype=jnp.bfloat16)
  save_pretrained(model, path / "plain", dtype=jnp.bfloat16)
  values = {}
  tensors = checkpoints.tensors(path / "plain")
  for key, value in list(tensors.items()):
    if key.endswith(("gate_up_proj", "down_proj")):
      blocks, scales = as_stored(value)
      values |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
      tensors[key] = decoded(blocks, scales).astype(ml_dtypes.bfloat16)
      tensors[key] = np.ascontiguousarray(tensors[key])
    else:
      values[key] = value
  checkpoints.rewrite(path / "packed", values)
  checkpoints.rewrite(path / "plain", tensors)
  settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
  checkpoints.change_config(path / "packed", quantization_config=settings)
  return path


def test_decoding_by_hand():
  # Codes 1, 15, 7 and 8 are 0.5, -6, 6 and -0; the scale 128 is 2 ** 1.
  codes = jnp.array([[1 | 15 << 4], [7 | 8 << 4]], jnp.uint8)
  scales = jnp.array([[128]], jnp.uint8)
  got = quantized.decode(codes, scales, "mxfp4", jnp.float32)
  assert got[:, 0].tolist() == [1.0, -12.0, 12.0, 0.0]


def test_encoding_by_hand():
  # The largest number 5 is in [4, 8), so the scale is 1. 5 is between 4 and 6 and goes
  # to the even code, 4; 0.25 goes to 0, and -0.75 to -1.
  kernel = jnp.array([[5.0], [0.25], [-0.75], [3.4]])
  codes, scales = quantized.encode(kernel, "mxfp4", 4, None)
  assert scales.tolist() == [[127]]
  back = quantized.decode(codes, scales, "mxfp4", jnp.float32)
  assert back[:, 0].tolist() == [4.0, 0.0, -1.0, 3.0]


def test_numbers_of_the_format_are_encoded_without_an_error():
  # Blocks whose largest number is small have another scale than they were stored with.
  rng = np.random.default_rng(0)
  codes = rng.integers(0, 16, (64, 200)) & rng.choice([9, 11, 13, 15], 200)
  numbers = np.asarray(quantized.MXFP4)[codes] * 2.0 ** rng.integers(-20, 20, 200)
  numbers = jnp.asarray(numbers, jnp.float32)
  codes, scales = quantized.encode(numbers, "mxfp4", 32, None)
  back = quantized.decode(codes, scales, "mxfp4", jnp.float32)
  np.testing.assert_array_equal(back, numbers)


def test_a_folder_equals_its_decoded_numbers(folder):
  want = AutoModel.from_pretrained(folder / "plain", dtype=jnp.float32)
  got = AutoModel.from_pretrained(folder / "packed", dtype=jnp.float32)
  states = map(nnx.state, (got, want))
  jax.tree.map(np.testing.assert_array_equal, *states)


def test_kernels_stay_in_four_bits(folder):
  want = AutoModel.from_pretrained(folder / "plain", dtype=jnp.float32)
  small = AutoModel.from_pretrained(
    folder / "packed", dtype=jnp.float32, quantize="mxfp4"
  )
  kernel = small.layers.mlp.experts.gate_up_proj.kernel
  assert kernel.codes.shape == (2, 3, 16, 128) and kernel.scales.dtype == jnp.uint8
  assert not quantization.lora_modules.is_quantized(small.layers.attn.q_proj)
  assert (
    checkpoints.relative(toys.logits(small, TOKENS), toys.logits(want, TOKENS)) < 1e-6
  )
  adapted = lora.apply(small, lora.LoraConfig(rank=2))
  assert (
    checkpoints.relative(toys.logits(adapted, TOKENS), toys.logits(want, TOKENS)) < 1e-6
  )


def test_slices_decode_the_blocks_that_they_cut(folder):
  tensors = mxfp4.joined(tensor_files.open_folder(folder / "packed"))
  tensor = tensors["model.layers.1.mlp.experts.down_proj"]
  assert tensor.shape == (3, 64, 32)
  whole = tensor.map()[:, :, :]
  index = np.s_[1:3, 20:50, 3:9]
  np.testing.assert_array_equal(tensor.map()[index], whole[index])


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda t: t.pop("x_scales"), "'x_scales' is missing"),
    (lambda t: t.update(x_blocks=t["x_scales"]), "expected uint8 of MXFP4"),
  ],
)
def test_damaged_pairs_are_refused(change, message, tmp_path):
  tensors = {"x_blocks": np.zeros((1, 2, 3, 16), np.uint8)}
  tensors["x_scales"] = np.zeros((1, 2, 3), np.uint8)
  change(tensors)
  checkpoints.rewrite(tmp_path, tensors)
  with pytest.raises(ValueError, match=message):
    mxfp4.joined(tensor_files.open_folder(tmp_path))


def test_transformers_reads_the_same_numbers(folder):
  torch = pytest.importorskip("torch")
  theirs = pytest.importorskip("transformers.integrations.mxfp4")
  tensors = checkpoints.tensors(folder / "packed")
  plain = checkpoints.tensors(folder / "plain")
  for key in (key for key in tensors if key.endswith("_blocks")):
    name = key.removesuffix("_blocks")
    pair = (torch.tensor(tensors[f"{name}_{x}"]) for x in ("blocks", "scales"))
    got = theirs.convert_moe_packed_tensors(*pair, dtype=torch.float32)
    np.testing.assert_array_equal(got.numpy(), plain[name].astype(np.float32))
