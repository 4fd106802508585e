"""gpt-oss: its configuration, its gate, and its layers on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models import families, lora, tiny
from tunix.models.automodel import AutoModel
from tunix.models.files import stored_formats
from tunix.models.gpt_oss.model import ModelConfig
from tunix.models.gpt_oss.params import config_from_hf, config_to_hf
from tunix.models.transformer.config import ClampedGate
from tunix.sft.losses import next_token_loss
from tunix.utils import mesh as mesh_lib, tree

PUBLISHED = {
  "model_type": "gpt_oss",
  "num_hidden_layers": 24,
  "num_local_experts": 32,
  "hidden_size": 2880,
  "intermediate_size": 2880,
  "vocab_size": 201_088,
  "num_attention_heads": 64,
  "num_key_value_heads": 8,
  "head_dim": 64,
  "num_experts_per_tok": 4,
  "sliding_window": 128,
  "rope_theta": 150_000,
  "rope_scaling": {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
  },
  "router_aux_loss_coef": 0.9,
  "swiglu_limit": 7.0,
}


def test_the_published_config_is_the_preset():
  published = stored_formats.plain(
    PUBLISHED | {"quantization_config": {"quant_method": "mxfp4"}}
  )
  assert config_from_hf(published) == ModelConfig.gpt_oss_20b()
  absent = {"num_hidden_layers": 24, "num_local_experts": 32}
  assert config_from_hf(absent) == ModelConfig.gpt_oss_20b()
  assert config_from_hf({}) == ModelConfig.gpt_oss_120b()


def test_the_balance_loss_is_used_as_in_transformers():
  config = config_from_hf(PUBLISHED | {"output_router_logits": True})
  assert config.moe is not None and config.moe.balance_weight == 0.9
  assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
    ({"num_local_experts": 0}, "num_local_experts is 0"),
  ],
)
def test_other_settings_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    config_from_hf(PUBLISHED | fields)


def test_the_gate_by_hand():
  # g = 2 with sigmoid(1 * 2), and u = -3 clipped to -2: (-2 + 1) * 2 sigmoid(2). A gate
  # of 5 is clamped to 2, and one of -5 is not clamped.
  gate = ClampedGate(alpha=1.0, limit=2.0)
  got = gate(jnp.array([2.0, 5.0, -5.0]), jnp.array([-3.0, 0.0, 9.0]))
  by = lambda x: x / (1 + np.exp(-x))
  np.testing.assert_allclose(got, [-by(2.0), by(2.0), 3 * by(-5.0)], rtol=1e-6)


def loss_and_gradients(model):
  batch = toys.batch(0, rows=8, length=16)
  fields = {x: batch[x] for x in ("input_tokens", "input_mask", "segment_ids")}
  graph, state = nnx.split(model)
  loss = lambda state: next_token_loss(nnx.merge(graph, state), **fields).mean()
  value, gradient = jax.jit(jax.value_and_grad(loss))(state)
  return value, tree.flatten(gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
  "axes",
  [
    pytest.param({"fsdp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.ci),
    {"fsdp": 2, "cp": 4},
    {"tp": 8},
  ],
  ids=str,
)
def test_eight_devices_equal_one(axes):
  config = tiny.shrink(ModelConfig.gpt_oss_20b(), toys.VOCAB)
  value, gradients = loss_and_gradients(AutoModel.from_config(config))
  mesh = mesh_lib.create_mesh(axes)
  model = AutoModel.from_config(config, mesh)
  with jax.set_mesh(mesh):
    got, ours = loss_and_gradients(model)
  np.testing.assert_allclose(got, value, rtol=1e-5)
  for path, want in gradients.items():
    error = np.linalg.norm(ours[path] - want) / max(np.linalg.norm(want), 1e-6)
    assert error < 1e-4, (path, error)


def test_adapters_by_default_are_on_attention_and_experts():
  config = tiny.shrink(ModelConfig.gpt_oss_20b(), toys.VOCAB)
  adapted = lora.apply(AutoModel.from_config(config), lora.LoraConfig(rank=2))
  names = set(lora.config_of(adapted).targets)
  assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}


def test_a_preset_is_named_by_the_hub():
  assert families.preset("gpt_oss_20b")[0].name == "gpt_oss"
  folder = checkpoints.GOLDEN / "gpt_oss"
  model = AutoModel.from_pretrained(folder)
  assert model.config.attention_sinks and model.config.moe.fused_gate
