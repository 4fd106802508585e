"""Completions per second with a lag and without: python -m benchmarks.lagged.

Sums of two numbers. The environment answers after a time that is drawn lognormal
(median 0.3 s, sigma 1, at most 5 s), as a slow sandbox does. The model is not taught:
this measures time, not learning.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import time

import optax

from tests.rl.learning import problems
from tunix.examples.quickstart.task import make_tokenizer
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig
from tunix.models.transformer.config import RopeConfig
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.env import StepResult
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.metrics_logger import Mode

MEDIAN_S, SIGMA, MOST_S = 0.3, 1.0, 5.0


class Slow:
  """One answer, whose reward comes late."""

  def __init__(self, prompt, answer, wait_s):
    self._prompt, self._answer, self._wait_s = prompt, answer, wait_s

  def initial_observation(self):
    return self._prompt

  async def step(self, action):
    await asyncio.sleep(self._wait_s)
    return StepResult(reward=float(action.text == self._answer), episode_done=True)


def measured(options: argparse.Namespace, lag: int) -> dict[str, float]:
  """Returns rates and shares of the steps after the first two."""
  tokenizer, dice = make_tokenizer(), random.Random(0)
  sizes = {"num_layers": 4, "embed_dim": options.width, "hidden_dim": 3 * options.width}
  heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
  config = ModelConfig(
    vocab_size=tokenizer.vocab_size, rope=RopeConfig(theta=1e6), **sizes, **heads
  )
  ahead = {"schedule": "lagged", "lag": lag} if lag else {}
  cluster = RLCluster(
    actor=AutoModel.from_config(config, seed=0),
    tokenizer=tokenizer,
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optax.adam(1e-5), pbar_description=None, **ahead
      ),
      rollout_config=RolloutConfig(max_prompt_length=6, max_tokens_to_generate=4),
    ),
  )

  def env(prompt, answer):
    wait_s = dice.lognormvariate(math.log(MEDIAN_S), SIGMA)
    return Slow(list(prompt), answer, options.scale * min(MOST_S, wait_s))

  times = []

  def batches():
    for step in range(options.steps + lag):
      texts, answers = zip(*problems(step, options.prompts))
      yield {"prompts": [tokenizer.encode(t) for t in texts], "answer": list(answers)}

  class Timed(GRPOLearner):
    def _update(self, example, skip_jit):
      super()._update(example, skip_jit)
      times.append(time.perf_counter())

  settings = GRPOConfig(num_generations=8, beta=0.0, num_iterations=options.iterations)
  limits = EpisodeConfig(max_turns=1, max_tokens=4, workers=options.prompts * 8)
  learner = Timed(cluster, settings, env=env, episodes=limits)
  learner.train(batches())
  history = lambda name: learner.metrics_logger.get_metric_history("", name, Mode.TRAIN)
  # The first steps compile; the last ones have no batch ahead of them.
  steps = times[1 : options.steps]
  seconds = steps[-1] - steps[0]
  rows = (len(steps) - 1) * options.prompts * 8
  update = sum(history("perf/update_sec")[2 : options.steps])
  out = {
    "lag": lag,
    "completions_per_s": rows / seconds,
    "update_share": update / seconds,
  }
  for name in ("rollout", "rewards", "update", "data_wait", "sync"):
    try:
      values = history(f"perf/{name}_sec")[2 : options.steps]
      out[f"{name}_s"] = sum(values) / len(values)
    except (KeyError, ValueError):
      continue
  learner.close()
  return {name: round(value, 3) for name, value in out.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--prompts", type=int, default=16, help="of a batch")
  parser.add_argument("--width", type=int, default=128, help="of the model")
  parser.add_argument("--iterations", type=int, default=1, help="over each batch")
  parser.add_argument("--steps", type=int, default=10)
  parser.add_argument("--scale", type=float, default=1.0, help="of the latencies")
  parser.add_argument("--lags", type=int, nargs="*", default=[0, 1])
  options = parser.parse_args()
  rates = {}
  for lag in options.lags:
    out = measured(options, lag)
    rates[lag] = out["completions_per_s"]
    print(json.dumps(out), flush=True)
  for lag, rate in itertools.islice(rates.items(), 1, None):
    print(f"lag {lag}: {rate / rates[options.lags[0]]:.2f}x")


if __name__ == "__main__":
  main()
