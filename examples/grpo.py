"""GRPO with tunix.rl: a small model learns to put digits in order.

    python examples/grpo.py --output out

The same task as examples/rl_loop.py, with what a real run needs: evaluation on prompts
that are never trained on, checkpoints (the same command again goes on where it was
stopped), metrics, and a page of samples. To train a model of yours, load it with
AutoModel.from_pretrained(folder) and its tokenizer; `tunix train --job=grpo` does all
of this from a file.
"""

import argparse
import dataclasses
import pathlib

import numpy as np
import optax
from rl_loop import Characters, new_model

from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.samples import Samples
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import MetricsLoggerOptions, Mode

PROMPTS = 32  # of a batch of rollouts


def places(prompts, completions, right):
  """The share of places with the right digit; `right` is a column of the data."""
  del prompts
  return [
    sum(a == b for a, b in zip(text, wanted)) / len(wanted)
    if len(text) == len(wanted)
    else 0.0
    for text, wanted in zip(completions, right)
  ]


def batches(count, seed):
  """Batches of prompts with the column that the reward reads."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    digits = [f"{a}{b}" for a, b in rng.integers(0, 10, (PROMPTS, 2))]
    right = ["".join(sorted(text)) for text in digits]
    yield {"prompts": [f"{text}=" for text in digits], "right": right}


def cluster(steps, output, **models):
  """The policy, other models by role, and how all of them are run."""
  sampling = RolloutConfig(max_prompt_length=4, max_tokens_to_generate=3)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))
  return RLCluster(
    actor=models.pop("actor", None) or new_model(seed=0),
    **models,
    tokenizer=Characters(),
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optimizer,
        critic_optimizer=optimizer if "critic" in models else None,
        max_steps=steps,
        eval_every_n_steps=40,
        checkpoint_root_directory=str(output / "checkpoints"),
        checkpointing_options=CheckpointOptions(save_every_n_steps=40),
        metrics_logging_options=MetricsLoggerOptions(output / "logs"),
        pbar_description=None,
      ),
      rollout_config={
        Mode.TRAIN: sampling,
        Mode.EVAL: dataclasses.replace(sampling, temperature=0.0),
      },
    ),
  )


def run(learner, steps, output):
  """Trains, and tells what was learnt; returns greedy accuracy before and after."""
  learner.with_samples(Samples(output / "samples", every_n_rollouts=20))
  learner.train(batches(steps, seed=0), list(batches(2, seed=1)))
  logger = learner.rl_cluster.logger
  accuracy = logger.get_metric_history("", "pass@1", Mode.EVAL)
  learner.close()
  print(f"greedy accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}")
  print(f"look at {output / 'samples' / 'index.html'}")
  return accuracy[0], accuracy[-1]


def arguments():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--output", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=200)
  return parser.parse_args()


def main():
  args = arguments()
  algorithm = GRPOConfig(num_generations=8, beta=0.0, pass_threshold=1.0)
  learner = GRPOLearner(cluster(args.steps, args.output), algorithm, places)
  run(learner, args.steps, args.output)


if __name__ == "__main__":
  main()
