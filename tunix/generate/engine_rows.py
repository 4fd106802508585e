"""What the adapters of engines share."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from tunix.generate import batching
from tunix.generate.options import SamplingOptions
from tunix.generate.outputs import Row
from tunix.models import safetensors_saver
from tunix.models.transformer.model import Transformer

# Which distribution an engine's log-probs are under: the model's own, or the one drawn
# from, after temperature and filters.
LogprobKind = Literal["raw", "processed"]


class EngineError(RuntimeError):
  """An engine is dead, late, or gave an answer that cannot be used."""


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


def row(
  tokens: Sequence[int],
  logprobs: Sequence[float] | None,
  reason: str,
  options: SamplingOptions,
  kind: LogprobKind,
) -> Row:
  """A completion as an engine gave it, in the form of our own sampler's.

  Args:
    tokens: all generated ids, with the end-of-sequence token that ended the row.
    logprobs: one a token, in nats; not used unless the call asks for them.
    reason: "eos", "stop" or "length".
    options: of the call.
    kind: of the log-probs. The other kind is derived where nothing lies between the
      two, and None where it cannot be.
  """
  raw, drawn = None, None
  if options.return_logprobs:
    raw = drawn = np.asarray(() if logprobs is None else logprobs, np.float32)
    if options.temperature == 0:  # nothing is drawn
      drawn = np.zeros_like(raw)
    elif options.temperature != 1 or options.filters:
      raw, drawn = (raw, None) if kind == "raw" else (None, drawn)
  return Row(
    tokens=np.asarray(tokens, np.int32),
    finish_reason=reason,
    logprobs=raw,
    sampling_logprobs=drawn,
  )
