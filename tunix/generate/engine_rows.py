"""What the adapters of engines share: an answer in the form of our own sampler's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from tunix.generate import batching
from tunix.generate.base_sampler import SamplerOutput
from tunix.generate.completions import find_stop
from tunix.generate.options import SamplingOptions
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import safetensors_saver
from tunix.models.transformer.model import Transformer

# Which distribution an engine's log-probs are under: the model's own, or the one drawn
# from, after temperature and filters.
LogprobKind = Literal["raw", "processed"]
_LEAST_WIDTH = 16


class EngineError(RuntimeError):
  """An engine is dead, late, or gave an answer that cannot be used."""


@dataclasses.dataclass(frozen=True)
class EngineRow:
  """One completion as an engine gave it.

  Attributes:
    tokens: all generated ids, with the end-of-sequence token that ended the row.
    logprobs: one a token, in nats, or None.
    reason: "eos", "stop" or "length".
  """

  tokens: Sequence[int]
  logprobs: Sequence[float] | None
  reason: str


@contextlib.contextmanager
def weights_folder(
  source: Transformer | str | os.PathLike[str], parent: str | os.PathLike[str] | None
) -> Iterator[pathlib.Path]:
  """A folder with weights for an engine to read, absolute: `source` itself if it is
  one, else a temporary one under `parent` that the model is written to, with its
  adapters merged."""
  if isinstance(source, (str, os.PathLike)):
    yield pathlib.Path(source).absolute()
    return
  with tempfile.TemporaryDirectory(dir=parent) as temporary:
    folder = pathlib.Path(temporary).absolute() / "weights"
    safetensors_saver.save_pretrained(source, folder)
    yield folder


def check_engine_options(options: SamplingOptions, reserved: Iterable[str]) -> None:
  """Refuses fields of a request that the sampler writes itself.

  Raises:
    ValueError: `engine_options` has one of `reserved`.
  """
  if taken := sorted(set(reserved) & set(options.engine_options)):
    raise ValueError(f"engine_options has {taken}: use the sampler's own arguments")


def seeds(options: SamplingOptions, prompts: int) -> list[int]:
  """One seed a prompt below 2**62, from the call's seed as our sampler takes it."""
  words = np.asarray(jax.random.key_data(batching.random_key(options.seed)))
  first = options.first_prompt
  made = np.random.SeedSequence(words.tolist()).generate_state(
    first + prompts, np.uint64
  )
  return [int(x >> 2) for x in made[first:]]


def output(
  tokenizer: TokenizerAdapter,
  prompts: Sequence[np.ndarray],
  options: SamplingOptions,
  rows: Sequence[EngineRow],
  kind: LogprobKind,
) -> SamplerOutput:
  """The rows as a call of our own sampler would give them.

  Args:
    tokenizer: turns ids into text; an engine's own text is not used.
    prompts: P prompts.
    options: of the call.
    rows: P * num_samples rows, the samples of a prompt after each other.
    kind: of the rows' log-probs. The other kind is derived where nothing lies between
      the two, and None where it cannot be.
  """
  fill = tokenizer.pad_id() or 0
  each = [p for p in prompts for _ in range(options.num_samples)]
  longest = max(map(len, prompts))
  width = options.max_prompt_length or batching.bucket(longest, _LEAST_WIDTH)
  padded, _ = batching.left_padded(each, len(each), width, fill)
  worded = [_words(tokenizer, row, options.stops) for row in rows]
  kept = [
    len(row.tokens) if options.include_eos else len(words)
    for row, (words, _) in zip(rows, worded)
  ]
  steps = int(np.max(options.max_generation_steps)) if options.pad_output else None
  tokens = _cut([row.tokens for row in rows], kept, steps, fill, np.int32)
  if options.echo and steps is None:
    tokens = [np.concatenate(pair) for pair in zip(each, tokens)]
  elif options.echo:
    tokens = np.concatenate([padded, np.asarray(tokens)], axis=1)
  own, drawn = None, None
  if options.return_logprobs:
    known = _cut([row.logprobs or () for row in rows], kept, steps, 0, np.float32)
    own, drawn = _both(known, options, kind)
  whole = each if options.echo else [np.zeros(0, np.int32)] * len(each)
  return SamplerOutput(
    text=[_text(tokenizer, *pair) for pair in zip(whole, worded)],
    tokens=tokens,
    padded_prompt_tokens=padded,
    logprobs=own,
    sampling_logprobs=drawn,
    finish_reasons=[row.reason for row in rows],
  )


def _words(
  tokenizer: TokenizerAdapter, row: EngineRow, stops: Sequence[str]
) -> tuple[np.ndarray, int]:
  """The tokens that are text or complete a stop string, and how many characters at
  their end are not wanted."""
  count = len(row.tokens) - (row.reason == "eos")
  ids = np.asarray(row.tokens[:count], np.int32)
  if row.reason != "stop":
    return ids, 0
  stop = find_stop(tokenizer.decode, ids, stops)
  # An engine decodes with the prompt in front. Where that ends within a character, its
  # text and ours differ, and the stop string may be in one of them only.
  if stop is None:
    return ids, 0
  return ids, len(tokenizer.decode(ids)) - len(stop.text)


def _text(
  tokenizer: TokenizerAdapter, prompt: np.ndarray, worded: tuple[np.ndarray, int]
) -> str:
  """Prompt and completion decoded at once: a beginning may decode differently."""
  words, unwanted = worded
  text = tokenizer.decode(np.concatenate([prompt, words]))
  return text[: len(text) - unwanted]


def _cut(
  rows: Sequence[Sequence[float]],
  lengths: Sequence[int],
  width: int | None,
  fill: int,
  dtype: type,
) -> list[np.ndarray] | np.ndarray:
  """The rows at their lengths, or in one array filled up to `width`."""
  cut = [np.asarray(row[:n], dtype) for row, n in zip(rows, lengths)]
  if width is None:
    return cut
  out = np.full((len(cut), width), fill, dtype)
  for place, row in zip(out, cut):
    place[: len(row)] = row
  return out


def _both(known, options: SamplingOptions, kind: LogprobKind):
  """Log-probs under the model's own distribution, and under the one drawn from."""
  if options.temperature == 0:  # nothing is drawn
    zeros = [np.zeros_like(row) for row in known]
    return known, zeros if isinstance(known, list) else np.stack(zeros)
  if options.temperature == 1 and not options.filters:
    return known, known
  return (known, None) if kind == "raw" else (None, known)
