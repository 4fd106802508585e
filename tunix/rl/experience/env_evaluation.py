"""Evaluation of a model in environments, for trainers that learn from given data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.data import image_parts
from tunix.generate import tokenizer_adapter
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.episode import Episode
from tunix.rl.env.making import MakeEnv
from tunix.rl.env.runner import Runner
from tunix.rl.experience import episodes as episodes_lib, evaluation
from tunix.rl.metrics import Mean, mean_of
from tunix.rl.pipeline import PromptBatch, prompt_batch
from tunix.rl.reward.outcomes import Value
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.utils import checks


class EnvEvaluation:
  """Measures a model on prompts with environments: mean reward and pass@k.

  Pass one to `PeftTrainer.with_evaluation`. Each call draws with the same keys, so that
  two evaluations differ only by the weights. It changes nothing of the training.

  Args:
    make: makes the environments, see `tunix.rl.env.making`.
    rows: prompts, {"prompts": prompt, column: value, ...} each.
    tokenizer: tokenizer of the model.
    rollout: sampling of the actions; its `seed` is the seed of all draws.
    episodes: limits of the episodes; None: the defaults.
    num_generations: episodes of each prompt.
    pass_threshold: reward from which an episode passes.
    batch_size: prompts whose episodes run at once.

  Raises:
    ValueError: there are no prompts, there are several processes, or prompts or
      observations may have images.
  """

  def __init__(
    self,
    make: MakeEnv,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: object,
    rollout: RolloutConfig,
    episodes: EpisodeConfig | None = None,
    *,
    num_generations: int = 1,
    pass_threshold: float = 1.0,
    batch_size: int = 16,
  ):
    checks.number("num_generations", num_generations, checks.COUNT, whole=True)
    checks.number("batch_size", batch_size, checks.COUNT, whole=True)
    if not rows:
      raise ValueError("rows is empty; expected at least one prompt to evaluate")
    if (processes := jax.process_count()) > 1:
      raise ValueError(
        f"there are {processes} processes, whose environments cannot share one engine: "
        "evaluate in environments in a run of one process"
      )
    if episodes is not None and episodes.max_image_tokens:
      raise ValueError(
        f"max_image_tokens is {episodes.max_image_tokens}, and evaluations of given "
        "data read text alone; expected 0. Leave it out"
      )
    if any(image_parts.has_places(row["prompts"]) for row in rows):
      raise ValueError(
        "prompts have images, and evaluations of given data in environments read text "
        "alone; expected prompts without images. Leave them out of the file"
      )
    self._make, self._rollout = make, rollout
    self._tokenizer = tokenizer_adapter.adapted(tokenizer)
    self._limits = EpisodeConfig() if episodes is None else episodes
    self._processes = episodes_lib.processes_of(make, self._limits)
    self._size, self._threshold = num_generations, pass_threshold
    self._batches = [
      prompt_batch({name: [row[name] for row in part] for name in part[0]}, number)
      for number, part in enumerate(
        rows[i : i + batch_size] for i in range(0, len(rows), batch_size)
      )
    ]
    self._engine: VanillaRollout | None = None  # of the model of the last call

  def __call__(self, model: nnx.Module) -> dict[str, float]:
    """Returns metrics by name, as an evaluation of an RL run with environments does."""
    if self._engine is None or self._engine.model() is not model:
      self._engine = VanillaRollout(model, self._tokenizer, self._rollout)
    engine = self._engine
    parts = [self._episodes(batch, engine) for batch in self._batches]
    episodes = [episode for part in parts for episode in part]
    outcomes = episodes_lib.outcomes_of(episodes)
    rewards = [x.value if isinstance(x, Value) else np.nan for x in outcomes]
    totals = np.array(rewards, np.float64).reshape(-1, self._size)
    return {
      **_means(totals),
      **evaluation.passes(totals, self._threshold),
      **mean_of([episodes_lib.metrics_of(episodes)]),
    }

  def _episodes(self, batch: PromptBatch, engine: VanillaRollout) -> list[Episode]:
    config, limits = self._rollout, self._limits
    runner = Runner(
      self._tokenizer,
      limits,
      max_prompt_length=config.max_prompt_length,
      max_action_tokens=config.max_tokens_to_generate,
    )
    makers = episodes_lib.makers_of(self._make, batch, self._size, self._processes)
    key = jax.random.fold_in(jax.random.key(config.seed), batch.number)
    sizes = {"episodes": len(makers) * self._size}
    most = limits.new_tokens(config.max_tokens_to_generate)
    limit = config.max_prompt_length + most
    with engine.sampling_client(config, key, limit=limit, **sizes) as client:
      return runner.run(makers, self._size, client)

  def close(self) -> None:
    """Ends the processes of environments."""
    if self._processes is not None:
      self._processes.close()


def _means(totals: np.ndarray) -> dict[str, float]:
  """Returns the mean reward of episodes [P, G], and the share without a reward."""
  known = totals[np.isfinite(totals)]
  parts = {"rewards/failed": Mean(1 - known.size / totals.size, totals.size)}
  if known.size:
    parts["rewards/score/mean"] = Mean(float(known.mean()), known.size)
  return mean_of([parts])
