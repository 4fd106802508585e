"""A curriculum against all prompts alike: python -m tests.rl.curriculum_learning.

A quarter of the prompts are sums that the model half knows. The others have answers
that no completion can have, as prompts beyond a model do. Each run is measured on the
same held-out sums. The step of the goal is the first of two measures in a row above it.
"""

import argparse
import itertools
import json
import pathlib
import tempfile

import numpy as np

from tests import optimizers
from tests.rl.learning import ANSWER_LENGTH, PROMPT_LENGTH, half_taught, problems
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.prompts.curriculum import CurriculumConfig
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.metrics_logger import Mode

PROMPTS, GENERATIONS, POOL, EVERY = 16, 8, 1024, 5
CONFIGS = {"uniform": None, "curriculum": CurriculumConfig(hard_chance=0.1)}


def prompts(tokenizer: TokenizerAdapter, seed: int) -> list[tuple[list[int], str]]:
  """Prompts in a random order with their answers; three of four cannot be solved."""
  pairs = problems(seed, POOL)
  pairs = [(q, a if i % 4 == 0 else "none") for i, (q, a) in enumerate(pairs)]
  order = np.random.default_rng(seed).permutation(POOL)
  return [(tokenizer.encode(pairs[i][0]), pairs[i][1]) for i in order]


def batch(pairs: list[tuple[list[int], str]]) -> dict[str, list]:
  ids, answers = zip(*pairs)
  return {"prompts": list(ids), "answer": list(answers)}


def right(prompts, completions, answer):
  del prompts
  return [float(text == a) for text, a in zip(completions, answer)]


def curve(
  name: str, model: pathlib.Path, seed: int, steps: int, rate: float
) -> list[float]:
  """Shares of right held-out answers, measured every `EVERY` steps from step 0."""
  tokenizer = TokenizerAdapter.from_pretrained(model)
  sampling = {
    "max_prompt_length": PROMPT_LENGTH,
    "max_tokens_to_generate": ANSWER_LENGTH,
    "seed": seed,
  }
  cluster = RLCluster(
    actor=AutoModel.from_pretrained(model),
    tokenizer=tokenizer,
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optimizers.adam(rate),
        max_steps=steps,
        eval_every_n_steps=EVERY,
        pbar_description=None,
      ),
      rollout_config=RolloutConfig(**sampling),
    ),
  )
  config = GRPOConfig(
    num_generations=GENERATIONS,
    beta=0.0,
    pass_threshold=1.0,
    curriculum=CONFIGS[name],
  )
  pool = prompts(tokenizer, seed)
  batches = [batch(pool[i : i + PROMPTS]) for i in range(0, POOL, PROMPTS)]
  held_out = [(tokenizer.encode(q), a) for q, a in problems(10**5, 256)]
  learner = GRPOLearner(cluster, config, right)
  learner.train(batches * steps, [batch(held_out)])
  return learner.metrics_logger.get_metric_history("", "pass@1", Mode.EVAL).tolist()


def main() -> None:
  options = argparse.ArgumentParser(description=__doc__)
  options.add_argument("--seeds", type=int, nargs="+", default=[0])
  options.add_argument("--steps", type=int, default=150)
  options.add_argument("--goal", type=float, default=0.8)
  options.add_argument("--rate", type=float, default=5e-5)
  given = options.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    model = half_taught(pathlib.Path(folder))
    for seed in given.seeds:
      for name in CONFIGS:
        values = curve(name, model, seed, given.steps, given.rate)
        reached = [min(pair) >= given.goal for pair in itertools.pairwise(values)]
        step = reached.index(True) * EVERY if any(reached) else None
        found = {"prompts": name, "seed": seed, "step_of_goal": step}
        rounded = [round(value, 3) for value in values]
        print(json.dumps(found | {"pass@1": rounded}), flush=True)


if __name__ == "__main__":
  main()
