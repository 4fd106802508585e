"""Settings of episodes."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tunix.rl.env.conversation import History
from tunix.utils import checks
from tunix.utils.setting import named_values, setting

_CHOICES = {
  "history": ("split", "keep"),
  "order": ("turns", "arrival"),
  "isolation": ("thread", "process"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
  """The limits of an episode, and how episodes run together.

  Attributes:
    max_turns: maximum number of actions of an episode.
    max_tokens: maximum number of tokens of a row after its first prompt, actions and
      observations together: the width of the arrays that are trained.
    max_observation_tokens: maximum number of tokens of an observation; a longer one
      ends the episode. null: no limit besides `max_tokens`.
    max_image_tokens: maximum number of soft tokens of the images of an episode
      together. An image that exceeds it ends the episode. The images of every row are
      padded to this number. 0: images are refused.
    max_seconds: maximum number of seconds of an episode. It is checked between the
      calls of an environment, so that an episode may last `timeout_s` longer. The bytes
      of a run then depend on the speed of the machine. null: no limit.
    max_rows: maximum number of rows of an episode (see tunix/rl/env/episode.py). Each
      batch has as many rows for every episode as the one with the most. An episode with
      more of them fails.
    history: "split": the policy reads the conversation as the chat template prints it,
      and a new row begins where the template rewrote an earlier answer. "keep": earlier
      answers stay as they were drawn.
    order: "turns": all episodes take their next action together, so that the bytes of a
      run do not depend on how fast environments answer. "arrival": an episode goes on
      as soon as its environment answers. It is faster where environments are slow.
      Log-probabilities may then differ in their last bits from one run to the next, and
      with another rollout engine than our own the tokens, too.
    isolation: "thread": environments run in this process, and a call that hangs keeps
      its thread. "process": each runs in a process of its own, which is killed with its
      children if it does not answer; `env` must then be defined in a module, and make
      one environment at a time.
    memory_bytes: address space in bytes that such a process may use in addition to what
      it uses after loading `env`. null: no limit.
    timeout_s: maximum number of seconds of one call of an environment. The episode
      fails after it.
    workers: calls of environments that run at the same time.
  """

  max_turns: int = 8
  max_tokens: int = 1024
  max_observation_tokens: int | None = None
  max_image_tokens: int = 0
  max_seconds: float | None = None
  max_rows: int = 4
  history: History = "split"
  order: Literal["turns", "arrival"] = "turns"
  isolation: Literal["thread", "process"] = setting("thread", may_change=True)
  memory_bytes: int | None = setting(None, may_change=True)
  timeout_s: float = setting(60.0, may_change=True)
  workers: int = setting(64, may_change=True)

  def __post_init__(self):
    checks.fields(
      self,
      max_turns=checks.COUNT,
      max_tokens=checks.COUNT,
      max_observation_tokens=checks.COUNT,
      max_image_tokens=checks.NOT_NEGATIVE,
      max_seconds=checks.POSITIVE,
      max_rows=checks.COUNT,
      memory_bytes=checks.BYTES,
      timeout_s=checks.POSITIVE,
      workers=checks.COUNT,
    )
    for name, value in named_values(self, _CHOICES).items():
      if value not in (known := _CHOICES[name]):
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    if self.memory_bytes is not None and self.isolation != "process":
      raise ValueError(
        f"memory_bytes is {self.memory_bytes} and isolation {self.isolation!r}; only a "
        'process has a limit of its own. Set isolation="process", or leave it out'
      )

  def new_tokens(self, action_tokens: int) -> int:
    """Returns the most tokens of a row after its first prompt.

    Args:
      action_tokens: most tokens of an action, after the only one of which an episode of
        one turn ends.
    """
    is_one = self.max_turns == 1
    return min(self.max_tokens, action_tokens) if is_one else self.max_tokens
