"""An agent of several turns: a small model learns to find a number by asking.

    python examples/agent.py --output out

The environment hides a digit. The model names a digit and reads "+" (the hidden one is
greater) or "-" (it is less), for at most four turns. The reward is 1 if it finds the
digit. A model that guesses finds it in less than half of the episodes; one that halves
the range always finds it.

    ?5-2+3     the model drew 5, 2 and 3, and the hidden digit is 3

What the model draws is trained; what the environment writes is read and not trained. An
environment is a class with two methods. `tunix train --job=grpo --env=agent.py:Guess`
trains a model of yours in it, see docs/guides/agents.md.
"""

import argparse
import pathlib

import numpy as np
import optax

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
  Samples,
  StepResult,
)
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig

PROMPTS, GROUP = 16, 8  # hidden digits in a batch, and episodes of each
TURNS = 4


class Characters:
  """A tokenizer whose tokens are characters."""

  letters = "^$?+-0123456789"  # "^" is BOS, "$" is EOS

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


class Guess:
  """The environment of one episode.

  Args:
    hidden: the digit, from the column of the data with this name.
  """

  def __init__(self, hidden: int):
    self.hidden = hidden

  def initial_observation(self):
    return "?"

  def step(self, action):
    guess = int(action.text) if action.text.isdigit() else -1
    found = guess == self.hidden
    return StepResult(
      reward=float(found),
      episode_done=found or guess < 0,
      next_observation="+" if guess < self.hidden else "-",
      metrics={"found": found, "no_digit": guess < 0},
    )


def batches(count, seed):
  """Yields batches: a prompt, which this environment does not read, and the digit."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    hidden = rng.integers(0, 10, PROMPTS)
    yield {"prompts": ["?"] * PROMPTS, "hidden": hidden.tolist()}


def new_learner(steps, output):
  model = AutoModel.from_config(
    ModelConfig(
      num_layers=2,
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
          optax.clip_by_global_norm(1.0), optax.adam(3e-3, b2=0.95)
        ),
        max_steps=steps,
        metrics_logging_options=MetricsLoggerOptions(output / "logs"),
        pbar_description=None,
      ),
      rollout_config=RolloutConfig(max_prompt_length=2, max_tokens_to_generate=1),
    ),
  )
  return GRPOLearner(
    cluster,
    GRPOConfig(num_generations=GROUP, beta=0.0),
    env=Guess,
    # Four digits and the three answers between them.
    episodes=EpisodeConfig(max_turns=TURNS, max_tokens=2 * TURNS - 1),
  ).with_samples(Samples(output / "samples", every_n_rollouts=20))


def main():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--output", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=150)
  args = parser.parse_args()
  learner = new_learner(args.steps, args.output)
  learner.train(batches(args.steps, seed=0))
  logger = learner.rl_cluster.logger
  found = logger.get_metric_history("", "rewards/score/mean", Mode.TRAIN)
  learner.close()
  first, last = np.mean(found[:5]), np.mean(found[-5:])
  print(f"found in {first:.2f} -> {last:.2f} of the episodes")
  print(f"conversations are in {args.output / 'samples' / 'index.html'}")


if __name__ == "__main__":
  main()
