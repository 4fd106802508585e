"""Small clusters, rewards and prompts for the tests of RL."""

import dataclasses
from typing import Any

import numpy as np
from flax import nnx

from tests import optimizers, toys
from tests.generate.toy_ids import Ids
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.utils import create_critic_model

EOS = 1
# Templates of SDPO without words that are no ids.
HINTS: dict[str, Any] = {
  "template": "{prompt} {hints}",
  "solution_template": "{solution}",
  "feedback_template": "{feedback}",
}


class Words(Ids):
  """Ids as words, with an end-of-sequence token."""

  def eos_id(self):
    return EOS


def even(prompts, completions, **columns) -> list[float]:
  """Share of even ids."""
  del prompts, columns
  rows = [[int(word) for word in text.split()] for text in completions]
  return [float(np.mean([i % 2 == 0 for i in row] or [0])) for row in rows]


def prompts(count: int, size: int = 4, seed: int = 0) -> list[dict[str, Any]]:
  """`count` batches of `size` prompts of 1 to 8 tokens, with a column."""
  rng = np.random.default_rng(seed)

  def prompt():
    return " ".join(map(str, rng.integers(2, toys.VOCAB, rng.integers(1, 9))))

  return [
    {"prompts": [prompt() for _ in range(size)], "number": list(range(size))}
    for _ in range(count)
  ]


def config(rollout: dict[str, Any] | None = None, **training: Any) -> ClusterConfig:
  """A cluster of SGD-free Adam at 1e-3, completions of 6 tokens."""
  own = {
    name: training.pop(name)
    for name in ("role_to_mesh", "rollout_engine", "offload_to_cpu")
    if name in training
  }
  settings = {"actor_optimizer": optimizers.adam(1e-3), "pbar_description": None}
  sampling = {"max_tokens_to_generate": 6, "max_prompt_length": 8}
  return ClusterConfig(
    training_config=RLTrainingConfig(**{**settings, **training}),
    rollout_config=RolloutConfig(**{**sampling, **(rollout or {})}),
    **own,
  )


def model(seed: int = 0, **changes: Any) -> nnx.Module:
  """The smallest of toys: compiling is what these tests cost."""
  return toys.model(seed=seed, num_layers=1, **changes)


def cluster(
  actor: nnx.Module | None = None, *, critic: bool = False, **options: Any
) -> RLCluster:
  """A cluster on a toy model; models by role, and what `config` takes."""
  actor = model() if actor is None else actor
  models = {k: options.pop(k) for k in ("reference", "reward") if k in options}
  if critic:
    models["critic"] = create_critic_model(actor, seed=1)
    options.setdefault("critic_optimizer", optimizers.adam(1e-3))
  return RLCluster(
    actor=actor, tokenizer=Words(), cluster_config=config(**options), **models
  )


def grpo(
  algorithm: dict[str, Any] | None = None, *, learner: Any = None, **options: Any
) -> GRPOLearner:
  """A GRPO learner without a reference, 4 completions a prompt."""
  settings = GRPOConfig(**{"num_generations": 4, "beta": 0.0, **(algorithm or {})})
  more = {
    k: options.pop(k) for k in ("data_shuffle_seed", "metric_fns") if k in options
  }
  rewards = options.pop("reward_fns", even)
  return (learner or GRPOLearner)(cluster(**options), settings, rewards, **more)


def stamped(cluster: RLCluster, age: int) -> None:
  """Makes rollouts carry versions, as if weights `age` updates ago had drawn them."""
  engine: Any = cluster.rollout
  generate = engine.generate

  def old(*args: Any, **options: Any) -> RolloutOutput:
    out = generate(*args, **options).with_versions()
    return dataclasses.replace(
      out, versions=[np.maximum(row - age, 0) for row in out.versions]
    )

  engine.generate = old
