"""The data of completions on a page, and the page that holds nothing else.

A batch is a dict with `title`, `batch_reward` (a number or None, shown behind the
title), `groups`, and `step` if the page shall draw the mean reward over the batches. A
group is a dict with `prompt`, `columns` and `completions`. A completion needs `text`,
`reward` and `rewards`; `score`, `advantage`, `tokens` and `finish_reason` are optional;
`name` replaces "best" and "worst", and `what` replaces "reward".
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from tunix.report import document, pictures

_LONGEST = 4000  # characters of a text on the page of samples
_LONGEST_IN_REPORT = 1200
_LONGEST_LINE = 8 << 20  # bytes; a longer line is not read
_BATCHES, _GROUPS = 3, 3  # of a report: batches of rollouts, and groups of each
_FILE = re.compile(r"(\d{6,})\.jsonl")


def files(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
  """Returns the files of samples in a folder with their rollout numbers, in order."""
  if not folder.is_dir():
    return []
  matches = [(_FILE.fullmatch(file.name), file) for file in folder.iterdir()]
  numbered = [(int(match[1]), file) for match, file in matches if match]
  return sorted((number, file) for number, file in numbered if file.is_file())


def read(file: pathlib.Path, most: int | None = None) -> dict[str, Any]:
  """Reads the batch of one file.

  Args:
    file: one group a line, as `tunix.rl.experience.samples.Samples` writes them.
    most: number of groups that are read; None: all.

  Returns: the batch. A damaged line ends it, so `groups` may be empty.
  """
  groups = []
  with file.open("rb") as lines:
    while (most is None or len(groups) < most) and (
      line := lines.readline(_LONGEST_LINE)
    ):
      try:
        group = json.loads(line)
        _shown(group, 1)
      except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        RecursionError,
      ):
        break
      groups.append(group)
  first = groups[0] if groups else {}
  step, rollout = first.get("step", 0), first.get("rollout", int(file.stem))
  title = f"rollouts {rollout} · step {step} · mean reward"
  head = {"rollout": rollout, "step": step, "batch_reward": first.get("batch_reward")}
  return {"title": title, **head, "groups": groups}


def page(batches: Sequence[dict[str, Any]]) -> str:
  """Returns the HTML page of batches."""
  return document.html(
    "Samples", [document.section("Samples", _part(batches, _LONGEST))]
  )


def parts(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns a report's excerpt of a folder of samples; [] if the folder has none."""
  numbered = files(folder)
  places = sorted({0, len(numbered) // 2, len(numbered) - 1}) if numbered else []
  batches = [read(numbered[place][1], _GROUPS) for place in places[-_BATCHES:]]
  batches = [batch for batch in batches if batch["groups"]]
  if not batches:
    return []
  note = document.text(
    "The best and the worst completion of some groups of the first, a middle and the "
    "last batch of rollouts. samples/index.html shows all of them.",
    style="soft",
  )
  return [note, _part(batches, _LONGEST_IN_REPORT)]


def _part(batches: Sequence[dict[str, Any]], longest: int) -> dict[str, Any]:
  shown = [
    batch | {"groups": [_with_pictures(group, longest) for group in batch["groups"]]}
    for batch in batches
  ]
  return {"kind": "samples", "batches": shown}


def _with_pictures(group: dict[str, Any], longest: int) -> dict[str, Any]:
  images = pictures.thumbnails(group["columns"].get("images"))
  return _shown(group, longest) | ({"images": images} if images else {})


def _shown(group: dict[str, Any], longest: int) -> dict[str, Any]:
  """Returns a group with all rewards, and its best and worst completion."""
  rows = group["completions"]
  with_reward = [row for row in rows if row["reward"] is not None] or rows
  order = sorted(with_reward, key=lambda row: row["reward"] or 0.0)
  best, worst = order[-1], order[0]
  is_equal = best["reward"] == worst["reward"]
  columns = group["columns"].items()
  return {
    "prompt": document.clipped(group["prompt"], longest),
    "columns": {name: document.clipped(value, longest) for name, value in columns},
    "rewards": [row["reward"] for row in rows],
    "shown": [
      row | {"text": document.clipped(row["text"], longest)}
      for row in ([best] if is_equal else [best, worst])
    ],
  }
