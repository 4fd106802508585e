"""Data that clients in the process send and get, in the forms of the Tinker SDK."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.tinker.learning.data import Row
from tunix.tinker.protocol.results import Result


@dataclasses.dataclass(frozen=True)
class Datum:
  """One row of training data.

  Attributes:
    model_input: ids of the input, [N].
    loss_fn_inputs: inputs of the loss by name, [N] each; see learning/losses.py. A
      cross-entropy takes `target_tokens` and `weights` [N, K] too.
  """

  model_input: Any
  loss_fn_inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """Rules of completions.

  Attributes:
    max_tokens: most new tokens; None: as many as the engine allows.
    seed: seed of the completions; None: the service chooses one.
    stop: texts, or ids, that end a completion; None: the tokenizer's end tokens, []:
      none.
    temperature: 0 takes the most likely token.
    top_k, top_p: filters; -1 and 1 are off.
  """

  max_tokens: int | None = None
  seed: int | None = None
  stop: str | Sequence[str] | Sequence[int] | None = None
  temperature: float = 1.0
  top_k: int = -1
  top_p: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardBackwardOutput:
  """Results of a forward or forward-backward pass.

  Attributes:
    loss_fn_outputs: float32 arrays of each datum, of the shape of its targets:
      `logprobs`, and `elementwise_loss` of a cross-entropy.
    metrics: `loss:sum` and metrics of a custom loss.
  """

  loss_fn_outputs: list[dict[str, np.ndarray]]
  metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledSequence:
  """One completion.

  Attributes:
    tokens: its ids.
    logprobs: their log-probabilities in nats, at temperature 1 without filters.
    stop_reason: "stop" or "length".
  """

  tokens: list[int]
  logprobs: list[float]
  stop_reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleResponse:
  """Completions of one prompt.

  Attributes:
    sequences: the completions.
    prompt_logprobs: log-probabilities of the prompt's tokens, None for the first one;
      None if not asked for.
  """

  sequences: list[SampledSequence]
  prompt_logprobs: list[float | None] | None


def ids_of(value: Any) -> np.ndarray:
  """Returns the ids of an array, a list, or a ModelInput of the SDK."""
  if hasattr(value, "to_ints"):
    value = value.to_ints()
  return np.asarray(value, np.int64)


def row_of(datum: Any) -> Row:
  """Returns the row of a datum of this module, or of the SDK."""
  inputs = {name: _array(x) for name, x in datum.loss_fn_inputs.items()}
  return Row(tokens=ids_of(datum.model_input), inputs=inputs)


def _array(value: Any) -> np.ndarray:
  return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)


def outputs_of(result: Result) -> ForwardBackwardOutput:
  """Returns the result of a forward or forward-backward request."""
  cut = result.per_row()
  rows = [dict(zip(cut, parts)) for parts in zip(*cut.values())]
  return ForwardBackwardOutput(
    loss_fn_outputs=rows, metrics=dict(result.values["metrics"])
  )


def samples_of(result: Result) -> SampleResponse:
  """Returns the result of a request for samples."""
  cut, reasons = result.per_row(), result.values["stop_reasons"]
  sequences = [
    SampledSequence(tokens=t.tolist(), logprobs=p.tolist(), stop_reason=reason)
    for t, p, reason in zip(cut["tokens"], cut["logprobs"], reasons)
  ]
  scores = result.arrays.get("prompt_logprobs")
  return SampleResponse(
    sequences=sequences, prompt_logprobs=None if scores is None else _optional(scores)
  )


def _optional(scores: Iterable[float]) -> list[float | None]:
  return [None if np.isnan(x) else float(x) for x in scores]
