"""A few completions of a run's samples: what a report shows of `samples/`."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from tunix.report.chart import told

_BATCHES, _GROUPS = 3, 3  # batches of rollouts, groups of each
_LONGEST = 1200  # characters of a text
_LONGEST_LINE = 8 << 20


def section(folder: pathlib.Path) -> str:
  """The first, a middle and the last batch of rollouts in `folder`, as HTML; "" where
  there is none."""
  files = sorted(
    (int(file.stem), file)
    for file in folder.glob("*.jsonl")
    if re.fullmatch(r"\d{6,}", file.stem)
  )
  if not files:
    return ""
  places = sorted({0, len(files) // 2, len(files) - 1})[-_BATCHES:]
  parts = [group for i in places for group in _batch(files[i][1])]
  note = '<p class="soft">The best and the worst completion of some groups of the '
  note += "first, a middle and the last batch of rollouts. All of them are in "
  return f"{note}<code>samples/index.html</code>.</p>{''.join(parts)}"


def _batch(file: pathlib.Path) -> Iterator[str]:
  with file.open("rb") as lines:
    for _ in range(_GROUPS):
      line = lines.readline(_LONGEST_LINE)
      try:
        yield _group(json.loads(line))
      except (ValueError, TypeError, KeyError, AttributeError):
        return  # cut short, or not written by us: the rest of the page stands


def _group(group: dict[str, Any]) -> str:
  rows = sorted(
    (row for row in group["completions"] if row["reward"] is not None),
    key=lambda row: row["reward"],
  )
  worst, best = rows[:1], rows[-1:]
  same = bool(rows) and worst[0]["reward"] == best[0]["reward"]
  shown = [("best", row) for row in best]
  shown += [] if same else [("worst", row) for row in worst]
  columns = "".join(
    f'<div class="soft">{_text(name)}: {_text(value)}</div>'
    for name, value in group["columns"].items()
  )
  sides = "".join(_side("" if same else kind, row) for kind, row in shown)
  return (
    f'<article><div class="top"><div class="soft">step {int(group["step"]):,}, prompt'
    f"</div><pre>{_prompt(group['prompt'])}</pre>{columns}</div>"
    f'<div class="pair">{sides}</div></article>'
  )


def _side(kind: str, row: dict[str, Any]) -> str:
  rewards = [f"{_text(name)} {_number(v)}" for name, v in row["rewards"].items()]
  facts = [f"reward {_number(row['reward'])}"]
  facts += rewards if len(rewards) > 1 else []
  facts += [f"{int(row['tokens']):,} tokens"] if "tokens" in row else []
  name = f"<b>{kind}</b> " if kind else ""
  return (
    f'<div class="side {kind}"><div class="soft">{name}{", ".join(facts)}</div>'
    f"<pre>{_text(row['text']) or '(empty)'}</pre></div>"
  )


def _prompt(prompt: Any) -> str:
  if isinstance(prompt, list):
    turns = [f"{turn['role']}: {turn['content']}" for turn in prompt]
    return _text("\n".join(turns))
  return _text(prompt)


def _text(value: Any) -> str:
  """Whatever a model or a file says, as text that cannot be anything else."""
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
  if len(text) > _LONGEST:
    text = f"{text[:_LONGEST]} ... ({len(text) - _LONGEST:,} characters more)"
  return escape(text)


def _number(value: Any) -> str:
  return "none" if value is None else told(float(value))
