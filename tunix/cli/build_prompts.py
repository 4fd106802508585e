"""From a configuration to checked prompts and batches of them, for the jobs of RL."""

from __future__ import annotations

from collections.abc import Sequence

from tunix.cli import algorithms, build_data, fingerprints, rewards
from tunix.cli.build_data import RunData
from tunix.cli.schema import Config
from tunix.data import prompts
from tunix.data.prompts import PromptBatches, PromptReport, Row
from tunix.generate.tokenizer_adapter import TokenizerAdapter


def build_prompts(config: Config, tokenizer: TokenizerAdapter) -> RunData:
  """Reads and checks the prompts, renders them, and makes batches of them.

  Raises:
    FileNotFoundError, ValueError: something about files, records or rewards is wrong.
  """
  keys = config.data
  if keys.train is None:
    raise ValueError("data.train is not set: give a file of JSON lines with prompts")
  algorithms.algorithm_config(config)  # or says what is wrong with it
  rewards.check(config)
  batches, reports, prints = {}, {}, {}
  files = {"train": keys.train, "eval": keys.eval}
  for name, path in files.items():
    if path is None:
      continue
    records = prompts.read_prompts(path)
    prints[name] = records.fingerprint
    with build_data.naming({"max_prompt_length": "rollout.max_prompt_length"}):
      rows, reports[name] = records.within(
        config.rollout.max_prompt_length,
        tokenizer,
        overlong="error" if keys.overlong == "error" else "drop",
        chat=keys.chat,
        template_kwargs=keys.template_args,
      )
    batches[name] = _batches(rows, config, training=name == "train")
  return RunData(
    train=batches["train"],
    eval=batches.get("eval"),
    reports=reports,
    scans={},
    fingerprints=fingerprints.of_inputs(config, tokenizer, {})
    | prints
    | fingerprints.of_base(config)
    | {"reward_functions": rewards.digest(config)}
    | _other_models(config),
    num_steps=count_steps(config, reports["train"]),
  )


def _batches(rows: Sequence[Row], config: Config, *, training: bool) -> PromptBatches:
  keys = config.training
  if not training:
    size = keys.eval_batch_size or keys.global_batch_size
    return PromptBatches(rows, size, seed=None, epochs=1)
  seed = config.seed if config.data.shuffle else None
  epochs = build_data.epochs(config)
  return PromptBatches(rows, keys.global_batch_size, seed=seed, epochs=epochs)


def _other_models(config: Config) -> dict[str, str]:
  """Digests of the models besides the one that is trained."""
  critic = config.rl.critic if config.rl.critic != "actor" else None
  return fingerprints.of_models(
    {
      "reference": config.rl.reference,
      "reward": config.reward.model,
      "critic": critic,
    }
  )


def count_steps(config: Config, report: PromptReport) -> int | None:
  """Updates of a run; None where dynamic sampling hides them.

  Mini-batches that would weigh nothing are left out, so that there may be fewer.
  """
  limit, passes = config.training.max_steps, build_data.epochs(config)
  algorithm = algorithms.algorithm_config(config)
  if passes is None or getattr(algorithm, "dynamic_sampling", False):
    return limit
  size = config.training.global_batch_size
  whole, rest = divmod(report.kept, size)
  # Without a size of its own a mini-batch is as large as the largest batch.
  mini = config.rl.mini_batch_size or min(size, report.kept)
  updates = whole * -(-size // mini) + -(-rest // mini)
  steps = updates * passes * algorithm.num_iterations
  return steps if limit is None else min(steps, limit)
