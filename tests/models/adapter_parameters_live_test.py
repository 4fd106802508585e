"""Adapters of gpt-oss' experts: PEFT and we compute the same with one folder.

Runs where the `parity` extra is installed.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tests.models.parity_live_test import TOKENS, TOLERANCE, torch_logits, widen
from tunix.models import lora
from tunix.models.automodel import AutoModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SOURCE = checkpoints.GOLDEN / "gpt_oss"
EXPERTS = ("gate_up_proj", "down_proj")
TARGETS = [EXPERTS, EXPERTS[:1], EXPERTS[1:]]


def their_base():
  return transformers.AutoModelForCausalLM.from_pretrained(SOURCE)


@pytest.mark.parametrize("experts", TARGETS, ids="+".join)
@pytest.mark.parametrize("stacked", [True, False])
def test_peft_reads_what_we_write(experts, stacked, tmp_path):
  base = AutoModel.from_pretrained(SOURCE)
  base = base if stacked else base.unstack()
  config = lora.LoraConfig(rank=3, alpha=6.0, targets=("q_proj", *experts))
  adapted = widen(lora.apply(base, config), nnx.LoRAParam)
  lora.save_adapter(adapted, tmp_path / "adapter")
  theirs = peft.PeftModel.from_pretrained(their_base(), tmp_path / "adapter")
  logits = adapted(TOKENS)[0]
  assert checkpoints.relative(torch_logits(theirs), logits) < TOLERANCE
  assert checkpoints.relative(base(TOKENS)[0], logits) > 0.05
  again = lora.load_adapter(base, tmp_path / "adapter")
  np.testing.assert_allclose(again(TOKENS)[0], logits, atol=1e-5)


@pytest.mark.parametrize("experts", TARGETS, ids="+".join)
def test_we_read_what_peft_writes(experts, tmp_path):
  torch.manual_seed(0)
  names = [f"mlp.experts.{name}" for name in experts]
  config = peft.LoraConfig(
    r=2,
    lora_alpha=8.0,
    target_modules=["v_proj"],
    target_parameters=names,
    rank_pattern={"layers.1.mlp.experts.down_proj": 3},
    task_type="CAUSAL_LM",
  )
  theirs = peft.get_peft_model(their_base(), config)
  with torch.no_grad():
    for key, value in theirs.named_parameters():
      if "lora_" in key:
        value.add_(0.2 * torch.rand_like(value))
  theirs.save_pretrained(tmp_path / "adapter")
  ours = lora.load_adapter(AutoModel.from_pretrained(SOURCE), tmp_path / "adapter")
  assert checkpoints.relative(ours(TOKENS)[0], torch_logits(theirs)) < TOLERANCE


def test_what_peft_has_not_is_refused(tmp_path):
  config = lora.LoraConfig(rank=2, dropout=0.1, targets=("down_proj",))
  adapted = lora.apply(AutoModel.from_pretrained(SOURCE, dtype=jnp.float32), config)
  with pytest.raises(ValueError, match=r"down_proj has dropout; PEFT has no dropout"):
    lora.save_adapter(adapted, tmp_path / "adapter")
