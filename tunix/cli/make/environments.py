"""Builds the function that makes the environments of a run from the key `env`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tunix.cli.make import objects, rewards
from tunix.cli.utils import call_strings
from tunix.rl.env import making
from tunix.rl.env.adapters import reasoning_gym


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
