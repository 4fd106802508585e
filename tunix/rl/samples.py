"""Some rollouts as files to look at: JSON lines, and one HTML page over all of them.

    folder/000020.jsonl   the groups of the rollouts number 20, one a line
    folder/index.html     every such file, best and worst completion of each group

The page needs nothing besides itself. What a run writes follows from the run alone:
killed and resumed, it leaves the same files as one that was not.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.rl.common import Rollouts
from tunix.utils import checks, io

PAGE = "index.html"
_FILE = re.compile(r"(\d{6,})\.jsonl")
_PLACE = "/*DATA*/"  # in the template
_SHOWN = 200  # newest files on the page
_LONGEST = 4000  # characters of a text on the page; the JSON lines have all of it


class Samples:
  """Writes samples of a run into a folder; see `RLLearner.with_samples`.

  Args:
    folder: of this run's samples alone.
    every_n_rollouts: batches of rollouts from one that is written to the next; the
      first one is.
    max_groups: groups of a batch that are written, from its front.

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
    """Writes the batch of rollouts `number`, if its turn has come.

    Args:
      rollouts: P groups of G completions.
      advantages: [P * G] or [P * G, R] as they are learnt from; of those by token the
        mean is shown.
      number: batches of rollouts before it.
      step: updates of the policy before it.

    Returns: the groups that were written, as `groups_of` has them.

    Raises:
      OSError: the disk is full or not writable; no file is damaged.
    """
    if number % self._every:
      return []
    for later, file in self._files():
      if later > number:
        file.unlink()  # of a run that was killed and goes on from before them
    groups = groups_of(rollouts, advantages, self._max_groups)
    head = {"rollout": number, "step": step}
    lines = "".join(json.dumps(head | g, default=str) + "\n" for g in groups)
    io.write_atomic(self.folder / f"{number:06}.jsonl", lines.encode())
    files = [file for _, file in self._files()][-_SHOWN:]
    io.write_atomic(self.folder / PAGE, page(files).encode())
    return groups

  def _files(self) -> list[tuple[int, pathlib.Path]]:
    if not self.folder.is_dir():
      return []
    named = [(_FILE.fullmatch(file.name), file) for file in self.folder.iterdir()]
    return sorted((int(match[1]), file) for match, file in named if match)


def groups_of(
  rollouts: Rollouts, advantages: np.ndarray, most: int
) -> list[dict[str, Any]]:
  """The first groups of rollouts, as JSON; what is not finite is null.

  Returns: `group`, `prompt`, `columns`, `batch_reward` (mean over the whole batch),
  and `completions` with `text`, `reward` (in total), `score` (as it is learnt from),
  `rewards` by function, `advantage`, `tokens`, `finish_reason`.
  """
  size, batch = rollouts.group_size, rollouts.batch
  mean = _by_row(np.asarray(advantages, np.float64), rollouts.completion_mask)
  total, scores = rollouts.rewards.total, rollouts.scores.reshape(-1)
  valid = total[np.isfinite(total)]

  def completion(row: int) -> dict[str, Any]:
    by_function = rollouts.rewards.by_function.items()
    return {
      "text": rollouts.text[row],
      "reward": _number(total[row]),
      "score": _number(scores[row]),
      "rewards": {name: _number(values[row]) for name, values in by_function},
      "advantage": _number(mean[row]),
      "tokens": int(rollouts.lengths[row]),
      "finish_reason": rollouts.finish_reasons[row],
    }

  return [
    {
      "group": group,
      "prompt": prompt,
      "columns": {name: values[group] for name, values in batch.columns.items()},
      "batch_reward": _number(valid.mean()) if valid.size else None,
      "completions": [completion(group * size + i) for i in range(size)],
    }
    for group, prompt in enumerate(batch.prompts[:most])
  ]


def page(files: Sequence[pathlib.Path]) -> str:
  """The HTML page of some files of samples, in order."""
  batches = []
  for file in files:
    groups = [json.loads(line) for line in file.read_text().splitlines()]
    first = groups[0]
    head = {name: first[name] for name in ("rollout", "step", "batch_reward")}
    title = f"rollouts {head['rollout']} · step {head['step']} · mean reward"
    batches.append({"title": title, **head, "groups": groups})
  return page_of(batches)


def page_of(batches: Sequence[dict[str, Any]]) -> str:
  """The HTML page of batches of groups.

  Args:
    batches: `title` and `batch_reward` (a number or None, shown behind it) and `groups`
      as `groups_of` makes them. Completions need `text`, `reward` and `rewards` alone;
      `name` stands in the place of "best" and "worst", `what` in that of "reward".
  """
  template = importlib.resources.files("tunix.rl").joinpath("samples.html").read_text()
  shown = [
    batch | {"groups": [_shown(group) for group in batch["groups"]]}
    for batch in batches
  ]
  # JSON is ASCII here; without "<" no text can end the script that it stands in.
  data = json.dumps(shown).replace("<", "\\u003c")
  return template.replace(_PLACE, data)


def _shown(group: dict[str, Any]) -> dict[str, Any]:
  """A group with its best and worst completion alone, and all rewards."""
  rows = group["completions"]
  known = [row for row in rows if row["reward"] is not None] or rows
  order = sorted(known, key=lambda row: row["reward"] or 0.0)
  best, worst = order[-1], order[0]
  same = best["reward"] == worst["reward"]
  return {
    "prompt": _clipped(group["prompt"]),
    "columns": {name: _clipped(value) for name, value in group["columns"].items()},
    "rewards": [row["reward"] for row in rows],
    "shown": [
      row | {"text": _clipped(row["text"])}
      for row in ([best] if same else [best, worst])
    ],
  }


def _clipped(value: Any) -> Any:
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
  if len(text) <= _LONGEST:
    return value
  return f"{text[:_LONGEST]} ... ({len(text) - _LONGEST:,} characters more)"


def _by_row(advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
  if advantages.ndim == 1:
    return advantages
  return np.where(mask, advantages, 0.0).sum(1) / np.maximum(1, mask.sum(1))


def _number(value: Any) -> float | None:
  return float(value) if math.isfinite(value) else None
