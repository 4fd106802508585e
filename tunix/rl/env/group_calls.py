"""Calls of a group's methods, as an episode's thread makes them."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from tunix.sandbox.errors import describe


def made(make: Callable[[], Any]) -> tuple[Any, Any]:
  builder = make()
  return builder, builder.make_envs()


def close_made(made: tuple[Any, Any]) -> None:
  """Closes environments that were made after the deadline of `made`."""
  builder, envs = made
  if hasattr(envs, "close") and hasattr(envs, "__await__"):
    envs.close()  # a coroutine that nobody awaits
    envs = ()
  try:
    for env in envs if isinstance(envs, list | tuple) else ():
      if (close := getattr(env, "close", None)) is not None:
        _awaited_here(close())
    _awaited_here(cleaned_up(builder))
  # The methods are the user's, and the group has failed already.
  except Exception as error:
    logging.warning("closing an environment that was made late: %s", describe(error))


def _awaited_here(value: object) -> None:
  if inspect.iscoroutine(value):
    asyncio.run(value)


def cleaned_up(builder: object) -> Any:
  cleanup = getattr(builder, "cleanup", None)
  return None if cleanup is None else cleanup()


async def awaited(value: Any) -> Any:
  return await value
