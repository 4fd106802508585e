"""How likely a model finds given answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tunix.cli.commands.eval import scores
from tunix.cli.commands.eval.results import Metric, Section
from tunix.cli.commands.eval.scores import Row
from tunix.data import chat as chats
from tunix.data.chat import Rendered
from tunix.data.jsonl import JsonlRecords
from tunix.data.rows import fit_row
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer


def evaluate(
  model: Transformer,
  tokenizer: TokenizerAdapter,
  path: str,
  *,
  batch_size: int,
  max_length: int | None,
  chat: bool | None,
  template_args: dict[str, Any],
  shown: int,
) -> Section:
  """Log-likelihood of the trained tokens of a file of fine-tuning records.

  Args:
    model: a language model.
    tokenizer: of the model.
    path: of the file; see `tunix.data.records`.
    batch_size: rows at a time.
    max_length: tokens; longer examples are cut as in training. None: no limit.
    chat, template_args: see `tunix.data.chat.render`.
    shown: records on the page.

  Raises:
    FileNotFoundError, ValueError: something about the file is wrong.
  """
  records = JsonlRecords(path)
  records.validate()
  examples, cut = [], 0
  for index in range(len(records)):
    example = chats.render(
      records[index],
      tokenizer,
      where=records.where(index),
      chat=chat,
      template_kwargs=template_args,
    )
    fitted = example
    if max_length is not None:
      fitted = fit_row(example, max_length, "truncate", bos_id=tokenizer.bos_id())
    assert fitted is not None
    cut += fitted is not example
    examples.append(fitted)
  rows = [Row(e.tokens[:1], e.tokens[1:], e.mask[1:]) for e in examples]
  logps = scores.score(model, scores.logps_of_rows, rows, batch_size)
  tokens = np.asarray([int(row.mask.sum()) for row in rows])
  return Section(
    data=path,
    kind="log-likelihood",
    metrics=metrics(logps, tokens),
    records=[
      {"record": i, "tokens": int(n), "logp": float(logp)}
      for i, (n, logp) in enumerate(zip(tokens, logps))
    ],
    groups=[
      _group(example, float(logp), tokenizer)
      for example, logp in list(zip(examples, logps))[:shown]
    ],
    headline=("nats per token", -float(logps.sum()) / int(tokens.sum())),
    notes=[f"{cut} of {len(records)} records are cut at {max_length} tokens"]
    if cut
    else [],
  )


def metrics(logps: np.ndarray, tokens: np.ndarray) -> list[Metric]:
  """Counts, nats per token and perplexity.

  The mean is over all tokens; its standard error is that of a ratio of sums over
  records, which are drawn independently (tokens of one record are not).

  Args:
    logps: [N] nats, of whole records.
    tokens: [N] of each.
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
  text = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
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
