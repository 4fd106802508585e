"""Episodes and their groups while they run (runner.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunix.generate.tokens import Completion
from tunix.rl.env.conversation import Conversation
from tunix.rl.env.episode import Episode
from tunix.rl.env.prompt_ids import PromptIds

MakeGroup = Callable[[], Any]  # returns an EnvGroup


@dataclasses.dataclass(eq=False)
class Group:
  """A group of episodes while it runs."""

  number: int
  make: MakeGroup
  lives: list[Live] = dataclasses.field(default_factory=list)
  builder: Any = None
  envs: list[Any] = dataclasses.field(default_factory=list)
  open: int = 0

  @property
  def episodes(self) -> list[Episode]:
    return [live.episode for live in self.lives]


@dataclasses.dataclass(eq=False)
class Live:
  """An episode while it runs."""

  number: int
  group: Group
  episode: Episode
  env: Any = None
  conversation: Conversation | None = None
  row_prompt: int = 0  # tokens of the first prompt of the row
  prompt: PromptIds = dataclasses.field(default_factory=PromptIds)
  started: float = 0.0  # monotonic time
  stops: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
  drawn: Completion | None = None
  stopped_by: str = ""  # the limit, while the environment gives a last reward
  is_over: bool = False
