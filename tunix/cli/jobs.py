"""The jobs of `tunix train`: where each finds its data and its trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tunix.cli import (
  algorithms,
  build,
  build_data,
  build_distill,
  build_preference,
  build_prompts,
  build_rl,
)
from tunix.cli.build_data import RunData
from tunix.cli.schema import Config
from tunix.sft.peft_trainer import PeftTrainer

# The metric that RL raises.
REWARD = "rewards/score/mean"

_PAIRS = {"loss": "loss", "accuracy": "rewards/accuracy"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One job.

  Attributes:
    check: refuses settings, before anything is loaded.
    data: (config, tokenizer, earlier scans) -> the checked data.
    count_steps: (config, report of the training data) -> optimizer steps, or None.
    build: (config, model, tokenizer, optimizer, mesh=, output_dir=, learning_rate=) ->
      what trains, put back where its checkpoints stand.
    results: {name in the result: metric}, first and last value of which are told.
    batch: what a step computes, in words.
    length: (keys that make it up, most tokens of a row).
    notes: (config, data) -> further lines for the user.
  """

  check: Callable[[Config], None] = lambda config: None
  data: Callable[..., RunData] = build_data.build_data
  count_steps: Callable[[Config, Any], int | None] = build_data.count_steps
  build: Callable[..., Any]
  results: Mapping[str, str]
  batch: Callable[[Config], str]
  length: Callable[[Config], tuple[str, int]]
  notes: Callable[[Config, RunData], list[str]] = lambda config, data: []


def _build_sft(config, model, tokenizer, tx, *, mesh, output_dir, learning_rate):
  del tokenizer, mesh
  return PeftTrainer(
    model,
    tx,
    build.training_config(config, output_dir, learning_rate),
    build.build_logger(config, output_dir),
  )


def _rows(config: Config) -> str:
  keys = config.training
  packed = ", packed" if config.data.packing else ""
  return (
    f"batches: {keys.global_batch_size} x {config.data.max_length} tokens{packed}, "
    f"in {keys.micro_batches} micro-batches"
  )


def _taught_rows(config: Config) -> str:
  keys = config.distill
  if config.is_on_policy:
    sizes, own = config.training, config.rollout
    return (
      f"{sizes.global_batch_size} prompts a step; in {keys.on_policy_fraction:.0%} of "
      f"the steps the student answers, with at most {own.max_tokens_to_generate} "
      f"tokens; taught by {keys.teacher}"
    )
  source = keys.teacher if keys.teacher is not None else keys.cache
  return f"{_rows(config)}, taught by {source}"


def _answers(config: Config) -> str:
  keys, own = config.training, config.preference
  what = "labelled responses" if config.job == "kto" else "pairs"
  return (
    f"{config.job}: {keys.global_batch_size} {what} of at most "
    f"{own.max_prompt_length} + {own.max_response_length} tokens, "
    f"in {keys.micro_batches} micro-batches"
  )


def _rollouts(config: Config) -> str:
  algorithm = algorithms.algorithm_config(config)
  prompts, keys = config.training.global_batch_size, config.rollout
  names = config.reward.entries + (("reward model",) if config.reward.model else ())
  return (
    f"{algorithms.name_of(config)}: {prompts} prompts x {algorithm.num_generations} "
    f"completions of at most {keys.max_tokens_to_generate} tokens, rewarded by "
    f"{', '.join(names)}"
  )


def _row_length(config: Config) -> tuple[str, int]:
  return "data.max_length", config.data.max_length


def _taught_length(config: Config) -> tuple[str, int]:
  return _rollout_length(config) if config.is_on_policy else _row_length(config)


def _answer_length(config: Config) -> tuple[str, int]:
  keys = config.preference
  length = keys.max_prompt_length + keys.max_response_length
  return "preference.max_prompt_length + max_response_length", length


def _rollout_length(config: Config) -> tuple[str, int]:
  keys = config.rollout
  length = keys.max_prompt_length + keys.max_tokens_to_generate
  return "rollout.max_prompt_length + max_tokens_to_generate", length


def _balance(config: Config, data: RunData) -> list[str]:
  note = build_preference.balance_note(config, data.reports["train"])
  return [] if note is None else [note]


def _preference(results: Mapping[str, str], **more: Any) -> Job:
  return Job(
    check=build_preference.check,
    build=build_preference.build_trainer,
    results=results,
    batch=_answers,
    length=_answer_length,
    **more,
  )


_RL = Job(
  data=lambda config, tokenizer, known: build_prompts.build_prompts(config, tokenizer),
  count_steps=build_prompts.count_steps,
  build=build_rl.build_learner,
  results={"reward": REWARD},
  batch=_rollouts,
  length=_rollout_length,
)

JOBS: dict[str, Job] = {
  "sft": Job(
    build=_build_sft, results={"loss": "loss"}, batch=_rows, length=_row_length
  ),
  "dpo": _preference(_PAIRS, data=build_preference.build_compared_data),
  "orpo": _preference(_PAIRS),
  "kto": _preference(
    {"loss": "loss", "margin": "rewards/margin"},
    data=build_preference.build_labelled_data,
    notes=_balance,
  ),
  "reward": _preference(_PAIRS),
  "distill": Job(
    check=build_distill.check,
    data=build_distill.build_taught_data,
    build=build_distill.build_trainer,
    results={"loss": "loss"},
    batch=_taught_rows,
    length=_taught_length,
  ),
  "grpo": _RL,
  "ppo": _RL,
}
