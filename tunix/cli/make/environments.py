"""Builds the environments of a run from its keys: of rollouts, and of evaluations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tunix.cli.make import data_sources, objects, rewards
from tunix.cli.settings.run import RunSettings, StreamRun
from tunix.cli.utils import call_strings
from tunix.data.records import PROMPT_COLUMN, PROMPT_ROWS
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.env import making
from tunix.rl.env.adapters import reasoning_gym
from tunix.rl.experience.env_evaluation import EnvEvaluation
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.utils.setting import shared_values


def tasks(text: str | None) -> str | None:
  """Returns the source of the prompts that the key `env` names, if it names one."""
  is_source = (text or "").startswith(f"{reasoning_gym.PREFIX}:")
  return text if is_source else None


def make_env(text: str) -> Callable[..., Any]:
  """Returns the function that the key `env` names; arguments of a call are bound to it.

  Raises:
    FileNotFoundError, ImportError, ValueError: the function does not exist, or the text
      is no call string.
  """
  if objects.is_name(text):
    return objects.get(text)
  if tasks(text) or text == reasoning_gym.PREFIX:
    return reasoning_gym.TaskEnv
  call = call_strings.parse_call_string(text)
  if call.source is None or call.name is None:
    raise ValueError(
      f"env is {text!r}; expected a function that makes environments, such as "
      "pkg.mod:make, /path/file.py:make or pkg.mod:make(level=2)"
    )
  made = call_strings.load(call)
  if call.args:
    raise ValueError(
      f"env is {text!r}, with arguments without names; name them, such as make(level=2)"
    )
  return functools.partial(made, **call.kwargs) if call.kwargs else made


def check(text: str, columns: Sequence[str]) -> None:
  """Loads the function once, to refuse a wrong one before the run.

  Args:
    text: value of the key `env`.
    columns: columns of the data besides the prompts.

  Raises:
    FileNotFoundError, ImportError, ValueError: as for `make_env`; or the function needs
      a column that the data lacks.
  """
  making.arguments(make_env(text), dict.fromkeys(["prompt", *columns]))


def digest(text: str | None) -> str:
  """Returns the digest of the file that defines the environments; "" for None."""
  if text == reasoning_gym.PREFIX:
    text = f"{text}:"
  return "" if text is None else rewards.source_digest(text)


def evaluation_of(
  config: RunSettings, tokenizer: TokenizerAdapter
) -> EnvEvaluation | None:
  """Returns the evaluation in environments of a run; None without `eval.env`.

  Raises:
    FileNotFoundError, ImportError, ValueError: a function or prompts that do not exist
      or do not fit together.
  """
  if not isinstance(config, StreamRun) or (env := config.eval.env) is None:
    return None
  section = config.eval
  source = tasks(env) if section.prompts is None else section.prompts
  if source is None:
    raise ValueError(
      f"eval.env is {env!r} and eval.prompts is not set. Give a file of "
      "prompts with the columns that the environment names"
    )
  records = data_sources.open_records(source, PROMPT_ROWS)
  read = [PROMPT_ROWS.read(records[i], records.where(i)) for i in range(len(records))]
  rows = [{PROMPT_COLUMN: record.prompt, **record.extra} for record in read]
  check(env, list(read[0].extra))
  return EnvEvaluation(
    make_env(env),
    rows,
    tokenizer,
    RolloutConfig(**shared_values(RolloutConfig, section), seed=config.seed),
    section.episode,
    num_generations=section.num_generations,
    pass_threshold=section.pass_threshold,
    batch_size=section.batch_size,
  )
