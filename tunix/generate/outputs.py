"""Builds a sampler's output from ended rows, our own or an engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunix.generate.base_sampler import SamplerOutput
from tunix.generate.drawing import stops as stops_lib
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.sizes import batching
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Completion

Decode = Callable[[Sequence[int] | np.ndarray], str]


def text_tokens(tokens: np.ndarray, finish_reason: str | None) -> np.ndarray:
  """Returns the tokens of a row without the end-of-sequence token that ended it."""
  return tokens[: len(tokens) - (finish_reason == "eos")]


def kept_tokens(
  tokens: np.ndarray, finish_reason: str | None, options: SamplingOptions
) -> np.ndarray:
  """Returns the tokens of a row that the caller receives."""
  return tokens if options.include_eos else text_tokens(tokens, finish_reason)


def text_of(
  decode: Decode,
  tokens: np.ndarray,
  finish_reason: str | None,
  stops: Sequence[str],
  prompt: np.ndarray | None = None,
) -> str:
  """Returns the text of a row up to its stop string.

  Args:
    decode: token ids to text.
    tokens: int32 ids of the completion, with the token that ended it.
    finish_reason: "eos", "stop", "length", or None while the row grows.
    stops: stop strings.
    prompt: ids whose text comes first; None: the completion alone.
  """
  ids = text_tokens(tokens, finish_reason)
  text = decode(ids)
  cut = len(text) - _stop_place(text, stops) if finish_reason == "stop" else 0
  if prompt is not None:
    # Prompt and completion are decoded together. Decoded alone, the completion could
    # lose its first space, which SentencePiece drops at the start of a text.
    text = decode(np.concatenate([prompt, ids]))
  return text[: len(text) - cut]


def with_text(
  row: Completion, tokenizer: TokenizerAdapter, stops: Sequence[str]
) -> Completion:
  """Returns a completion with its text."""
  text = text_of(tokenizer.decode, row.ids, row.finish_reason, stops)
  return dataclasses.replace(row, text=text)


def find_stop(
  decode: Decode, tokens: np.ndarray, stops: Sequence[str], known: int = 0
) -> int | None:
  """Returns the number of tokens whose text first holds a stop string, or None.

  Args:
    decode: ids to text. If a text contains a stop string, longer texts of the same row
      must contain it too.
    tokens: ids of a row, without end-of-sequence tokens.
    stops: stop strings.
    known: number of tokens at the start that are known to contain no stop string.
  """

  matcher = stops_lib.compiled(stops)

  def holds(count: int) -> bool:
    return matcher.place(decode(tokens[:count])) is not None

  low, high = known, len(tokens)
  if low >= high or not holds(high):
    return None
  # Bisection: the first `low` tokens contain no stop string, the first `high` contain
  # one. 16 new tokens take 5 decodings instead of 16.
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (low, middle) if holds(middle) else (middle, high)
  return high


def _stop_place(text: str, stops: Sequence[str]) -> int:
  """Returns the index of the first stop string, or the length of the text.

  An engine decodes a completion with its prompt in front. If the prompt ends inside a
  character, the engine may see a stop string that the completion alone does not hold.
  """
  place = stops_lib.compiled(stops).place(text)
  return len(text) if place is None else place


def fill_id(tokenizer: TokenizerAdapter) -> int:
  """Returns the id that pads rows: the tokenizer's padding id, or 0."""
  pad = tokenizer.pad_id()
  return 0 if pad is None else pad


def sampler_output(
  tokenizer: TokenizerAdapter,
  prompts: Sequence[np.ndarray],
  options: SamplingOptions,
  *,
  tokens: Sequence[np.ndarray],
  finish_reasons: Sequence[str],
  logits: Sequence[np.ndarray] | None = None,
  logprobs: Sequence[np.ndarray] | None = None,
  sampling_logprobs: Sequence[np.ndarray] | None = None,
) -> SamplerOutput:
  """Builds the output of a user's sampler from its B = P * num_samples ended rows.

  Args:
    tokenizer: turns ids into text.
    prompts: P prompts, int32 ids each.
    options: options of the call.
    tokens: B int32 arrays, the samples of a prompt next to each other. Each holds the
      end-of-sequence token that ended the row, or ends with the token that completes a
      stop string.
    finish_reasons: B of "eos", "stop", "length".
    logits, logprobs, sampling_logprobs: one entry a token for each row, as in
      SamplerOutput; or None.
  """
  named = {"logits": logits, "logps": logprobs, "sampling_logps": sampling_logprobs}
  columns: dict[str, Any] = {name: x for name, x in named.items() if x is not None}
  rows = [
    Completion(
      ids=ids, finish_reason=end, **{name: x[i] for name, x in columns.items()}
    )
    for i, (ids, end) in enumerate(zip(tokens, finish_reasons))
  ]
  return output_of(tokenizer, prompts, options, rows)


def output_of(
  tokenizer: TokenizerAdapter,
  prompts: Sequence[np.ndarray],
  options: SamplingOptions,
  rows: Sequence[Completion],
  width: int | None = None,
) -> SamplerOutput:
  """Builds the output of a call; see `sampler_output`.

  Args:
    tokenizer, prompts, options: see `sampler_output`.
    rows: B completions. Their prompts and texts are not used.
    width: tokens of a padded prompt. None: `max_prompt_length`, or a power of two.
  """
  fill, stops = fill_id(tokenizer), options.stops
  each = [prompt for prompt in prompts for _ in range(options.num_samples)]
  if width is None:
    width = options.max_prompt_length
  if width is None:
    width = batching.bucket(max(map(len, prompts)), batching.MIN_TOKENS)
  padded, _ = batching.left_padded(each, len(each), width, fill)
  answers = [x.cut(len(kept_tokens(x.ids, x.finish_reason, options))) for x in rows]
  steps = int(np.max(options.max_generation_steps))

  def column(name, fill=0):
    values = [getattr(row, name) for row in answers]
    if any(x is None for x in values):
      return None
    if not options.pad_output:
      return values
    return batching.right_padded(values, steps, values[0].dtype, fill)

  ids = column("ids", fill)
  assert ids is not None
  if options.echo and isinstance(ids, list):
    ids = [np.concatenate(pair) for pair in zip(each, ids)]
  elif options.echo:
    ids = np.concatenate([padded, ids], axis=1)
  routes: list[Any] = [row.routes for row in answers]
  shown = each if options.echo else [None] * len(each)
  return SamplerOutput(
    text=[
      text_of(tokenizer.decode, row.ids, row.finish_reason, stops, prompt)
      for row, prompt in zip(rows, shown)
    ],
    tokens=ids,
    padded_prompt_tokens=padded,
    logits=column("logits"),
    logprobs=column("logps"),
    sampling_logprobs=column("sampling_logps"),
    routes=None if routes[0] is None else routes,
    finish_reasons=[row.finish_reason for row in rows],
  )
