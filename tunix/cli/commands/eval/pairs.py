"""Pairwise accuracy: how often a model prefers the chosen response of a pair."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tunix.cli.commands.eval import results, scores
from tunix.cli.commands.eval.results import Metric, Section
from tunix.cli.commands.eval.scores import Images, Row, Task
from tunix.data import render
from tunix.data.chat import Rendered
from tunix.data.reading import files, stored
from tunix.data.reading.stored import Records
from tunix.data.records import PAIRS
from tunix.data.rows import fit_apart
from tunix.models.transformer.model import Transformer
from tunix.utils import terminal


def evaluate(
  task: Task,
  *,
  reference: Transformer | None,
  per_token: bool,
  max_length: int | None,
) -> Section:
  """Measures the pairwise accuracy on a file of preference pairs.

  A reward model scores prompt and response together. A policy's score is the
  log-probability of the response, minus the reference's if there is one (DPO's implicit
  reward divided by beta). A tie counts one half. Pairs of equal responses are counted
  and otherwise ignored.

  Args:
    task: a language model or a reward model of one score, and a file of pairs; see
      `tunix.data.records`.
    reference: a reference model of a policy; None: no reference.
    per_token: if True, a policy's score is divided by the length of the response.
    max_length: tokens of prompt and response. A longer response loses its end, a longer
      prompt its beginning. None: no limit.

  Raises:
    FileNotFoundError, ValueError: the file is missing or has an invalid record, or the
      options do not fit the model.
  """
  model, path = task.model, task.path
  is_reward = model.config.num_scores is not None
  if is_reward and (reference is not None or per_token):
    option = "--reference" if reference is not None else "--per_token"
    raise ValueError(
      f"{option} needs the log-probabilities of a policy, but MODEL is a reward model; "
      "omit it"
    )
  records = files.open_file(path, PAIRS)
  records.validate()
  read, images, cut = _read(records, task, max_length)
  used = [i for i, pair in enumerate(read) if not render.are_equal(pair)]
  if not used:
    raise ValueError(f"{path} has only pairs of equal responses; expected others")
  rows = [
    Row(pair.prompt, response, mask, seen)
    for pair, seen in zip(read, images)
    for response, mask in zip(pair.completions, pair.masks)
  ]
  of = scores.rewards_of_rows if is_reward else scores.logps_of_rows
  values = scores.score(model, of, rows, task.batch_size).astype(np.float64)
  if reference is not None:
    values -= scores.score(reference, of, rows, task.batch_size)
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
    groups=[_group(read[i], table[i], what, task) for i in used[: task.shown]],
    headline=("accuracy", measured[1].value),
    notes=_notes(len(records) - len(used), cut, max_length),
  )


def metrics(table: np.ndarray, what: str) -> list[Metric]:
  """Returns accuracy and means of scores.

  Args:
    table: [N, 2], the scores of the chosen and the rejected responses.
    what: name of the scores.
  """
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
  records: Records, task: Task, max_length: int | None
) -> tuple[list[Rendered], list[Images | None], int]:
  """Returns the pairs, cut to the limit, their images, and the number of cut pairs."""
  pairs, images, cut = [], [], 0
  for index in range(len(records)):
    again = functools.partial(
      render.render_record,
      records[index],
      PAIRS,
      task.tokenizer,
      where=records.where(index),
      chat=task.chat,
      template_kwargs=task.template_args,
      images=task.images,
      folder=stored.folder(records, index),
    )
    full = again()
    pictures, full = full.pictures, full._replace(pictures=())
    fitted = full
    if max_length is not None:
      longest = min(max(map(len, full.completions)), max_length - 1)
      fitted = fit_apart(
        full,
        max_prompt_length=max_length - longest,
        max_completion_length=longest,
        bos_id=task.tokenizer.bos_id(),
      )
    assert fitted is not None
    cut += fitted is not full
    pairs.append(fitted)
    images.append(task.images_of(pictures, again, fitted.prompt, records.where(index)))
  return pairs, images, cut


def _notes(equal: int, cut: int, max_length: int | None) -> list[str]:
  notes = []
  if equal:
    notes.append(f"{terminal.counted(equal, 'pair of equal responses')} ignored")
  if cut:
    notes.append(f"{terminal.counted(cut, 'pair')} cut at {max_length} tokens")
  return notes


def _group(pair: Rendered, values: np.ndarray, what: str, task: Task) -> dict[str, Any]:
  def text(ids):
    return task.tokenizer.decode(ids, skip_special_tokens=False)

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
