"""Every algorithm on sums that the model half knows: python -m tests.rl.learning NAME.

`python -m tests.rl.learning grpo --lags 0 1 4 --seeds 0 1 2 --rate 1e-4 --iterations 1
--stop 60` compares schedules: with lag 4 batches are sampled four steps ahead of their
update. `--center 8` adds score centering, and `--kind off` leaves the correction out.

    37+48=     85

The model is taught until about half of its sampled answers are right; the reward is 1
for the right sum, else 0. No sum comes twice but by chance.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax

from tests import optimizers
from tunix.examples.quickstart.task import make_tokenizer
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.config import RopeConfig
from tunix.rl.algorithm_config import RolloutCorrection
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig, DrGRPOLearner
from tunix.rl.grpo.grpo_learner import (
  CISPOConfig,
  GRPOConfig,
  GRPOLearner,
  GSPOConfig,
)
from tunix.rl.grpo.rloo_learner import RLOOConfig, RLOOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.utils import create_critic_model
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

# A step is a batch of rollouts; its prompts make two updates an iteration.
PROMPTS, GENERATIONS, STEPS = 64, 8, 150
UPDATES, WARMUP = 2, 20
TAUGHT_STEPS, TAUGHT_ROWS = 300, 128
PROMPT_LENGTH, ANSWER_LENGTH = 6, 4  # tokens; the answer's with its EOS

_GROUP = {"num_generations": GENERATIONS, "beta": 0.0}

# name -> (learner, settings, learning rate)
ALGORITHMS = {
  "grpo": (GRPOLearner, GRPOConfig(num_iterations=2, **_GROUP), 3e-4),
  "gspo": (GRPOLearner, GSPOConfig(epsilon_low=0.2, epsilon_high=0.2, **_GROUP), 2e-4),
  "cispo": (GRPOLearner, CISPOConfig(**_GROUP), 2e-4),
  "drgrpo": (DrGRPOLearner, DrGRPOConfig(**_GROUP), 2e-4),
  "dapo": (DAPOLearner, DAPOConfig(**_GROUP), 2e-4),
  "rloo": (RLOOLearner, RLOOConfig(**_GROUP), 2e-4),
  "ppo": (PPOLearner, PPOConfig(num_generations=GENERATIONS, beta=0.0), 2e-4),
}

# What the mean reward of ten steps must pass.
GOALS = {name: 0.9 if name == "grpo" else 0.85 for name in ALGORITHMS}


def problems(seed: int, count: int) -> list[tuple[str, str]]:
  """(prompt, answer): sums of two numbers below 100."""
  numbers = random.Random(seed)
  pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(count)]
  return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def supervised(tokenizer: TokenizerAdapter) -> Iterator[dict[str, np.ndarray]]:
  """Batches of other sums; only the answer and its EOS are trained."""
  for seed in range(TAUGHT_STEPS):
    shape = (TAUGHT_ROWS, PROMPT_LENGTH + ANSWER_LENGTH)
    names = ("input_tokens", "input_mask", "segment_ids")
    batch = {name: np.zeros(shape, np.int32) for name in names}
    for row, (prompt, answer) in enumerate(problems(10**6 + seed, TAUGHT_ROWS)):
      start = tokenizer.encode(prompt)
      ids = [*start, *tokenizer.encode(answer), tokenizer.eos_id()]
      batch["input_tokens"][row, : len(ids)] = ids
      batch["input_mask"][row, len(start) : len(ids)] = 1
      batch["segment_ids"][row, : len(ids)] = 1
    yield batch


def half_taught(
  folder: pathlib.Path, lesson: Any = supervised, **sizes: int
) -> pathlib.Path:
  """A model that has about half of the sums right, written to `folder`.

  `lesson(tokenizer)` yields what it is taught with; `sizes` are those of the model.
  """
  tokenizer = make_tokenizer()
  usual: dict[str, Any] = {
    **{"num_layers": 4, "embed_dim": 128, "hidden_dim": 384, "num_heads": 4},
    **{"num_kv_heads": 2, "head_dim": 32, "rope": RopeConfig(theta=1e6)},
  }
  config = ModelConfig(vocab_size=tokenizer.vocab_size, **usual | sizes)
  trainer = PeftTrainer(
    AutoModel.from_config(config, seed=0),
    optimizers.adamw(1e-3, weight_decay=0.01),
    TrainingConfig(max_steps=TAUGHT_STEPS, pbar_description=None),
  )
  trainer.train(lesson(tokenizer))
  roles = {"bos": tokenizer.bos_id(), "eos": tokenizer.eos_id()}
  roles["pad"] = tokenizer.pad_id()
  ids = {f"{role}_token_id": number for role, number in roles.items()}
  save_pretrained(trainer.model, folder, hf_fields=ids)
  tokenizer.save(folder)
  return folder


def rewards(
  name: str,
  model: pathlib.Path,
  seed: int = 0,
  lag: int = 0,
  *,
  rate: float | None = None,
  iterations: int | None = None,
  stop: int = STEPS,
  center: int = 0,
  kind: str | None = None,
  weights: Any = None,
) -> list[float]:
  """Mean reward of the rollouts of every step, of which `stop` are made."""
  learner, config, usual = ALGORITHMS[name]
  rate = usual if rate is None else rate
  if iterations is not None:
    config = dataclasses.replace(config, num_iterations=iterations)
  if kind is not None:
    rule = RolloutCorrection(kind=kind)
    config = dataclasses.replace(config, rollout_correction=rule)
  updates = STEPS * UPDATES * config.num_iterations
  schedule = optax.warmup_cosine_decay_schedule(0.0, rate, WARMUP, updates)
  actor = AutoModel.from_pretrained(model)
  tokenizer = TokenizerAdapter.from_pretrained(model)
  critic = name == "ppo"
  cluster = RLCluster(
    actor=actor,
    critic=create_critic_model(actor) if critic else None,
    tokenizer=tokenizer,
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optimizers.adam(schedule),
        critic_optimizer=optimizers.adam(1e-3) if critic else None,
        mini_batch_size=PROMPTS // UPDATES,
        max_steps=updates * stop // STEPS,
        pbar_description=None,
        **({"schedule": "lagged", "lag": lag} if lag else {}),
      ),
      rollout_config=RolloutConfig(
        max_prompt_length=PROMPT_LENGTH,
        max_tokens_to_generate=ANSWER_LENGTH,
        seed=seed,
        center_scores=center,
        weights=weights,
      ),
    ),
  )
  curve = []

  def batches():
    step = 0
    while True:  # DAPO draws more than one a step
      texts, answers = zip(*problems(1000 * seed + step, PROMPTS))
      ids = [tokenizer.encode(text) for text in texts]  # as it was taught: no BOS
      yield {"prompts": ids, "answer": list(answers)}
      step += 1

  def reward(prompts, completions, answer):
    del prompts
    found = [float(text == right) for text, right in zip(completions, answer)]
    curve.append(float(np.mean(found)))
    return found

  learner(cluster, config, reward).train(batches())
  return curve


def marks(curve: list[float]) -> list[float]:
  """Means over ten rollouts: the first, and those before every fiftieth, or before
  every tenth of a short run."""
  ends = [10, *range(50, len(curve) + 1, 50)]
  if len(curve) < 100:
    ends = [*range(10, len(curve) + 1, 10)]
  return [round(float(np.mean(curve[end - 10 : end])), 3) for end in ends]


def plot(
  curves: dict[str, list[list[float]]],
  file: pathlib.Path,
  ylim: tuple[float, float] = (0.4, 1.0),
) -> None:
  """Means over ten batches of rollouts, and the band of the seeds; DAPO draws more than
  one batch a step."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
  for name, seeds in curves.items():
    shortest = min(map(len, seeds))
    means = np.array(
      [np.convolve(curve[:shortest], np.full(10, 0.1), "valid") for curve in seeds]
    )
    x = np.arange(10, shortest + 1)
    (line,) = axes.plot(x, means.mean(0), label=name, linewidth=1.2)
    if len(seeds) > 1:
      axes.fill_between(
        x, means.min(0), means.max(0), color=line.get_color(), alpha=0.2
      )
  axes.set(xlabel="batch of rollouts", ylabel="mean reward of ten", ylim=ylim)
  axes.grid(alpha=0.3)
  axes.legend(ncols=2, frameon=False)
  figure.savefig(file, dpi=110)
  pyplot.close(figure)


def main() -> None:
  options = argparse.ArgumentParser(description=__doc__)
  options.add_argument("names", nargs="*", choices=[*ALGORITHMS, []])
  options.add_argument("--plot", type=pathlib.Path, help="a PNG to write")
  options.add_argument("--seeds", type=int, nargs="+", default=[0])
  options.add_argument("--lags", type=int, nargs="+", default=[0], help="0: `sync`")
  options.add_argument("--rate", type=float, help="of learning; else the algorithm's")
  options.add_argument(
    "--iterations", type=int, help="passes over a batch, with two updates each"
  )
  options.add_argument("--stop", type=int, default=STEPS, help="steps to make")
  options.add_argument("--center", type=int, default=0, help="center_scores")
  options.add_argument("--kind", help="of the correction")
  options.add_argument("--weights", help="that sample: int8 or fp8")
  given, curves = options.parse_args(), {}
  with tempfile.TemporaryDirectory() as folder:
    model = half_taught(pathlib.Path(folder))
    for name, seed, lag in itertools.product(
      given.names or ALGORITHMS, given.seeds, given.lags
    ):
      start = time.process_time()
      curve = rewards(
        name,
        model,
        seed,
        lag,
        rate=given.rate,
        iterations=given.iterations,
        stop=given.stop,
        center=given.center,
        kind=given.kind,
        weights=given.weights,
      )
      label = f"{name}, lag {lag}" if lag else name
      curves.setdefault(label, []).append(curve)
      spent = round(time.process_time() - start)
      record = {"algorithm": label, "seed": seed, "cpu_s": spent}
      print(json.dumps(record | {"mean_of_10": marks(curve)}), flush=True)
  if given.plot:
    plot(curves, given.plot)


if __name__ == "__main__":
  main()
