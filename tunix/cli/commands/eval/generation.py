"""Completions of prompts, scored by reward functions: mean rewards and pass@k."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.cli.commands.eval import results, scores
from tunix.cli.commands.eval.results import Metric, Section
from tunix.cli.commands.eval.scores import Task
from tunix.data import image_parts
from tunix.data.batching.prompts import PROMPTS, PromptText
from tunix.data.reading import files
from tunix.data.records import (
  IMAGE_TOKENS_COLUMN,
  IMAGES_COLUMN,
  PROMPT_IDS_COLUMN,
  PROMPT_ROWS,
)
from tunix.data.scan import scan
from tunix.data.source import Source
from tunix.generate.engine_sampler import sampler_of
from tunix.rl.experience.evaluation import pass_at_k
from tunix.rl.reward.rewards import RewardManager, RewardOutput
from tunix.utils import coordination


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
  """Completions of P prompts, G of each.

  Attributes:
    rows: [P], the rows of the file.
    prompts: [P], the rendered prompts.
    text: [P * G], the completions.
    tokens: [P * G], the numbers of tokens.
    finish_reasons: [P * G].
    rewards: the rewards of all completions; None without reward functions.
  """

  rows: Sequence[dict[str, Any]]
  prompts: Sequence[str]
  text: Sequence[str]
  tokens: Sequence[int]
  finish_reasons: Sequence[str]
  rewards: RewardOutput | None

  @property
  def size(self) -> int:
    """The number of completions of each prompt (G)."""
    return len(self.text) // len(self.prompts)


def evaluate(
  task: Task,
  *,
  rewards: RewardManager | None,
  threshold: float,
  ks: Sequence[int],
  options: dict[str, Any],
) -> Section:
  """Samples completions of a file of prompts, and measures rewards and pass@k.

  Several processes share the batches, and sample what one process would sample.

  Args:
    task: a language model and a file of prompts with further columns, as for RL.
    rewards: reward functions; None: completions are written without rewards.
    threshold: a completion passes if its reward is at least this.
    ks: the k of pass@k; each at most the number of completions of a prompt.
    options: options of the sampler, with `max_generation_steps`.

  Raises:
    FileNotFoundError, ValueError: the file is missing or has an invalid record, or an
      option is invalid.
    TypeError: a function needs a column that the file lacks.
  """
  source = Source(
    records=files.open_file(task.path, PROMPT_ROWS),
    kind=PROMPT_ROWS,
    tokenizer=task.tokenizer,
    layout=PromptText(),
    chat=task.chat,
    template_kwargs=task.template_args,
    images=task.images,
  )
  elements: dict[int, dict[str, Any]] = {}
  scan(source, kept=elements)
  rows = list(elements.values())
  prompts = [row[PROMPTS] for row in rows]
  inputs = [row.pop(PROMPT_IDS_COLUMN, row[PROMPTS]) for row in rows]
  room = max(row.pop(IMAGE_TOKENS_COLUMN, 0) for row in rows)
  sources = [row[IMAGES_COLUMN] for row in rows] if room else []
  text, tokens, reasons = _sample(task, inputs, sources, room, options)
  size = len(text) // len(rows)
  scored = None
  if rewards is not None:
    every = [row for row in rows for _ in range(size)]
    columns = {n: [row[n] for row in every] for n in rows[0] if n != PROMPTS}
    scored = rewards.compute(
      [prompt for prompt in prompts for _ in range(size)], text, columns
    )
  answers = Answers(
    rows=rows,
    prompts=prompts,
    text=text,
    tokens=tokens,
    finish_reasons=reasons,
    rewards=scored,
  )
  measured = metrics(answers, threshold, ks)
  groups = groups_of(answers)
  return Section(
    data=task.path,
    kind="generation",
    metrics=measured,
    records=[{"record": i, **group} for i, group in enumerate(groups)],
    groups=groups[: task.shown],
    headline=_headline(answers, measured),
    notes=[] if scored is None else scored.problems(),
  )


def _sample(
  task: Task,
  prompts: Sequence[Any],
  sources: Sequence[Sequence[str]],
  room: int,
  options: dict[str, Any],
) -> tuple[list[str], list[int], list[str]]:
  """Returns texts, numbers of tokens and finish reasons of all completions.

  Args:
    task: the model.
    prompts: texts or token ids.
    sources: images of each prompt; empty without images.
    room: most image tokens of a prompt.
    options: options of the sampler.
  """
  sampler = sampler_of(task.model, task.tokenizer, frozen=True)
  batch_size = task.batch_size

  def images(number: int) -> Any:
    reader = task.images
    assert reader is not None
    pictures = reader.open(sources[number], None, f"prompt {number}")
    return reader.prompt(pictures, room)

  def answers(starts: Sequence[int]) -> list[Any]:
    drawn = []
    for start in starts:
      part = list(prompts[start : start + batch_size])
      seen = {}
      if sources:
        seen["images"] = [images(start + i) for i in range(len(part))]
      # Samples do not depend on the size of a batch.
      out = sampler(part, first_prompt=start, **seen, **options)
      counts = [len(row) for row in out.tokens]
      drawn.append(list(zip(out.text, counts, out.finish_reasons)))
    return drawn

  starts = range(0, len(prompts), batch_size)
  batches = coordination.deal("answers", starts, answers, scores.PATIENCE_S)
  text, tokens, reasons = zip(*itertools.chain.from_iterable(batches))
  return list(text), list(tokens), list(reasons)


def metrics(answers: Answers, threshold: float, ks: Sequence[int]) -> list[Metric]:
  """Returns lengths, rewards by function and pass@k.

  Standard errors are over prompts. If a reward function fails on a completion, rewards
  and pass@k ignore its prompt.
  """
  size = answers.size

  def table(values):
    return np.asarray(values, np.float64).reshape(-1, size)

  ended = table([reason != "length" for reason in answers.finish_reasons])
  out = [
    Metric(name="prompts", value=len(answers.prompts)),
    Metric(name="completions", value=len(answers.text)),
    results.mean("tokens", table(answers.tokens).mean(1)),
    results.mean("ended by themselves", ended.mean(1)),
  ]
  if answers.rewards is None:
    return out
  valid = table(answers.rewards.valid).all(1)
  out.append(Metric(name="prompts without reward", value=int((~valid).sum())))
  if not valid.any():
    return out
  total = table(answers.rewards.total)[valid]
  out.append(results.mean("reward", total.mean(1)))
  if len(answers.rewards.by_function) > 1:
    out += [
      results.mean(f"reward, {name}", table(values)[valid].mean(1))
      for name, values in answers.rewards.by_function.items()
    ]
  passed = total >= threshold
  for k in ks:
    # `pass_at_k` averages over prompts, so each prompt is a table of one row.
    by_prompt = np.asarray([pass_at_k(row[None], k) for row in passed])
    out.append(results.mean(f"pass@{k}", by_prompt))
  return out


def groups_of(answers: Answers) -> list[dict[str, Any]]:
  """Returns prompts with their completions, as `tunix.report.samples` shows them."""
  size, rewards = answers.size, answers.rewards

  def completion(at: int) -> dict[str, Any]:
    by_function = {} if rewards is None else rewards.by_function
    total = np.nan if rewards is None else rewards.total[at]
    return {
      "text": answers.text[at],
      "reward": float(total) if np.isfinite(total) else None,
      "rewards": {
        name: float(values[at]) if np.isfinite(values[at]) else None
        for name, values in by_function.items()
      },
      "tokens": answers.tokens[at],
      "finish_reason": answers.finish_reasons[at],
    }

  return [
    {
      "prompt": prompt,
      "columns": {
        name: image_parts.shown(name, value)
        for name, value in row.items()
        if name != PROMPTS
      },
      "completions": [completion(i * size + j) for j in range(size)],
    }
    for i, (prompt, row) in enumerate(zip(answers.prompts, answers.rows))
  ]


def _headline(answers: Answers, measured: Sequence[Metric]) -> tuple[str, float]:
  name = "tokens" if answers.rewards is None else "reward"
  value = next((m.value for m in measured if m.name == name), float("nan"))
  return f"mean {name}", value
