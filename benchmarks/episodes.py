"""The cost of episodes of one turn, by python -m benchmarks.episodes.

Both draw the same tokens of the same prompts, in interleaved passes of one process. The
figures are CPU seconds of the rollouts alone.
"""

import argparse
import statistics
import time

import jax
import numpy as np
import optax

from tunix.examples.quickstart.task import make_tokenizer
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig
from tunix.models.transformer.config import RopeConfig
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.env import StepResult
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.pipeline import prompt_batch
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig


class Once:
  """One action, whose reward is its length."""

  def __init__(self, prompt):
    self._prompt = list(prompt)

  def initial_observation(self):
    return self._prompt

  def step(self, action):
    return StepResult(reward=float(len(action)), episode_done=True)


def _length(prompts, completions):
  del prompts
  return [float(len(text)) for text in completions]


def _learner(options: argparse.Namespace, **more) -> GRPOLearner:
  tokenizer = make_tokenizer()
  sizes = {"num_layers": 4, "embed_dim": options.width, "hidden_dim": 3 * options.width}
  heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
  config = ModelConfig(
    vocab_size=tokenizer.vocab_size, rope=RopeConfig(theta=1e6), **sizes, **heads
  )
  cluster = RLCluster(
    actor=AutoModel.from_config(config, seed=0),
    tokenizer=tokenizer,
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optax.adam(1e-5), pbar_description=None
      ),
      rollout_config=RolloutConfig(
        max_prompt_length=options.prompt, max_tokens_to_generate=options.tokens
      ),
    ),
  )
  return GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.0), **more)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--prompts", type=int, default=8, help="each with 8 completions")
  parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
  parser.add_argument("--tokens", type=int, default=64, help="most of a completion")
  parser.add_argument("--width", type=int, default=512, help="of the model")
  parser.add_argument("--passes", type=int, default=7)
  options = parser.parse_args()
  limits = EpisodeConfig(max_turns=1, max_tokens=options.tokens)
  learners = {
    "completions": _learner(options, reward_fns=_length),
    "episodes": _learner(options, env=Once, episodes=limits),
  }
  dice = np.random.default_rng(0)
  rows = [dice.integers(4, 14, options.prompt).tolist() for _ in range(options.prompts)]
  batch = prompt_batch({"prompts": rows})
  seconds: dict[str, list[float]] = {name: [] for name in learners}
  drawn = {}
  for number in range(options.passes + 1):
    for name, learner in learners.items():
      start = time.process_time()
      rollouts = jax.block_until_ready(learner._rollouts(batch))
      if number:  # the first pass compiles
        seconds[name].append(time.process_time() - start)
      drawn[name] = rollouts.completion_ids
  assert (drawn["completions"] == drawn["episodes"]).all()
  for name, values in seconds.items():
    print(f"{name}: {statistics.median(values):.3f} CPU s")
  pairs = zip(seconds["episodes"], seconds["completions"])
  ratios = sorted(a / b for a, b in pairs)
  print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
  main()
