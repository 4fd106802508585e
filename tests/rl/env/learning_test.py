"""A tiny model learns to ask a calculator and to answer with its result."""

import numpy as np
import optax
import pytest

from tests import optimizers
from tunix import (
  ClusterConfig,
  EpisodeConfig,
  GRPOConfig,
  GRPOLearner,
  MetricsLoggerOptions,
  Mode,
  RLCluster,
  RLTrainingConfig,
  RolloutConfig,
  StepResult,
)
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.rl.env.tools.calculator import calculate

STEPS, PROMPTS, GROUP = 40, 8, 8


class Characters:
  """A tokenizer whose tokens are characters."""

  letters = "^$+?0123456789"  # "^" is BOS, "$" is EOS

  def encode(self, text, **_):
    return [self.letters.index(c) if c in self.letters else 0 for c in text]

  def decode(self, ids, **_):
    return "".join(self.letters[int(i)] for i in ids)

  def bos_id(self):
    return 0

  def eos_id(self):
    return 1

  def pad_id(self):
    return 1


class Sum:
  """Asks for a sum below 10. "?" is a call of the calculator, a digit is the answer."""

  def __init__(self, prompt):
    self._prompt = prompt

  def initial_observation(self):
    return self._prompt

  def step(self, action):
    result = calculate(self._prompt)
    if action.text == "?":
      return StepResult(reward=0.0, episode_done=False, next_observation=result)
    return StepResult(reward=float(action.text == result), episode_done=True)


def sums(count):
  rng = np.random.default_rng(0)
  for _ in range(count):
    first = rng.integers(0, 10, PROMPTS)
    second = [int(rng.integers(0, 10 - a)) for a in first]
    yield {"prompts": [f"{a}+{b}" for a, b in zip(first, second)]}


@pytest.mark.slow
@pytest.mark.ci
def test_a_model_learns_to_use_a_calculator(tmp_path):
  model = AutoModel.from_config(
    ModelConfig(
      num_layers=1,
      vocab_size=len(Characters.letters),
      embed_dim=64,
      hidden_dim=128,
      num_heads=4,
      num_kv_heads=4,
      head_dim=16,
      tie_embeddings=True,
    ),
    seed=0,
  )
  cluster = RLCluster(
    actor=model,
    tokenizer=Characters(),
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optax.chain(
          optax.clip_by_global_norm(1.0), optimizers.adam(5e-3, b2=0.95)
        ),
        max_steps=STEPS,
        metrics_logging_options=MetricsLoggerOptions(tmp_path),
        pbar_description=None,
      ),
      rollout_config=RolloutConfig(max_prompt_length=4, max_tokens_to_generate=1),
    ),
  )
  learner = GRPOLearner(
    cluster,
    GRPOConfig(num_generations=GROUP, beta=0.0),
    env=Sum,
    episodes=EpisodeConfig(max_turns=3, max_tokens=8),
  )
  learner.train(sums(STEPS))
  rewards = cluster.logger.get_metric_history("", "rewards/score/mean", Mode.TRAIN)
  turns = cluster.logger.get_metric_history("", "episodes/turns", Mode.TRAIN)
  learner.close()
  first, last = float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))
  # A guess is right in a tenth of the episodes. With this seed 0.14 becomes 0.7.
  assert first < 0.3 and last > 0.55, rewards[::5]
  assert turns[0] < 1.3 and turns[-1] > 1.6  # it calls the calculator
