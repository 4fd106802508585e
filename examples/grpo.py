"""GRPO with tunix.rl: a small model learns to sort digits.

    python examples/grpo.py --output out

The task of examples/rl_loop.py with the parts of a real run: evaluation on held-out
prompts, checkpoints (the same command resumes an interrupted run), metrics, and a page
of samples. To train a model of yours, load it with AutoModel.from_pretrained(folder)
and its tokenizer. `tunix train --job=grpo` trains on files.
"""

import argparse
import dataclasses
import pathlib

import numpy as np
import optax
from rl_loop import Characters, new_model

from tunix import (
  CheckpointOptions,
  ClusterConfig,
  GRPOConfig,
  GRPOLearner,
  MetricsLoggerOptions,
  Mode,
  RLCluster,
  RLTrainingConfig,
  RolloutConfig,
  Samples,
)

PROMPTS = 32  # in a batch of rollouts


def places(prompts, completions, right):
  """Returns the share of right digits; `right` is a column of the data."""
  del prompts
  return [
    sum(a == b for a, b in zip(text, answer)) / len(answer)
    if len(text) == len(answer)
    else 0.0
    for text, answer in zip(completions, right)
  ]


def batches(count, seed):
  """Yields batches of prompts with the column that the reward function reads."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    digits = [f"{a}{b}" for a, b in rng.integers(0, 10, (PROMPTS, 2))]
    right = ["".join(sorted(text)) for text in digits]
    yield {"prompts": [f"{text}=" for text in digits], "right": right}


def cluster(steps, output, **models):
  """Returns a cluster of the policy and further models by role."""
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
  """Trains; returns the greedy accuracy on held-out prompts before and after."""
  learner.with_samples(Samples(output / "samples", every_n_rollouts=20))
  learner.train(batches(steps, seed=0), list(batches(2, seed=1)))
  logger = learner.rl_cluster.logger
  accuracy = logger.get_metric_history("", "pass@1", Mode.EVAL)
  learner.close()
  print(f"greedy accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}")
  print(f"samples are in {output / 'samples' / 'index.html'}")
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
