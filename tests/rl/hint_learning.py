"""What hints are worth on sums: python -m tests.rl.hint_learning [--plot FILE].

A small model is taught sums of two digits, every second one behind its answer:

    7+8=     15          [15]7+8=     15

Behind its answer a sum is always right, so that the model copies what it reads. Of the
other sums three in ten are right, and so are the model's samples. SDPO puts a right
answer of the group in front, SDFT that of the data; GRPO has rewards alone. What counts
are right answers without a hint, sampled at temperature 1.
"""

import argparse
import json
import pathlib
import random
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests import optimizers
from tests.rl import learning
from tunix.data.turns.teacher_prompts import filled
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
)
from tunix.distillation.strategies import PolicyGradientStrategy
from tunix.distillation.teachers import SelfTeacher
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.grpo.sdpo_learner import SDPOConfig, SDPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig

HINTED, WIDTH, STEPS, RATE = "[{answer}]{prompt}", 12, 50, 3e-4
PROMPTS, GENERATIONS, TAUGHT, KNOWN = 32, 8, 128, 0.3
SIZES = {"num_layers": 2, "embed_dim": 64, "hidden_dim": 192, "head_dim": 16}
LENGTHS: dict[str, Any] = {"max_prompt_length": 5, "max_tokens_to_generate": 3}
_HINTS: dict[str, Any] = {
  "template": "[{hints}]{prompt}",
  "solution_template": "{solution}",
}
_GROUP: dict[str, Any] = {"num_generations": GENERATIONS, "beta": 0.0}
ALGORITHMS = {
  "grpo": (GRPOLearner, GRPOConfig(**_GROUP)),
  "sdpo": (SDPOLearner, SDPOConfig(**_GROUP, **_HINTS)),
}


def problems(seed: int, count: int) -> list[tuple[str, str]]:
  """(prompt, answer): sums of two numbers below 10."""
  numbers = random.Random(seed)
  pairs = [(numbers.randrange(10), numbers.randrange(10)) for _ in range(count)]
  return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def lesson(tokenizer: TokenizerAdapter) -> Iterator[dict[str, np.ndarray]]:
  """Batches of sums, every second one behind its answer; BOS is in front."""
  for seed in range(learning.TAUGHT_STEPS):
    names = ("input_tokens", "input_mask", "segment_ids")
    batch = {name: np.zeros((TAUGHT, WIDTH), np.int32) for name in names}
    numbers = random.Random(seed)
    for row, (prompt, answer) in enumerate(problems(10**6 + seed, TAUGHT)):
      text = filled(HINTED, answer=answer, prompt=prompt) if row % 2 else prompt
      if not row % 2 and numbers.random() > KNOWN:
        answer = str(numbers.randrange(19))
      start = tokenizer.tokenize(text, add_eos=False).tolist()
      ids = [*start, *tokenizer.encode(answer), tokenizer.eos_id()]
      batch["input_tokens"][row, : len(ids)] = ids
      batch["input_mask"][row, len(start) : len(ids)] = 1
      batch["segment_ids"][row, : len(ids)] = 1
    yield batch


def of_rewards(name: str, model: pathlib.Path, seed: int) -> list[float]:
  """Share of right answers in every batch of rollouts."""
  learner, config = ALGORITHMS[name]
  cluster = RLCluster(
    actor=AutoModel.from_pretrained(model),
    tokenizer=TokenizerAdapter.from_pretrained(model),
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optimizers.adam(RATE), max_steps=STEPS, pbar_description=None
      ),
      rollout_config=RolloutConfig(seed=seed, **LENGTHS),
    ),
  )
  curve = []

  def reward(prompts, completions, answer):
    del prompts
    found = [float(text == right) for text, right in zip(completions, answer)]
    curve.append(float(np.mean(found)))
    return found

  learner(cluster, config, reward).train(
    {"prompts": list(texts), "answer": list(answers)}
    for texts, answers in batches(seed, PROMPTS)
  )
  return curve


def batches(seed: int, size: int) -> Iterator[tuple[list[str], list[str]]]:
  for step in range(STEPS):
    texts, answers = zip(*problems(1000 * seed + step, size))
    yield list(texts), list(answers)


def of_demonstrations(model: pathlib.Path, seed: int) -> list[float]:
  """SDFT, with as many samples in a step; the right answer is the demonstration."""
  tokenizer = TokenizerAdapter.from_pretrained(model)
  trainer = OnPolicyDistillationTrainer(
    AutoModel.from_pretrained(model),
    SelfTeacher(),
    PolicyGradientStrategy(),
    optimizers.adam(RATE),
    OnPolicyConfig(
      max_prompt_length=LENGTHS["max_prompt_length"],
      max_completion_length=LENGTHS["max_tokens_to_generate"],
      max_teacher_prompt_length=WIDTH,
      seed=seed,
      max_steps=STEPS,
      pbar_description=None,
    ),
    tokenizer=tokenizer,
  )
  curve, answers = [], []
  sampler: Any = trainer.sampler

  class Noting:
    """The trainer's sampler; counts right answers."""

    def __call__(self, *args, **options):
      out = sampler(*args, **options)
      curve.append(float(np.mean([a == b for a, b in zip(out.text, answers)])))
      return out

    def __getattr__(self, name):
      return getattr(sampler, name)

  noting: Any = Noting()
  trainer.sampler = noting

  def data():
    for texts, right in batches(seed, PROMPTS * GENERATIONS):
      answers[:] = right
      own = [filled(HINTED, answer=a, prompt=t) for t, a in zip(texts, right)]
      yield {"prompts": texts, "teacher_prompts": own}

  trainer.train(data())
  trainer.close()
  return curve


def main() -> None:
  options = argparse.ArgumentParser(description=__doc__)
  options.add_argument("--plot", type=pathlib.Path, help="a PNG to write")
  options.add_argument("--seeds", type=int, nargs="+", default=[0])
  given, curves = options.parse_args(), {}
  with tempfile.TemporaryDirectory() as folder:
    model = learning.half_taught(pathlib.Path(folder), lesson, **SIZES)
    for seed in given.seeds:
      for name in [*ALGORITHMS, "sdft"]:
        start = time.process_time()
        curve = (
          of_demonstrations(model, seed)
          if name == "sdft"
          else of_rewards(name, model, seed)
        )
        curves.setdefault(name, []).append(curve)
        record = {"algorithm": name, "seed": seed}
        record |= {"cpu_s": round(time.process_time() - start)}
        marks = learning.marks(curve)
        print(json.dumps(record | {"mean_of_10": marks}), flush=True)
  if given.plot:
    learning.plot(curves, given.plot, ylim=(0.0, 0.5))


if __name__ == "__main__":
  main()
