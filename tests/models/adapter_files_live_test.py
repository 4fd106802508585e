"""PEFT and we compute the same with one adapter folder, whoever wrote it.

Runs where the `parity` extra is installed.
"""

import numpy as np
import pytest

from tests.models import checkpoints
from tests.models.lora_test import widen
from tests.models.parity_live_test import TOKENS, TOLERANCE, read_back, torch_logits
from tunix.models import lora, new_tokens
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SOURCE = checkpoints.GOLDEN / "qwen3"
TARGETS = ("q_proj", "o_proj", "gate_proj")

OURS = {
  "dora": {"use_dora": True},
  "rslora": {"use_rslora": True},
  "patterns": {
    "rank_pattern": {"q_proj": 5, "mlp.gate_proj": 2},
    "alpha_pattern": {"o_proj": 1.5},
  },
  "all": {"use_dora": True, "use_rslora": True, "rank_pattern": {"o_proj": 6}},
}
THEIRS = {
  "dora": {"use_dora": True},
  "rslora": {"use_rslora": True},
  "patterns": {
    "rank_pattern": {"q_proj": 5, "layers.1.mlp.gate_proj": 2},
    "alpha_pattern": {"o_proj": 1.5, r"layers\.0\.self_attn\.q_proj": 7.0},
  },
  "layers": {"layers_to_transform": [1], "use_dora": True},
  "orthogonal": {"init_lora_weights": "orthogonal", "r": 4},
}
FAMILIES = sorted(
  file.parent.name
  for file in checkpoints.GOLDEN.glob("*/config.json")
  if not file.parent.name.endswith("_vision")
)


def their_base():
  return transformers.AutoModelForCausalLM.from_pretrained(SOURCE)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", OURS)
def test_peft_reads_what_we_write(name, stacked, tmp_path):
  base = AutoModel.from_pretrained(SOURCE)
  base = base if stacked else base.unstack()
  config = lora.LoraConfig(rank=3, alpha=6.0, targets=TARGETS, **OURS[name])
  adapted = widen(lora.apply(base, config))
  logits = adapted(TOKENS)[0]
  assert checkpoints.relative(base(TOKENS)[0], logits) > 0.05
  lora.save_adapter(adapted, tmp_path / "adapter")
  theirs = peft.PeftModel.from_pretrained(their_base(), tmp_path / "adapter")
  assert checkpoints.relative(torch_logits(theirs), logits) < TOLERANCE
  save_pretrained(adapted, tmp_path / "merged")
  merged = read_back(tmp_path / "merged")
  assert checkpoints.relative(torch_logits(merged), logits) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_reads_the_adapters_of_every_family(name, tmp_path):
  """Default targets: dense layers, shared experts, experts, recurrences."""
  source = checkpoints.GOLDEN / name
  base = AutoModel.from_pretrained(source, dtype="float32")
  adapted = widen(lora.apply(base, lora.LoraConfig(rank=3, alpha=6.0)))
  logits = adapted(TOKENS)[0]
  assert checkpoints.relative(base(TOKENS)[0], logits) > 0.05
  lora.save_adapter(adapted, tmp_path)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    source, dtype=torch.float32, attn_implementation="eager"
  )
  theirs = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
  assert checkpoints.relative(torch_logits(theirs), logits) < 2 * TOLERANCE


@pytest.mark.parametrize("name", THEIRS)
def test_we_read_what_peft_writes(name, tmp_path):
  torch.manual_seed(0)
  config = peft.LoraConfig(
    target_modules=list(TARGETS),
    lora_dropout=0.1,
    task_type="CAUSAL_LM",
    **{"r": 3, "lora_alpha": 6.0} | THEIRS[name],
  )
  theirs = peft.get_peft_model(their_base(), config)
  with torch.no_grad():
    for key, value in theirs.named_parameters():
      if "lora_" in key:
        value.add_(0.2 * torch.rand_like(value))
  theirs.save_pretrained(tmp_path / "adapter")
  logits = torch_logits(theirs)
  base = AutoModel.from_pretrained(SOURCE)
  ours = lora.load_adapter(base, tmp_path / "adapter")
  assert checkpoints.relative(ours(TOKENS)[0], logits) < TOLERANCE
  assert checkpoints.relative(base(TOKENS)[0], logits) > 0.05
  assert {m.lora_dropout for m in lora_modules.adapted(ours).values()} == {0.1}
  single = lora.load_adapter(base.unstack(), tmp_path / "adapter")
  assert checkpoints.relative(single(TOKENS)[0], logits) < TOLERANCE

  lora.save_adapter(ours, tmp_path / "again")
  again = peft.PeftModel.from_pretrained(their_base(), tmp_path / "again")
  assert checkpoints.relative(torch_logits(again), logits) < TOLERANCE


def test_dora_s_gradient_is_peft_s(tmp_path):
  """One step of plain gradient descent on the same loss ends at the same logits."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  config = lora.LoraConfig(rank=3, alpha=6.0, targets=TARGETS, use_dora=True)
  adapted = widen(lora.apply(AutoModel.from_pretrained(SOURCE), config))
  lora.save_adapter(adapted, tmp_path / "adapter")
  theirs = peft.PeftModel.from_pretrained(
    their_base(), tmp_path / "adapter", is_trainable=True
  )
  out = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits
  (out**2).mean().backward()
  graph, params, rest = nnx.split(adapted, nnx.LoRAParam, ...)

  def loss(params):
    return jnp.mean(nnx.merge(graph, params, rest)(TOKENS)[0] ** 2)

  ours = nnx.merge(graph, jax.jit(jax.grad(loss))(params), rest)
  layer = theirs.base_model.model.model.layers[1].self_attn.q_proj
  want = {
    "lora_a": layer.lora_A["default"].weight.grad.T,
    "lora_b": layer.lora_B["default"].weight.grad.T,
    "lora_magnitude": layer.lora_magnitude_vector["default"].weight.grad,
  }
  for name, value in want.items():
    got = getattr(ours.layers.attn.q_proj, name)[...][1]
    assert checkpoints.relative(got, np.asarray(value)) < 1e-4, name


@pytest.mark.parametrize("name", ["llama3p1", "llama3p2_tied"])
def test_rows_of_new_tokens_go_both_ways(name, tmp_path):
  source = checkpoints.GOLDEN / name
  base = AutoModel.from_pretrained(source)
  size = base.config.vocab_size
  ids = (5, size, size + 1)
  tokens = np.where(TOKENS % 3 == 0, np.array([*ids] * 8), TOKENS)
  config = lora.LoraConfig(rank=3, targets=TARGETS, trainable_token_indices=ids)
  adapted = widen(lora.apply(new_tokens.with_rows(base, ids[1:]), config))
  logits = adapted(tokens)[0]
  lora.save_adapter(adapted, tmp_path / "adapter")
  theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
  theirs.resize_token_embeddings(size + 2)
  theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")

  def their_logits(model):
    with torch.no_grad():
      return model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()

  assert checkpoints.relative(their_logits(theirs), logits) < TOLERANCE
  theirs.save_pretrained(tmp_path / "again", save_embedding_layers=False)
  again = lora.load_adapter(base, tmp_path / "again")
  assert checkpoints.relative(again(tokens)[0], logits) < TOLERANCE
  save_pretrained(adapted, tmp_path / "merged")
  merged = their_logits(read_back(tmp_path / "merged"))
  assert checkpoints.relative(merged, logits) < TOLERANCE


def test_a_head_of_scores_and_other_whole_modules_go_both_ways(tmp_path):
  base = AutoModel.from_pretrained(SOURCE, num_scores=2)
  config = lora.LoraConfig(
    rank=3, targets=TARGETS, modules_to_save=("score", "embed_tokens", "k_norm")
  )
  adapted = widen(lora.apply(base, config))
  lora.save_adapter(adapted, tmp_path / "adapter")
  theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
    SOURCE, num_labels=2
  )
  theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
  scores = adapted(TOKENS)[0][:, -1]
  assert checkpoints.relative(torch_logits(theirs), scores) < TOLERANCE
  theirs.save_pretrained(tmp_path / "again")
  again = lora.load_adapter(base, tmp_path / "again")
  assert checkpoints.relative(again(TOKENS)[0][:, -1], scores) < TOLERANCE


@pytest.mark.parametrize("name", ["phi3", "glm4_moe_lite"])
def test_peft_reads_adapters_of_other_projections(name, tmp_path):
  base = AutoModel.from_pretrained(checkpoints.GOLDEN / name)
  targets = ("qkv_proj", "gate_up_proj", "o_proj")
  if name == "glm4_moe_lite":
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
  adapted = widen(lora.apply(base, lora.LoraConfig(rank=3, targets=targets)))
  logits = adapted(TOKENS)[0]
  assert checkpoints.relative(base(TOKENS)[0], logits) > 0.05
  lora.save_adapter(adapted, tmp_path / "adapter")
  theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.GOLDEN / name)
  theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
  assert checkpoints.relative(torch_logits(theirs), logits) < TOLERANCE
  save_pretrained(adapted, tmp_path / "merged")
  merged = read_back(tmp_path / "merged")
  assert checkpoints.relative(torch_logits(merged), logits) < TOLERANCE
