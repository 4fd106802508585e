"""From a configuration to checked prompts and batches of them, for the jobs of RL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunix.cli.build import data as build_data, data_sources, rewards
from tunix.cli.build.data import RunData
from tunix.cli.run import fingerprints
from tunix.cli.settings import keys
from tunix.data import prompts
from tunix.data.prompts import WITH_COLUMNS, PromptBatches, PromptReport, Row
from tunix.generate.tokenizer_adapter import TokenizerAdapter


def build_prompts(
  config: Any, tokenizer: TokenizerAdapter, known: Any = None
) -> RunData:
  """Reads and checks the prompts, renders them, and makes batches of them.

  Args:
    config: of the run.
    tokenizer: of the run.
    known: as in `build_data.build_data`; prompts are scanned by being read.

  Raises:
    FileNotFoundError, ValueError: something about files, records or rewards is wrong;
      see `data_sources.open_records` for what other sources raise.
  """
  del known
  source = config.data
  named = list(source.sources())
  batches, reports, prints = {}, {}, {}
  for name, names, weights in named:
    opened = data_sources.open_records(names, WITH_COLUMNS, weights, source.columns)
    records = prompts.read_prompts(opened)
    rewards.check(config.reward, records.columns)
    prints[name] = records.fingerprint
    with build_data.naming({"max_prompt_length": "rollout.max_prompt_length"}):
      rows, reports[name] = records.within(
        config.rollout.max_prompt_length,
        tokenizer,
        overlong="error" if source.overlong == "error" else "drop",
        chat=source.chat,
        template_kwargs=source.template_args,
      )
    mixed = {"sizes": reports[name].sizes, "weights": weights} if weights else {}
    batches[name] = _batches(rows, config, mixed, training=name == "train")
  return RunData(
    train=batches["train"],
    eval=batches.get("eval"),
    reports=reports,
    scans={},
    fingerprints=fingerprints.of_inputs(config, tokenizer, {})
    | prints
    | fingerprints.of_base(config)
    | {"reward_functions": rewards.digest(config.reward)}
    | _other_models(config),
    num_steps=count_steps(config, reports["train"]),
  )


def _batches(
  rows: Sequence[Row], config: Any, mixed: dict[str, Any], *, training: bool
) -> PromptBatches:
  sizes = config.training
  if not training:
    return PromptBatches(rows, sizes.eval_rows, seed=None, epochs=1)
  seed = config.seed if config.data.shuffle else None
  epochs = build_data.epochs(config)
  size = sizes.global_batch_size
  return PromptBatches(rows, size, seed=seed, epochs=epochs, **mixed)


def _other_models(config: Any) -> dict[str, str]:
  """Digests of the models besides the one that is trained."""
  flat = keys.flatten(config)
  places = {
    "reference": "rl.reference",
    "critic": "rl.critic",
    "reward": "reward.model",
  }
  paths = {name: flat.get(key) for name, key in places.items()}
  return fingerprints.of_models(
    {name: path for name, path in paths.items() if (name, path) != ("critic", "actor")}
  )


def count_steps(config: Any, report: PromptReport) -> int | None:
  """Updates of a run; None where dynamic sampling hides them.

  Mini-batches that would weigh nothing are left out, so that there may be fewer.
  """
  limit, passes = config.training.max_steps, build_data.epochs(config)
  algorithm = config.algorithm
  if passes is None or getattr(algorithm, "dynamic_sampling", False):
    return limit
  size = config.training.global_batch_size
  whole, rest = divmod(report.kept, size)
  # Without a size of its own a mini-batch is as large as the largest batch.
  mini = config.rl.mini_batch_size or min(size, report.kept)
  updates = whole * -(-size // mini) + -(-rest // mini)
  steps = updates * passes * algorithm.num_iterations
  return steps if limit is None else min(steps, limit)
