"""New families, tiny: whole and QLoRA fine-tuning, preferences and GRPO run and learn.

Packed rows, and rows that share a prompt, give what the same rows give alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.models import checkpoints
from tests.rl import clusters
from tests.sft import trainers
from tests.sft.dpo import preferences
from tunix.models import families, lora, quantization, tiny
from tunix.models.automodel import AutoModel
from tunix.models.transformer.dense.layers import FrozenParam
from tunix.models.transformer.shared_prompt import SharedPrompt
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

# CI runs these; the others are slow.
IN_CI = ("gpt_oss_20b", "qwen3p5_0p8b", "gemma4_e2b", "nemotron_nano_9b_v2")
SLOW = (
  "deepseek_v3_671b",
  "gemma2_2b",
  "gemma3_1b",
  "gemma4_26b_a4b",
  "glm4p7_flash",
  "granite3p3_2b",
  "granite4_1b",
  "llama3p2_1b",
  "ministral3_3b",
  "mistral_7b_v0p3",
  "olmo2_1b",
  "olmo3_7b",
  "phi4_mini_3p8b",
  "qwen2p5_0p5b",
  "qwen3_30b_a3b",
  "qwen3p5_35b_a3b",
  "smollm3_3b",
)
PRESETS = (*IN_CI, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


@pytest.fixture(params=PRESETS)
def model(request):
  return make(request.param)


def make(preset, seed=0):
  config = tiny.shrink(families.preset(preset)[1](), toys.VOCAB)
  return AutoModel.from_config(config, seed=seed, dtype=jnp.float32)


def changed(before, after):
  return [name for name in before if not np.array_equal(before[name], after[name])]


def test_whole_and_quantized_fine_tuning(model):
  before = trainers.leaves(model, nnx.Param)
  trainer = trainers.trainer(model, optimizers.adam(1e-2))
  trainer.train([toys.batch(0, rows=2, length=8)] * 3)
  losses = trainers.history(trainer, "loss")
  assert losses[-1] < losses[0]
  after = trainers.leaves(trainer.model, nnx.Param)
  frozen = trainers.leaves(model, FrozenParam)
  assert set(changed(before, after)) == set(before) - set(frozen)
  small = lora.apply(quantization.quantize(model, "nf4"), lora.LoraConfig(rank=2))
  trainer = trainers.trainer(small, optimizers.adam(1e-2))
  trainer.train([toys.batch(0, rows=2, length=8)] * 3)
  losses = trainers.history(trainer, "loss")
  assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
  "preset",
  [
    *(pytest.param(name, marks=pytest.mark.ci) for name in IN_CI[:2]),
    *IN_CI[2:],
    *SLOW,
  ],
)
def test_preferences_and_grpo(preset):
  trainer = preferences.trainer(make(preset), make(preset))
  trainer.train([preferences.pairs()] * 2)
  assert np.isfinite(trainers.history(trainer, "loss")).all()
  policy = make(preset)
  before = trainers.leaves(policy, nnx.Param)
  cluster = clusters.cluster(policy)
  config = GRPOConfig(num_generations=2, beta=0.0)
  GRPOLearner(cluster, config, clusters.even).train(clusters.prompts(1, size=2))
  after = trainers.leaves(cluster.actor_trainer.model, nnx.Param)
  assert changed(before, after)


def test_rows_that_share_a_packed_row_or_a_prompt(model):
  rng = np.random.default_rng(0)
  first, second = (rng.integers(1, toys.VOCAB, (1, n)) for n in (9, 7))
  packed = np.concatenate([first, second], axis=1)
  segments = np.array([[1] * 9 + [2] * 7])
  run = jax.jit(lambda tokens, **options: model(tokens, **options)[0])
  got = run(packed, segment_ids=segments)
  want = np.concatenate([run(first), run(second)], axis=1)
  assert checkpoints.relative(got, want) < 1e-5
  # A prompt of 5 tokens with two completions of 3.
  prompt, ends = packed[:, :5], (packed[:, 5:8], packed[:, 8:11])
  shared = np.concatenate([prompt, *ends], axis=1)
  layout = SharedPrompt(prompt=5, copies=2)
  got = jax.jit(lambda tokens: model(tokens, shared_prompt=layout)[0])(shared)
  for number, end in enumerate(ends):
    alone = run(np.concatenate([prompt, end], axis=1))[:, 5:]
    part = got[:, 5 + 3 * number : 8 + 3 * number]
    assert checkpoints.relative(part, alone) < 1e-5
