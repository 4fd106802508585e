"""From rows that have ended, ours or an engine's, to what a sampler gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tunix.generate import batching
from tunix.generate.base_sampler import SamplerOutput
from tunix.generate.options import SamplingOptions
from tunix.generate.tokenizer_adapter import TokenizerAdapter

Decode = Callable[[Sequence[int] | np.ndarray], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One completion, whoever sampled it.

  Attributes:
    tokens: int32 [length], with the end-of-sequence token that ended the row, and up to
      the one that completes a stop string.
    finish_reason: "eos", "stop" or "length"; None while the row grows.
    logits, logprobs, sampling_logprobs: one a token, as in SamplerOutput, or None.
  """

  tokens: np.ndarray
  finish_reason: str | None
  logits: np.ndarray | None = None
  logprobs: np.ndarray | None = None
  sampling_logprobs: np.ndarray | None = None

  @property
  def words(self) -> np.ndarray:
    """The tokens that are text, or complete a stop string."""
    return self.tokens[: len(self.tokens) - (self.finish_reason == "eos")]

  def kept(self, options: SamplingOptions) -> np.ndarray:
    """The tokens that the caller gets."""
    return self.tokens if options.include_eos else self.words

  def text(
    self, decode: Decode, stops: Sequence[str], prompt: np.ndarray | None = None
  ) -> str:
    """The text up to a stop string; after the prompt's, when one is given."""
    text = decode(self.words)
    unwanted = (
      len(text) - _stop_place(text, stops) if self.finish_reason == "stop" else 0
    )
    if prompt is not None:
      # Decoded at once: the beginning of a text may decode differently.
      text = decode(np.concatenate([prompt, self.words]))
    return text[: len(text) - unwanted]


def find_stop(
  decode: Decode, tokens: np.ndarray, stops: Sequence[str], known: int = 0
) -> int | None:
  """How many of `tokens` it takes until their text holds one of `stops`.

  Args:
    decode: ids to text; a text that holds a stop string keeps it as it grows.
    tokens: ids of a row, without end-of-sequence tokens.
    stops: the strings.
    known: so many tokens are known to hold none.
  """

  def holds(count: int) -> bool:
    text = decode(tokens[:count])
    return any(stop in text for stop in stops)

  low, high = known, len(tokens)
  if low >= high or not holds(high):
    return None
  while high - low > 1:  # `low` tokens hold none, `high` do
    middle = (low + high) // 2
    low, high = (low, middle) if holds(middle) else (middle, high)
  return high


def _stop_place(text: str, stops: Sequence[str]) -> int:
  """Where the first stop string begins.

  An engine decodes with the prompt in front. Where that ends within a character, its
  text and ours differ, and the stop string may be in one of them only: then at the end.
  """
  places = [place for stop in stops if (place := text.find(stop)) >= 0]
  return min(places, default=len(text))


def fill_id(tokenizer: TokenizerAdapter) -> int:
  """The id that rows are filled up with."""
  pad = tokenizer.pad_id()
  return 0 if pad is None else pad


def sampler_output(
  tokenizer: TokenizerAdapter,
  prompts: Sequence[np.ndarray],
  rows: Sequence[Row],
  options: SamplingOptions,
  width: int | None = None,
) -> SamplerOutput:
  """The rows as a call gives them: cut to their lengths, or filled up.

  Args:
    tokenizer: turns ids into text.
    prompts: P prompts, int32 ids each.
    rows: P * num_samples that have ended, the samples of a prompt after each other.
    options: of the call.
    width: tokens of a padded prompt; None: as stated, or a power of two.
  """
  fill = fill_id(tokenizer)
  each = [prompt for prompt in prompts for _ in range(options.num_samples)]
  if width is None:
    width = options.max_prompt_length
  if width is None:
    width = batching.bucket(max(map(len, prompts)), batching.MIN_TOKENS)
  padded, _ = batching.left_padded(each, len(each), width, fill)
  tokens = _column(rows, "tokens", options, fill)
  assert tokens is not None
  if options.echo and isinstance(tokens, list):
    tokens = [np.concatenate(pair) for pair in zip(each, tokens)]
  elif options.echo:
    tokens = np.concatenate([padded, tokens], axis=1)
  shown = each if options.echo else [None] * len(each)
  return SamplerOutput(
    text=[
      row.text(tokenizer.decode, options.stops, prompt)
      for row, prompt in zip(rows, shown)
    ],
    tokens=tokens,
    padded_prompt_tokens=padded,
    logits=_column(rows, "logits", options),
    logprobs=_column(rows, "logprobs", options),
    sampling_logprobs=_column(rows, "sampling_logprobs", options),
    finish_reasons=[row.finish_reason or "length" for row in rows],
  )


def _column(
  rows: Sequence[Row], name: str, options: SamplingOptions, fill: int = 0
) -> list[np.ndarray] | np.ndarray | None:
  """One field of all rows, an array a row, or one [B, N, ...] for padded output."""
  if getattr(rows[0], name) is None:
    return None
  # Copies: a view would keep the buffer of all rows alive.
  cut = [getattr(row, name)[: len(row.kept(options))].copy() for row in rows]
  if not options.pad_output:
    return cut
  steps = int(np.max(options.max_generation_steps))
  return batching.right_padded(cut, steps, cut[0].dtype, fill)
