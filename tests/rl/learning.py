"""Every algorithm on sums that the model half knows: python -m tests.rl.learning NAME.

The task, the model and its fine-tuning are the quickstart's; the reward is 1 for the
right sum in brackets, else 0.
"""

import json
import pathlib
import sys
import tempfile
import time

import numpy as np
import optax

from tunix.cli.quickstart import task, train
from tunix.cli.quickstart.data import build_data, make_tokenizer
from tunix.cli.quickstart.settings import Settings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig, DrGRPOLearner
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.grpo.rloo_learner import RLOOConfig, RLOOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.utils import create_critic_model

PROMPTS, GENERATIONS, STEPS = 16, 8, 150
_GROUP = {"num_generations": GENERATIONS, "beta": 0.0}
_SEQUENCES = {"loss_agg_mode": "sequence-mean-token-mean"}

# name -> (learner, settings, learning rate)
ALGORITHMS = {
  "grpo": (GRPOLearner, GRPOConfig(**_GROUP), 3e-4),
  "gspo": (GRPOLearner, GRPOConfig(loss_algo="gspo", **_SEQUENCES, **_GROUP), 3e-4),
  "cispo": (
    GRPOLearner,
    GRPOConfig(loss_algo="cispo", epsilon=1.0, epsilon_high=4.0, **_GROUP),
    3e-4,
  ),
  "drgrpo": (DrGRPOLearner, DrGRPOConfig(**_GROUP), 3e-4),
  "dapo": (DAPOLearner, DAPOConfig(**_GROUP), 3e-4),
  "rloo": (RLOOLearner, RLOOConfig(**_GROUP), 3e-4),
  "ppo": (PPOLearner, PPOConfig(num_generations=GENERATIONS, beta=0.0), 3e-4),
}


def half_taught(folder: pathlib.Path) -> pathlib.Path:
  """A model that has about half of the sums right, fine-tuned into `folder`."""
  settings = Settings(output=folder, sft_steps=120)
  data = build_data(settings.data, seed=0, held_out=settings.held_out)
  train.write_model(settings, make_tokenizer())
  train.train(settings, data, "sft")
  return settings.export("sft")


def rewards(name: str, model: pathlib.Path, steps: int = STEPS, seed: int = 0):
  """Mean reward of the rollouts of every step."""
  learner, config, rate = ALGORITHMS[name]
  actor = AutoModel.from_pretrained(model)
  critic = name == "ppo"
  cluster = RLCluster(
    actor=actor,
    critic=create_critic_model(actor) if critic else None,
    tokenizer=TokenizerAdapter.from_pretrained(model),
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optax.adam(rate),
        critic_optimizer=optax.adam(1e-3) if critic else None,
        max_steps=steps,
        pbar_description=None,
      ),
      rollout_config=RolloutConfig(
        max_prompt_length=8, max_tokens_to_generate=6, seed=seed
      ),
    ),
  )
  records, _ = task.problems(seed, 200)
  order = np.random.default_rng(seed)

  def batches():
    while True:
      picked = order.choice(len(records), PROMPTS, replace=False)
      yield {
        "prompts": [records[i]["prompt"] for i in picked],
        "response": [records[i]["response"] for i in picked],
      }

  curve = []

  def reward(prompts, completions, response):
    del prompts
    found = [float(text == right) for text, right in zip(completions, response)]
    curve.append(float(np.mean(found)))
    return found

  learner(cluster, config, reward).train(batches())
  return curve


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    model = half_taught(pathlib.Path(folder))
    for name in sys.argv[1:] or ALGORITHMS:
      start = time.process_time()
      curve = rewards(name, model)
      spent = round(time.process_time() - start)
      marks = [
        round(float(np.mean(curve[i - 10 : i])), 3)
        for i in (10, 50, 100, 150)
        if i <= len(curve)
      ]
      print(
        json.dumps({"algorithm": name, "cpu_s": spent, "mean_of_10": marks}), flush=True
      )


if __name__ == "__main__":
  main()
