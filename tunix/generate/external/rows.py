"""Functions that the samplers of external engines share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from tunix.generate import outputs
from tunix.generate.base_sampler import SamplerOutput
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.sizes import batching
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Completion
from tunix.models import safetensors_saver
from tunix.models.transformer.model import Transformer

# The distribution of an engine's log-probs. "raw" is the model's own. "processed" is
# the distribution that tokens are sampled from, after temperature and filters.
LogprobKind = Literal["raw", "processed"]


class EngineError(RuntimeError):
  """An engine does not run, does not answer in time, or gave an unusable answer."""


@contextlib.contextmanager
def weights_folder(
  source: Transformer | str | os.PathLike[str], parent: str | os.PathLike[str] | None
) -> Iterator[pathlib.Path]:
  """Yields the absolute path of a folder with weights that an engine can read.

  Args:
    source: a folder, whose path is yielded; or a model, which is written to a temporary
      folder with its adapters merged.
    parent: folder that holds the temporary folder; None uses the system's.
  """
  if isinstance(source, (str, os.PathLike)):
    yield pathlib.Path(source).absolute()
    return
  with tempfile.TemporaryDirectory(dir=parent) as temporary:
    folder = pathlib.Path(temporary).absolute() / "weights"
    safetensors_saver.save_pretrained(source, folder)
    yield folder


def filter_values(
  options: SamplingOptions, sampler: str, **off: float
) -> dict[str, float]:
  """Returns the values of the filters of an engine, by name.

  Args:
    options: options of the call.
    sampler: name of the sampler in messages.
    **off: filters that the engine has, with the values that switch them off.

  Raises:
    ValueError: the call uses a filter that the engine does not have.
  """
  options.refuse(options.filters.keys() - off, sampler, "choose another sampler")
  return {**off, **options.filters}


def check_engine_options(options: SamplingOptions, reserved: Iterable[str]) -> None:
  """Refuses engine options that the sampler itself writes into a request.

  Raises:
    ValueError: `engine_options` has one of `reserved`.
  """
  if taken := sorted(set(reserved) & set(options.engine_options)):
    raise ValueError(
      f"engine_options has {taken}, expected fields that the sampler does not write. "
      "Use the sampler's own arguments for these"
    )


def seeds(options: SamplingOptions, prompts: int) -> list[int]:
  """Returns one seed for each prompt, below 2**62, from the seed of the call.

  The seed of prompt i depends on the call's seed and on `first_prompt + i` only.
  """
  words = np.asarray(jax.random.key_data(batching.random_key(options.seed)))
  first = options.first_prompt
  made = np.random.SeedSequence(words.tolist()).generate_state(
    first + prompts, np.uint64
  )
  return [int(x >> 2) for x in made[first:]]


def sampler_output(
  tokenizer: TokenizerAdapter,
  prompts: Sequence[np.ndarray],
  options: SamplingOptions,
  rows: Sequence[Completion],
  kind: LogprobKind,
) -> SamplerOutput:
  """Builds the output of a call from an engine's answers.

  Args:
    tokenizer: turns ids into text.
    prompts: P prompts, int32 ids each.
    options: options of the call.
    rows: P * num_samples answers with `logps`, which are those of `kind`; the samples
      of a prompt are next to each other.
    kind: distribution of the log-probs. The log-probs of the other kind are filled in
      if the settings determine them, and are None otherwise.
  """
  rows = [dataclasses.replace(x, **_logprobs(x.logps, options, kind)) for x in rows]
  return outputs.output_of(tokenizer, prompts, options, rows)


def _logprobs(
  values: np.ndarray | None, options: SamplingOptions, kind: LogprobKind
) -> dict[str, Any]:
  """Returns the log-probs of both kinds, as far as they are known."""
  if values is None or not options.return_logprobs:
    return {"logps": None}
  # At temperature 0 no token is sampled, and SamplerOutput defines these as 0.
  if options.temperature == 0:
    return {"sampling_logps": np.zeros_like(values)}
  # At temperature 1 without filters both kinds have the same distribution.
  if options.temperature == 1 and not options.filters:
    return {"sampling_logps": values}
  return {} if kind == "raw" else {"logps": None, "sampling_logps": values}
