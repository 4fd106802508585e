"""GGUF files of tiny models: the tensors and settings of the folders they come from."""

import dataclasses

import gguf
import numpy as np
import pytest

from tests.models import checkpoints
from tests.models.gguf import ggufs
from tunix.models import families
from tunix.models.gguf import changes, header, tensors
from tunix.models.transformer.attention.rope import frequencies, length_factor
from tunix.models.transformer.config import RopeConfig


def whole(tensor):
  """All numbers of a tensor, by a slice for every axis."""
  return tensor.map()[tuple(slice(0, n) for n in tensor.shape)]


def config_of(hf):
  return families.by_model_type(hf["model_type"]).config_from_hf(hf)


@pytest.mark.parametrize("name", ggufs.NAMES)
def test_a_golden_folder_comes_back(name, tmp_path):
  hf, want = ggufs.source(name)
  file = ggufs.write(tmp_path / "model.gguf", hf, want)
  got = tensors.open_file(file)
  assert got.keys() == want.keys()
  for key, value in want.items():
    assert got[key].shape == value.shape, key
    np.testing.assert_allclose(whole(got[key]), value, atol=2e-7, err_msg=key)
  read, written = config_of(tensors.config_json(header.read(file))), config_of(hf)
  if hf["model_type"] == "mistral":  # llama.cpp has one architecture for both
    written = config_of(hf | {"model_type": "llama"})
  assert_same_rope(read.rope, written.rope, hf["head_dim"])
  changed = dataclasses.replace(read, rope=written.rope, dtype=written.dtype)
  assert dataclasses.replace(changed, param_dtype=written.param_dtype) == written


def assert_same_rope(got, want, head_dim):
  """The same angles; a table of divisors does not say which settings made it."""
  dim = int(head_dim * want.partial)
  dim = head_dim if want.scaling == "proportional" else dim
  np.testing.assert_allclose(frequencies(dim, got), frequencies(dim, want), rtol=3e-7)
  assert length_factor(got) == pytest.approx(length_factor(want))
  assert got.truncate == want.truncate


def test_rows_of_llama_are_those_of_the_original_rotary_embedding():
  # One head of 6 dimensions: Hugging Face rotates (0, 3), (1, 4) and (2, 5) together.
  rows = np.arange(12.0).reshape(12, 1)
  (stored,) = changes.Interleaved(2).to_gguf([rows])
  assert stored[:6, 0].tolist() == [0, 3, 1, 4, 2, 5]
  assert stored[6:, 0].tolist() == [6, 9, 7, 10, 8, 11]


def test_the_usual_table_of_llama_3_is_recognized(tmp_path):
  usual = RopeConfig(theta=500_000.0, scaling="llama3", factor=32.0)
  hf, want = ggufs.source(
    "llama3p2_tied",
    head_dim=8,
    rope_parameters={
      "rope_type": "llama3",
      "rope_theta": 500_000.0,
      "factor": 32.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
    },
  )
  file = ggufs.write(tmp_path / "model.gguf", hf, want)
  assert config_of(tensors.config_json(header.read(file))).rope == usual


SHAPES = [
  (changes.Plain(), 1, (24,)),
  (changes.Plain(1.0), 1, (24, 5)),
  (changes.Interleaved(3), 1, (24, 5)),
  (changes.Interleaved(3), 1, (24,)),
  (changes.Stacked(), 4, (6, 5)),
  (changes.Swapped(), 1, (4, 6, 5)),
  (changes.Alternating(), 1, (4, 5, 6)),
  (changes.Alternating(), 1, (4, 6)),
]


@pytest.mark.parametrize(("change", "count", "shape"), SHAPES, ids=str)
def test_each_change_has_an_inverse_by_rows(change, count, shape):
  want = np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)
  stored = change.to_gguf([*want])
  assert change.shape(stored) == shape
  for number, value in enumerate(want):
    for rows in (slice(0, 1), slice(1, shape[0])):
      got = change.to_hf(stored, number, rows)
      np.testing.assert_allclose(got, value[rows], atol=3e-7)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_slices_are_those_of_the_library(kind, tmp_path):
  hf, arrays = ggufs.llama()
  file = ggufs.write(
    tmp_path / "model.gguf", hf, arrays, gguf.GGMLQuantizationType[kind]
  )
  got = tensors.open_file(file)
  theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
  for key, name in (
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ("model.norm.weight", "output_norm.weight"),
  ):
    want = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
    np.testing.assert_array_equal(whole(got[key]), want)
    part = (slice(3, 7), slice(5, 50))[: want.ndim]
    np.testing.assert_array_equal(got[key].map()[part], want[part])
  queries = "model.layers.0.self_attn.q_proj.weight"
  np.testing.assert_allclose(whole(got[queries]), arrays[queries], atol=0.3)
  assert tensors.config_json(header.read(file))["dtype"] == "bfloat16"


def test_gemma_is_capped_as_llama_cpp_does(tmp_path):
  hf, arrays = ggufs.source("gemma4")
  read = header.read(ggufs.write(tmp_path / "model.gguf", hf, arrays))
  field = "final_logit_softcapping"
  assert tensors.config_json(read)[field] is None
  del read.metadata[f"gemma4.{field}"]
  assert tensors.config_json(read)[field] == 30.0
  hf, arrays = ggufs.source("gemma2")
  with pytest.raises(ValueError, match=r"softcapping None; llama\.cpp"):
    ggufs.write(tmp_path / "other.gguf", hf | {"attn_logit_softcapping": None}, arrays)


# Largest error of random weights, relative to their norm.
ERRORS = {"F32": 0, "Q8_0": 0.006, "Q6_K": 0.02, "Q5_K": 0.04, "Q5_1": 0.04}
ERRORS |= {"Q5_0": 0.05, "Q4_K": 0.08, "Q4_0": 0.09, "Q3_K": 0.16, "Q2_K": 0.3}


@pytest.mark.parametrize("name", ["q2_k", "q4_k_m", "q5_k_m"])
def test_k_quants_of_llama_cpp_are_near_the_weights(name):
  _, want = ggufs.llama(**ggufs.K_SIZES)
  got = tensors.open_file(checkpoints.GOLDEN / "gguf" / f"{name}.gguf")
  assert got.keys() == want.keys()
  for key, tensor in got.items():
    kind = tensor.stored[0].kind.name
    assert checkpoints.relative(whole(tensor), want[key]) <= ERRORS[kind], (key, kind)


# Values that no settings of these files have.
ODD = [None, "text", True, 0, 1, -1, 3, 2**31 - 1, float("nan"), np.zeros(3, np.int32)]


# The architectures with readers of their own.
@pytest.mark.parametrize(
  "name", ["gemma3", "gemma4", "gpt_oss", "granite", "llama3p1", "olmo3", "phi3"]
)
def test_each_odd_setting_is_refused_or_computed(name, tmp_path):
  hf, arrays = ggufs.source(name)
  read = header.read(ggufs.write(tmp_path / "model.gguf", hf, arrays))
  for key in [*read.metadata, *read.tensors]:
    for value in ODD:
      metadata, stored = dict(read.metadata), dict(read.tensors)
      if key in stored:
        del stored[key]
      elif value is None:
        del metadata[key]
      else:
        metadata[key] = value
      odd = dataclasses.replace(read, metadata=metadata, tensors=stored)
      try:
        config_of(tensors.config_json(odd))
      except ValueError as error:
        assert "\n" not in str(error)
      if key in stored:
        break
