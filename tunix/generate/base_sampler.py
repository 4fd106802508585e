"""What every sampler takes and gives: our own, and the adapters of engines."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.generate.tokenizer_adapter import TokenizerAdapter

Prompt = str | Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerOutput:
  """The completions of one call, one entry a row: the samples of the first prompt,
  then those of the second, and so on.

  Attributes:
    text: the completions as text, without end-of-sequence tokens and up to a stop
      string; after the prompt with `echo`.
    tokens: int32 ids, one array a row, of its own length; one [B, N] array when
      padded output was asked for.
    padded_prompt_tokens: int32 [B, P], the rows' prompts, padded on the left.
    logits: float32 [length, V] a row, the model's own, or None if not asked for.
    logprobs: float32 [length] a row, in nats: of each generated token under the
      model's own distribution (temperature 1, nothing forbidden or filtered), or None.
    sampling_logprobs: the same under the distribution that the token was drawn from,
      after temperature, forbidden tokens and filters; 0 where nothing was drawn.
    finish_reasons: why each row ended: "eos", "stop" (a stop string) or "length".
  """

  text: list[str]
  tokens: list[np.ndarray] | np.ndarray
  padded_prompt_tokens: np.ndarray
  logits: list[np.ndarray] | np.ndarray | None = None
  logprobs: list[np.ndarray] | np.ndarray | None = None
  sampling_logprobs: list[np.ndarray] | np.ndarray | None = None
  finish_reasons: list[str]


class BaseSampler(abc.ABC):
  """Turns prompts into completions.

  Subclasses write `__call__`; it is called with a batch of prompts and returns when
  all rows are done.

  Attributes:
    tokenizer: encodes string prompts and decodes completions.
  """

  def __init__(self, tokenizer: Any):
    """Takes a TokenizerAdapter, or anything that one can wrap."""
    known = isinstance(tokenizer, TokenizerAdapter)
    self.tokenizer = tokenizer if known else TokenizerAdapter(tokenizer)

  @abc.abstractmethod
  def __call__(
    self,
    input_strings: str | Sequence[Prompt],
    max_generation_steps: int | Sequence[int],
    max_prompt_length: int | None = None,
    **options: Any,
  ) -> SamplerOutput:
    """Generates at most `max_generation_steps` tokens for each prompt."""

  def tokenize(self, prompt: Prompt) -> np.ndarray:
    """The ids of one prompt, int32 [T].

    A string gets the tokenizer's BOS, if it has one and the text does not begin with
    it (chat templates write their own). Ids are taken as they are.

    Raises:
      TypeError: neither a string nor a flat sequence of integers.
      ValueError: no tokens.
    """
    if isinstance(prompt, str):
      ids = self.tokenizer.tokenize(prompt, add_eos=False)
    else:
      ids = np.asarray(prompt)
      if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(
          f"a prompt of type {type(prompt).__name__} is neither a string nor a flat "
          "sequence of token ids; give a list of strings or a list of id lists"
        )
    if ids.size == 0:
      raise ValueError(
        f"the prompt {prompt!r} has no tokens: there is nothing to go on from; give "
        "at least one token, such as BOS"
      )
    return ids.astype(np.int32)
