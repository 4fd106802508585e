"""Models and adapters as GGUF files, read by the package `gguf` and by tunix."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from tests import toys
from tests.models import checkpoints
from tests.models.gguf import ggufs
from tunix.models import families, lora, safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.models.gguf import tensors, writer


def tensors_of(file):
  """All tensors as float32, and their types, read by the library."""
  found = gguf.GGUFReader(file).tensors
  values = {x.name: gguf.quants.dequantize(x.data, x.tensor_type) for x in found}
  return values, {x.name: x.tensor_type.name for x in found}


def golden(name, tmp_path):
  """A golden model as llama.cpp computes it, without and with its adapter."""
  folder = checkpoints.copy(name, tmp_path / name)
  checkpoints.change_config(folder, **ggufs.FIXED.get(name, {}))
  base = AutoModel.from_pretrained(folder)
  if name != "qwen3_moe":
    return base, lora.load_adapter(base, folder / "adapter")
  adapted = lora.apply(base, lora.LoraConfig(rank=2, targets=("up_proj", "down_proj")))
  for linear in lora.lora_modules.adapted(adapted).values():
    values = np.random.default_rng(0).normal(size=linear.lora_b.shape)
    linear.lora_b.set_value(jnp.asarray(values, jnp.float32))
  return base, adapted


# Permuted rows, norms plus one, stacks of experts, fused experts, fused projections.
@pytest.mark.parametrize(
  "name", ["llama_biased", "gemma", "qwen3_moe", "gpt_oss", "phi3"]
)
def test_files_hold_the_model_and_the_adapter(name, tmp_path):
  base, adapted = golden(name, tmp_path)
  files = [tmp_path / f"{x}.gguf" for x in ("base", "merged", "adapter")]
  writer.write_model(base, files[0], "f32", {"tokenizer.ggml.model": "none"})
  writer.write_model(adapted, files[1], "f32", {})
  writer.write_adapter(adapted, files[2], "f32")

  # tunix reads what it wrote.
  stored = tensors.open_file(files[1])
  family = families.of_config(base.config)
  for tensor in safetensors_saver.new_tensors(adapted, family, jnp.float32, []):
    value = tensor.read()
    got = stored.pop(tensor.name).map()[(slice(None),) * value.ndim]
    np.testing.assert_allclose(got, value, atol=2e-7, err_msg=tensor.name)
  assert not stored

  # The library reads the adapter, which is the difference of the two models.
  (before, _), (after, _), (pairs, _) = map(tensors_of, files)
  fields = gguf.GGUFReader(files[2]).fields
  alpha = fields["adapter.lora.alpha"].contents()
  assert fields["general.type"].contents() == "adapter"
  for key, value in before.items():
    change = np.zeros_like(value)
    if f"{key}.lora_a" in pairs:
      a, b = pairs.pop(f"{key}.lora_a"), pairs.pop(f"{key}.lora_b")
      change = alpha / a.shape[-2] * b @ a
      assert np.any(change)
    np.testing.assert_allclose(after[key], value + change, atol=1e-5, err_msg=key)
  assert not pairs


def test_types_of_tensors(tmp_path):
  # Rows of 48 numbers are no whole number of blocks of 32.
  model = toys.model(hidden_dim=48)
  exact = None
  for kind, worst in (("f32", 0), ("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 2e-2)):
    file = tmp_path / f"{kind}.gguf"
    writer.write_model(model, file, kind, {})
    values, types = tensors_of(file)
    exact = exact or values
    for key, value in values.items():
      limit = worst * np.abs(exact[key]).max()
      np.testing.assert_allclose(value, exact[key], rtol=0, atol=limit)
      is_norm = key.endswith("norm.weight")
      falls_back = kind == "q8_0" and key.endswith("ffn_down.weight")
      want = "F32" if is_norm else "F16" if falls_back else kind.upper()
      assert types[key] == want
    reader = gguf.GGUFReader(file)
    file_type = reader.fields["general.file_type"].contents()
    assert file_type == gguf.LlamaFileType[writer.KINDS[kind]]


def test_pairs_of_several_ranks_and_scales_have_one_alpha(tmp_path):
  config = lora.LoraConfig(
    rank=4,
    alpha=8,
    targets=("q_proj", "o_proj"),
    rank_pattern={"o_proj": 2},
    alpha_pattern={"o_proj": 32},
  )
  adapted = lora.apply(toys.model(), config)
  for linear in lora.lora_modules.adapted(adapted).values():
    linear.lora_b.set_value(jnp.ones_like(linear.lora_b[...]))
  writer.write_adapter(adapted, tmp_path / "a.gguf", "f32")
  values, _ = tensors_of(tmp_path / "a.gguf")
  fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
  alpha = fields["adapter.lora.alpha"].contents()
  for part, scale in (("q", 8 / 4), ("output", 32 / 2)):
    b = values[f"blk.1.attn_{part}.weight.lora_b"]
    np.testing.assert_allclose(alpha / b.shape[-1] * b, scale)


def adapted(**options):
  return lora.apply(toys.model(), lora.LoraConfig(rank=2, **options))


REFUSED = {
  "model_type is 'deepseek_v3'": lambda: AutoModel.from_pretrained(
    checkpoints.GOLDEN / "deepseek_v3"
  ),
  "model_type is 'gemma3'": lambda: AutoModel.from_pretrained(
    checkpoints.GOLDEN / "gemma3_vision"
  ),
  "head of scores": lambda: AutoModel.from_config(toys.config(num_scores=1)),
  "float16 cannot hold": lambda: with_large(toys.model()),
}
REFUSED_ADAPTERS = {
  "use_dora": lambda: adapted(use_dora=True),
  "modules_to_save": lambda: adapted(modules_to_save=("norm",)),
  "no adapters": toys.model,
  "zero throughout": adapted,
}


def with_large(model):
  kernel = model.lm_head.kernel
  kernel.set_value(kernel[...].at[0, 0].set(1e6))
  return model


@pytest.mark.parametrize("message", [*REFUSED, *REFUSED_ADAPTERS])
def test_refused(message, tmp_path):
  is_adapter = message in REFUSED_ADAPTERS
  model = (REFUSED_ADAPTERS if is_adapter else REFUSED)[message]()
  with pytest.raises(ValueError, match=message):
    if is_adapter:
      writer.write_adapter(model, tmp_path / "x.gguf", "f16")
    else:
      writer.write_model(model, tmp_path / "x.gguf", "f16", {})
