"""Compiled programs by name: run, or only noted, when their arguments are shapes.

A plan goes through the code that a run goes through, with `jax.ShapeDtypeStruct`s where
the run has arrays; what would be computed is lowered instead, and kept.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax

# {name: lowered}, while programs are noted.
_noted: contextvars.ContextVar[dict[str, jax.stages.Lowered] | None] = (
  contextvars.ContextVar("noted_programs", default=None)
)


@contextlib.contextmanager
def noted() -> Iterator[dict[str, jax.stages.Lowered]]:
  """Notes the programs that are called inside, by name, and runs none of them; of a
  name the first one."""
  out: dict[str, jax.stages.Lowered] = {}
  token = _noted.set(out)
  try:
    yield out
  finally:
    _noted.reset(token)


def call(name: str, jitted: Callable[..., Any], *args: Any) -> Any:
  """`jitted(*args)`; where programs are noted, the shapes that it would give."""
  programs = _noted.get()
  if programs is None:
    return jitted(*args)
  lowered: Any = jitted.lower(*args)  # type: ignore[attr-defined]
  programs.setdefault(name, lowered)
  return jax.tree.map(
    lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info
  )
