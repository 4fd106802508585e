"""Whether a reward model, or a policy, prefers the chosen response of a pair."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunix.cli.commands.eval import results, scores
from tunix.cli.commands.eval.results import Metric, Section
from tunix.cli.commands.eval.scores import Row
from tunix.data import render
from tunix.data.chat import Rendered
from tunix.data.jsonl import JsonlRecords
from tunix.data.records import PAIRS
from tunix.data.rows import fit_apart
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer


def evaluate(
  model: Transformer,
  tokenizer: TokenizerAdapter,
  path: str,
  *,
  reference: Transformer | None,
  per_token: bool,
  batch_size: int,
  max_length: int | None,
  chat: bool | None,
  template_args: dict[str, Any],
  shown: int,
) -> Section:
  """Pairwise accuracy on a file of preference pairs.

  A reward model's score is that of the whole row. A policy's is the log-probability of
  the response, less the reference's where there is one (DPO's implicit reward up to
  beta). A tie counts one half. Pairs of equal responses are left out and counted.

  Args:
    model: a language model, or a reward model (of one score).
    tokenizer: of the model.
    path: of the file; see `tunix.data.records`.
    reference: a language model, for a policy.
    per_token: divide a policy's score by the response's length.
    batch_size: rows at a time.
    max_length: tokens of prompt and response; longer responses lose their end, longer
      prompts their beginning. None: no limit.
    chat, template_args: see `tunix.data.render.tokenise`.
    shown: pairs on the page.

  Raises:
    FileNotFoundError, ValueError: something about file or options is wrong.
  """
  is_reward = model.config.num_scores is not None
  if is_reward and (reference is not None or per_token):
    what = "--reference" if reference is not None else "--per_token"
    raise ValueError(
      f"{what} is for the log-probabilities of a policy, and this is a reward model: "
      "leave it out"
    )
  records = JsonlRecords(path, PAIRS)
  records.validate()
  read, cut = _read(records, tokenizer, max_length, chat, template_args)
  used = [i for i, pair in enumerate(read) if not render.are_equal(pair)]
  if not used:
    raise ValueError(f"{path}: the responses of every pair are equal")
  rows = [Row(a.prompt, r, m) for a in read for r, m in zip(a.completions, a.masks)]
  of = scores.rewards_of_rows if is_reward else scores.logps_of_rows
  values = scores.score(model, of, rows, batch_size).astype(np.float64)
  if reference is not None:
    values -= scores.score(reference, of, rows, batch_size)
  if per_token:
    values /= [max(1, int(row.mask.sum())) for row in rows]
  table = values.reshape(-1, 2)
  what = "score" if is_reward else "log-prob" + (" per token" if per_token else "")
  if reference is not None:
    what += " above the reference"
  measured = metrics(table[used], what)
  return Section(
    data=path,
    kind="pairwise accuracy",
    metrics=measured,
    records=[
      {"record": i, "chosen": float(c), "rejected": float(r), "used": i in set(used)}
      for i, (c, r) in enumerate(table)
    ],
    groups=[_group(read[i], table[i], what, tokenizer) for i in used[:shown]],
    headline=("accuracy", measured[1].value),
    notes=_notes(len(records) - len(used), cut, max_length),
  )


def metrics(table: np.ndarray, what: str) -> list[Metric]:
  """Accuracy and means of scores [N, 2] of chosen and rejected responses."""
  margins = table[:, 0] - table[:, 1]
  return [
    Metric(name="pairs", value=len(margins)),
    results.mean("accuracy", (np.sign(margins) + 1) / 2),
    Metric(name="ties", value=int((margins == 0).sum())),
    results.mean(f"margin, {what}", margins),
    results.mean(f"chosen, {what}", table[:, 0]),
    results.mean(f"rejected, {what}", table[:, 1]),
  ]


def _read(
  records: JsonlRecords,
  tokenizer: TokenizerAdapter,
  max_length: int | None,
  chat: bool | None,
  template_args: dict[str, Any],
) -> tuple[list[Rendered], int]:
  """The pairs within the limit, and how many of them were cut."""
  pairs, cut = [], 0
  for index in range(len(records)):
    full = render.render_record(
      records[index],
      PAIRS,
      tokenizer,
      where=records.where(index),
      chat=chat,
      template_kwargs=template_args,
    )
    fitted = full
    if max_length is not None:
      longest = min(max(map(len, full.completions)), max_length - 1)
      fitted = fit_apart(
        full,
        max_prompt_length=max_length - longest,
        max_completion_length=longest,
        bos_id=tokenizer.bos_id(),
      )
    assert fitted is not None
    cut += fitted is not full
    pairs.append(fitted)
  return pairs, cut


def _notes(equal: int, cut: int, max_length: int | None) -> list[str]:
  notes = []
  if equal:
    notes.append(f"{equal} pairs of equal responses are left out")
  if cut:
    notes.append(f"{cut} pairs are cut at {max_length} tokens")
  return notes


def _group(
  pair: Rendered, values: np.ndarray, what: str, tokenizer: TokenizerAdapter
) -> dict[str, Any]:
  text = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
  return {
    "prompt": text(pair.prompt),
    "columns": {},
    "completions": [
      {
        "text": text(response),
        "reward": float(value),
        "what": what,
        "name": name,
        "rewards": {},
        "tokens": len(response),
      }
      for name, response, value in zip(PAIRS.completions, pair.completions, values)
    ],
  }
