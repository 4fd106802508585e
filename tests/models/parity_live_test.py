"""The other direction: what we write, read by transformers and PEFT.

Runs where the `parity` extra is installed; parity_test.py runs everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tunix.models import families, heads, lora
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.config import RopeConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TOLERANCE = 1e-5
TOKENS = np.random.default_rng(1).integers(0, 48, (2, 24)).astype(np.int32)
SIZES = {
  "num_layers": 2,
  "vocab_size": 48,
  "embed_dim": 16,
  "hidden_dim": 24,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 8,
}
LINEAR = RopeConfig(theta=500.0, scaling="linear", factor=4.0)


def torch_logits(model):
  with torch.no_grad():
    return model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.float().numpy()


def read_back(folder):
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder, output_loading_info=True
  )
  assert not info["missing_keys"] and not info["unexpected_keys"]
  return model


def widen(model, kind=nnx.Param):
  """Adds noise, so that attention matters and adapters do something."""
  key = jax.random.key(7)
  for _, node in nnx.iter_graph(model):
    if isinstance(node, kind):
      key, use = jax.random.split(key)
      noise = 0.3 * jax.random.normal(use, node.shape)
      node.set_value((node.get_value() + noise).astype(node.dtype))
  return model


@pytest.mark.parametrize("name", checkpoints.NAMES)
def test_saved_back_folder(name, tmp_path):
  source = checkpoints.GOLDEN / name
  model = AutoModel.from_pretrained(source)
  save_pretrained(model, tmp_path / "out", source=source, max_shard_bytes=10_000)
  assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
  theirs = read_back(tmp_path / "out")
  assert checkpoints.relative(torch_logits(theirs), model(TOKENS)[0]) < TOLERANCE
  original = transformers.AutoConfig.from_pretrained(source)
  rope = lambda config: getattr(config, "rope_parameters", None) or {}
  ours = rope(theirs.config)
  # LongRoPE's factor may be absent in the original; it follows from the two contexts.
  assert {key: ours.get(key) for key in rope(original)} == rope(original)
  assert theirs.config.eos_token_id == 2
  assert theirs.generation_config.eos_token_id == 2


# odd_models_live_test.py saves every family, but from a folder.
FRESH = ("gemma", "gemma3", "llama3", "mistral", "olmo2", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FRESH)
def test_fresh_model(family, tmp_path):
  config = families.FAMILIES[family].config_class(**SIZES, rope=LINEAR)
  model = widen(AutoModel.from_config(config))
  save_pretrained(
    model, tmp_path / "out", hf_fields={"eos_token_id": 5, "pad_token_id": 0}
  )
  theirs = read_back(tmp_path / "out")
  assert theirs.config.eos_token_id == 5
  assert checkpoints.relative(torch_logits(theirs), model(TOKENS)[0]) < TOLERANCE


def test_bfloat16(tmp_path):
  model = AutoModel.from_pretrained(checkpoints.GOLDEN / "qwen3")
  save_pretrained(model, tmp_path / "out", dtype=jnp.bfloat16)
  theirs = read_back(tmp_path / "out")
  assert theirs.dtype == torch.bfloat16
  ours = AutoModel.from_pretrained(tmp_path / "out", dtype=jnp.float32)
  assert checkpoints.relative(torch_logits(theirs.float()), ours(TOKENS)[0]) < TOLERANCE


OTHER_TARGETS = {
  "gpt_oss": ("q_proj", "o_proj", "gate_up_proj"),
  "nemotron_h": ("q_proj", "in_proj", "up_proj"),  # PEFT refuses out_proj
  "qwen3_5_moe": lora.ALL_LINEAR,  # modules, and parameters of experts
  "phi3": ("qkv_proj", "o_proj", "gate_up_proj"),
  "glm4_moe_lite": ("o_proj", "kv_b_proj"),
  "deepseek_v3": ("o_proj", "kv_b_proj"),
  "granite4": ("q_proj", "o_proj", "down_proj"),
}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", checkpoints.NAMES)
def test_adapter_and_merged_model(name, stacked, tmp_path):
  source = checkpoints.GOLDEN / name
  model = AutoModel.from_pretrained(source)
  if not stacked:
    model = model.unstack()
  # Of experts PEFT reads all three or the downs alone; docs/limits.md.
  mlp = ("gate_proj", "up_proj", "down_proj") if "moe" in name else ("gate_proj",)
  targets = OTHER_TARGETS.get(name, ("q_proj", "o_proj", *mlp))
  config = lora.LoraConfig(rank=3, alpha=12.0, targets=targets)
  adapted = widen(lora.apply(model, config), nnx.LoRAParam)
  logits = adapted(TOKENS)[0]

  save_pretrained(adapted, tmp_path / "merged", source=source)
  merged = read_back(tmp_path / "merged")
  assert checkpoints.relative(torch_logits(merged), logits) < 2 * TOLERANCE

  lora.save_adapter(adapted, tmp_path / "adapter", base=str(source))
  base = transformers.AutoModelForCausalLM.from_pretrained(source)
  theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
  assert checkpoints.relative(torch_logits(theirs), logits) < 2 * TOLERANCE
  assert checkpoints.relative(model(TOKENS)[0], logits) > 0.1


def test_adapter_on_some_layers_only(tmp_path):
  source = checkpoints.GOLDEN / "qwen3"
  model = AutoModel.from_pretrained(source).unstack()
  config = lora.LoraConfig(rank=2, targets=(r"layers\.1\..*_proj",))
  adapted = widen(lora.apply(model, config), nnx.LoRAParam)
  lora.save_adapter(adapted, tmp_path / "adapter")
  base = transformers.AutoModelForCausalLM.from_pretrained(source)
  theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
  assert checkpoints.relative(torch_logits(theirs), adapted(TOKENS)[0]) < TOLERANCE


@pytest.mark.parametrize("name", ["llama3p2_tied", "gemma2", "qwen2", "qwen3_moe"])
def test_reward_models(name, tmp_path):
  source = checkpoints.GOLDEN / name
  model = widen(AutoModel.from_pretrained(source, num_scores=1))
  save_pretrained(model, tmp_path / "out", source=source)
  theirs, info = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path / "out", output_loading_info=True
  )
  assert not info["missing_keys"] and not info["unexpected_keys"]
  tokens = np.where(TOKENS == 0, 3, TOKENS)  # 0 is padding to their pooling
  with torch.no_grad():
    want = theirs.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  ours = heads.last_scores(model(tokens)[0], np.ones_like(tokens))
  assert checkpoints.relative(ours, want) < 1e-4  # two numbers, nearly equal
