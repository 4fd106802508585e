"""What a model answers, judged by scoring functions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.cli.commands.eval import results, scores
from tunix.cli.commands.eval.results import Metric, Section
from tunix.data.jsonl import JsonlRecords
from tunix.data.prompts import PROMPTS, PromptText
from tunix.data.records import PROMPT_ROWS
from tunix.data.scan import scan
from tunix.data.source import Source
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer
from tunix.rl.evaluation import pass_at_k
from tunix.rl.rewards import RewardManager, RewardOutput
from tunix.utils import coordination


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
  """Completions of P prompts, G each.

  Attributes:
    rows: of the file.
    prompts: as the model saw them.
    text: [P * G].
    tokens: [P * G], counts.
    finish_reasons: [P * G].
    rewards: of all of them; None without scoring functions.
  """

  rows: Sequence[dict[str, Any]]
  prompts: Sequence[str]
  text: Sequence[str]
  tokens: Sequence[int]
  finish_reasons: Sequence[str]
  rewards: RewardOutput | None

  @property
  def size(self) -> int:
    """G."""
    return len(self.text) // len(self.prompts)


def evaluate(
  model: Transformer,
  tokenizer: TokenizerAdapter,
  path: str,
  *,
  rewards: RewardManager | None,
  threshold: float,
  ks: Sequence[int],
  batch_size: int,
  max_new_tokens: int,
  options: dict[str, Any],
  chat: bool | None,
  template_args: dict[str, Any],
  shown: int,
) -> Section:
  """Completions of a file of prompts, with their rewards and pass@k.

  Several processes share the batches; what is drawn is what one process draws.

  Args:
    model: a language model.
    tokenizer: of the model.
    path: of the file: prompts with further columns, as for RL.
    rewards: scoring functions; None: completions are only written down.
    threshold: a completion passes when its reward is at least this.
    ks: of pass@k; each at most the samples of a prompt.
    batch_size: prompts at a time.
    max_new_tokens: of a completion.
    options: of the sampler.
    chat, template_args: see `tunix.data.chat.prompt_text`.
    shown: prompts on the page.

  Raises:
    FileNotFoundError, ValueError: something about file or options is wrong.
    TypeError: a function needs a column that the file lacks.
  """
  source = Source(
    records=JsonlRecords(path, PROMPT_ROWS),
    kind=PROMPT_ROWS,
    tokenizer=tokenizer,
    layout=PromptText(),
    chat=chat,
    template_kwargs=template_args,
  )
  kept: dict[int, dict[str, Any]] = {}
  scan(source, kept=kept)
  rows = list(kept.values())
  prompts = [row[PROMPTS] for row in rows]
  text, tokens, reasons = _sample(
    Sampler(model, tokenizer), prompts, batch_size, max_new_tokens, options
  )
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
    data=path,
    kind="generation",
    metrics=measured,
    records=[{"record": i, **group} for i, group in enumerate(groups)],
    groups=groups[:shown],
    headline=_headline(answers, measured),
    notes=[] if scored is None else scored.problems(),
  )


def _sample(
  sampler: Sampler,
  prompts: Sequence[str],
  batch_size: int,
  max_new_tokens: int,
  options: dict[str, Any],
) -> tuple[list[str], list[int], list[str]]:
  def answers(starts: Sequence[int]) -> list[Any]:
    drawn = []
    for start in starts:
      out = sampler(
        list(prompts[start : start + batch_size]),
        max_generation_steps=max_new_tokens,
        first_prompt=start,  # what is drawn does not depend on the size of a batch
        **options,
      )
      counts = [len(row) for row in out.tokens]
      drawn.append(list(zip(out.text, counts, out.finish_reasons)))
    return drawn

  starts = range(0, len(prompts), batch_size)
  batches = coordination.deal("answers", starts, answers, scores.PATIENCE_S)
  text, tokens, reasons = zip(*itertools.chain.from_iterable(batches))
  return list(text), list(tokens), list(reasons)


def metrics(answers: Answers, threshold: float, ks: Sequence[int]) -> list[Metric]:
  """Rewards by function, pass@k, lengths.

  Standard errors are over prompts. Prompts with a completion that has no reward (its
  function failed) are left out of rewards and pass@k.
  """
  size = answers.size
  table = lambda values: np.asarray(values, np.float64).reshape(-1, size)
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
    # pass@k is a mean over prompts; one prompt's is that of a table of one row.
    by_prompt = np.asarray([pass_at_k(row[None], k) for row in passed])
    out.append(results.mean(f"pass@{k}", by_prompt))
  return out


def groups_of(answers: Answers) -> list[dict[str, Any]]:
  """Prompts with their completions, as `samples.page_of` shows them."""
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
      "columns": {name: value for name, value in row.items() if name != PROMPTS},
      "completions": [completion(i * size + j) for j in range(size)],
    }
    for i, (prompt, row) in enumerate(zip(answers.prompts, answers.rows))
  ]


def _headline(answers: Answers, measured: Sequence[Metric]) -> tuple[str, float]:
  name = "tokens" if answers.rewards is None else "reward"
  value = next((m.value for m in measured if m.name == name), float("nan"))
  return f"mean {name}", value
