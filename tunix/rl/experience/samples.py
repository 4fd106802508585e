"""Files of some rollouts for people to read: JSON lines, and one page of all files.

    folder/000020.jsonl   the groups of batch 20 of the rollouts, one group a line
    folder/index.html     the best and the worst completion of each group of every file

The page needs no other file. The files depend only on the run: a run that is killed and
resumed writes the same files as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from tunix.data import image_parts
from tunix.report import samples as pages
from tunix.rl.common import Rollouts
from tunix.rl.env.env import Message
from tunix.rl.env.episode import Episode, Turn
from tunix.utils import checks, io

PAGE = "index.html"
_MOST_FILES = 200  # on the page; the newest files


class Samples:
  """Writes samples of a run's rollouts into a folder; see `RLLearner.with_samples`.

  Args:
    folder: the folder; it holds only the samples of this run.
    every_n_rollouts: number of batches of rollouts from one that is written to the
      next.
      The first batch is written.
    max_groups: number of groups that are written of a batch, from its front.

  Raises:
    ValueError: a count below 1.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    *,
    every_n_rollouts: int = 10,
    max_groups: int = 8,
  ):
    counts = {"every_n_rollouts": every_n_rollouts, "max_groups": max_groups}
    for name, value in counts.items():
      checks.number(name, value, checks.COUNT, whole=True)
    self.folder = pathlib.Path(folder)
    self._every, self._max_groups = every_n_rollouts, max_groups

  def add(
    self, rollouts: Rollouts, advantages: np.ndarray, *, number: int, step: int
  ) -> list[dict[str, Any]]:
    """Writes a batch of rollouts if `number` is a multiple of `every_n_rollouts`.

    Args:
      rollouts: P groups of G completions.
      advantages: [P * G] or [P * G, R], as the loss receives them. Advantages by token
        are shown by their mean.
      number: number of batches of rollouts before this one.
      step: number of updates of the policy before this batch.

    Returns: the groups that were written, as `groups_of` returns them.

    Raises:
      OSError: the disk is full or not writable; no file is damaged.
    """
    if number % self._every:
      return []
    for later, file in pages.files(self.folder):
      # A killed run may have written more batches than its checkpoint knows of.
      if later > number:
        file.unlink()
    groups = groups_of(rollouts, advantages, self._max_groups)
    head = {"rollout": number, "step": step}
    lines = "".join(json.dumps(head | g, default=str) + "\n" for g in groups)
    io.write_atomic(self.folder / f"{number:06}.jsonl", lines.encode())
    newest = pages.files(self.folder)[-_MOST_FILES:]
    page = pages.page([pages.read(file) for _, file in newest])
    io.write_atomic(self.folder / PAGE, page.encode())
    return groups


def groups_of(
  rollouts: Rollouts, advantages: np.ndarray, most: int
) -> list[dict[str, Any]]:
  """Returns the first groups of a batch of rollouts as JSON; NaN and infinity are null.

  Args:
    rollouts: P groups of G completions.
    advantages: [P * G] or [P * G, R].
    most: number of groups.

  Returns: groups with `group`, `prompt`, `columns`, `batch_reward` (the mean over the
  whole batch), `completions`. A completion has `text` (of an episode the conversation),
  `reward` (the total), `score` (after shaping), `rewards` by function, `advantage`,
  `tokens`, `finish_reason`, and of an episode `turns` with `reward`, `metrics`, `logs`.
  """
  size, batch = rollouts.group_size, rollouts.batch
  mean = _by_completion(np.asarray(advantages, np.float64), rollouts)
  total, scores = rollouts.rewards.total, rollouts.scores.reshape(-1)
  valid = total[np.isfinite(total)]

  def completion(row: int) -> dict[str, Any]:
    by_function = rollouts.rewards.by_function.items()
    episode = rollouts.episodes[row] if rollouts.episodes else None
    return {
      "text": rollouts.text[row] if episode is None else transcript(episode),
      "reward": _number(total[row]),
      "score": _number(scores[row]),
      "rewards": {name: _number(values[row]) for name, values in by_function},
      "advantage": _number(mean[row]),
      "tokens": int(rollouts.lengths[row]),
      "finish_reason": rollouts.finish_reasons[row],
      **({} if episode is None else {"turns": [_turn(t) for t in episode.turns]}),
    }

  return [
    {
      "group": group,
      "prompt": image_parts.named(prompt),
      "columns": {
        n: image_parts.shown(n, values[group]) for n, values in batch.extra.items()
      },
      "batch_reward": _number(valid.mean()) if valid.size else None,
      "completions": [completion(group * size + i) for i in range(size)],
    }
    for group, prompt in enumerate(batch.prompts[:most])
  ]


def transcript(episode: Episode) -> str:
  """Returns an episode as a person reads it: who said what, and its reward."""
  answers = iter(episode.turns)
  parts = []
  messages = episode.messages or [
    message for turn in episode.turns for message in _as_messages(turn)
  ]
  for message in messages:
    role = message["role"]
    turn = next(answers, None) if role == "assistant" else None
    head = f"[{role}]"
    if turn is not None and turn.reward:
      head = f"[{role}, reward {turn.reward:g}]"
    text = _content(message) if turn is None else turn.action.text
    parts.append(f"{head}\n{text}")
  if episode.failure is not None:
    parts.append(f"[failed]\n{episode.failure}")
  return "\n\n".join(parts)


def _content(message: Message) -> str:
  """Returns the text of a message; an image is its path or the kind of its data."""
  content = message.get("content") or ""
  if not isinstance(content, list):
    return str(content)
  return "".join(
    part.get("text", "")
    if part.get("type") != "image"
    else f"[image: {image_parts.name(part['image'])}]"
    for part in content
  )


def _turn(turn: Turn) -> dict[str, Any]:
  values = {"metrics": dict(turn.metrics), "logs": dict(turn.logs)}
  return {"reward": _number(turn.reward), **values}


def _as_messages(turn: Turn) -> list[Message]:
  """Returns an observation of ids and its action as messages."""
  ids = " ".join(map(str, turn.prompt.tolist()))
  observed = {"role": "observation", "content": f"ids {ids}"}
  return [observed, {"role": "assistant", "content": turn.action.text}]


def _by_completion(advantages: np.ndarray, rollouts: Rollouts) -> np.ndarray:
  if advantages.ndim == 1:
    return advantages
  mask, count = rollouts.completion_mask, len(rollouts.text)
  sums = np.where(mask, advantages, 0.0).reshape(count, -1).sum(1)
  return sums / np.maximum(1, rollouts.lengths)


def _number(value: Any) -> float | None:
  return float(value) if math.isfinite(value) else None
