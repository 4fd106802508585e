"""Log-likelihood of given answers: nats per token and perplexity."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from tunix.cli.commands.eval import scores
from tunix.cli.commands.eval.results import Metric, Section
from tunix.cli.commands.eval.scores import Row, Task
from tunix.data import chat as chats
from tunix.data.chat import Rendered
from tunix.data.reading import files, stored
from tunix.data.rows import fit_row
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import terminal


def evaluate(task: Task, *, max_length: int | None) -> Section:
  """Measures the log-likelihood of the trained tokens of fine-tuning records.

  Args:
    task: a language model and a file of records; see `tunix.data.records`.
    max_length: tokens; longer examples are cut as in training. None: no limit.

  Raises:
    FileNotFoundError, ValueError: the file is missing, or has an invalid record.
  """
  tokenizer, records = task.tokenizer, files.open_file(task.path)
  records.validate()
  examples, rows, cut = [], [], 0
  for index in range(len(records)):
    render = functools.partial(
      chats.render,
      records[index],
      tokenizer,
      where=records.where(index),
      chat=task.chat,
      template_kwargs=task.template_args,
      images=task.images,
      folder=stored.folder(records, index),
    )
    example = render()
    pictures, example = example.pictures, example._replace(pictures=())
    fitted = example
    if max_length is not None:
      fitted = fit_row(example, max_length, "truncate", bos_id=tokenizer.bos_id())
    assert fitted is not None
    cut += fitted is not example
    examples.append(fitted)
    ids, mask = fitted.tokens, fitted.mask
    images = task.images_of(pictures, render, ids, records.where(index))
    rows.append(Row(ids[:1], ids[1:], mask[1:], images))
  logps = scores.score(task.model, scores.logps_of_rows, rows, task.batch_size)
  tokens = np.asarray([int(row.mask.sum()) for row in rows])
  return Section(
    data=task.path,
    kind="log-likelihood",
    metrics=metrics(logps, tokens),
    records=[
      {"record": i, "tokens": int(n), "logp": float(logp)}
      for i, (n, logp) in enumerate(zip(tokens, logps))
    ],
    groups=[
      _group(example, float(logp), tokenizer)
      for example, logp in list(zip(examples, logps))[: task.shown]
    ],
    headline=("nats per token", -float(logps.sum()) / int(tokens.sum())),
    notes=[
      f"{cut} of {terminal.counted(len(records), 'record')} cut at {max_length} tokens"
    ]
    if cut
    else [],
  )


def metrics(logps: np.ndarray, tokens: np.ndarray) -> list[Metric]:
  """Returns counts, nats per token and perplexity.

  The mean is over all tokens. Its standard error is that of a ratio of sums over
  records, because records are independent and the tokens of a record are not.

  Args:
    logps: [N] nats, one of each record.
    tokens: [N] numbers of trained tokens.
  """
  logps, count = np.asarray(logps, np.float64), int(tokens.sum())
  nats = -float(logps.sum()) / count
  residuals = -logps - nats * tokens
  n = len(tokens)
  spread = math.sqrt(float(np.sum(residuals**2)) * n / (n - 1)) if n > 1 else None
  error = None if spread is None else spread / count
  perplexity = math.exp(nats) if nats < 700 else math.inf
  return [
    Metric(name="records", value=n),
    Metric(name="tokens", value=count),
    Metric(name="nats per token", value=nats, error=error),
    Metric(
      name="perplexity",
      value=perplexity,
      error=None if error is None else perplexity * error,
    ),
    Metric(name="nats per record", value=-float(logps.mean())),
  ]


def _group(
  example: Rendered, logp: float, tokenizer: TokenizerAdapter
) -> dict[str, Any]:
  start, count = example.prompt_length, int(example.mask.sum())

  def text(ids):
    return tokenizer.decode(ids, skip_special_tokens=False)

  return {
    "prompt": text(example.tokens[:start]),
    "columns": {},
    "completions": [
      {
        "text": text(example.tokens[start:]),
        "reward": -logp / count,
        "what": "nats per token",
        "name": "record",
        "rewards": {},
        "tokens": count,
      }
    ],
  }
