"""What every sampler takes and gives: our own, and the adapters of engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from tunix.generate.options import SamplingOptions
from tunix.generate.tokenizer_adapter import adapted

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


class BaseSampler:
  """Turns prompts into completions.

  Subclasses write `_sample`, which is given checked options and token ids; a sampler
  with other options writes `__call__` itself.

  Attributes:
    tokenizer: encodes string prompts and decodes completions.
    name: for messages.
    not_honoured: options that a call is refused for.
  """

  name: ClassVar[str] = "this sampler"
  not_honoured: ClassVar[frozenset[str]] = frozenset()

  def __init__(self, tokenizer: Any):
    """Takes a TokenizerAdapter, or anything that one can wrap."""
    self.tokenizer = adapted(tokenizer)

  def __call__(
    self,
    input_strings: str | Sequence[Prompt],
    max_generation_steps: int | Sequence[int],
    max_prompt_length: int | None = None,
    echo: bool = False,
    return_logits: bool = False,
    eos_tokens: Sequence[int] | None = None,
    forbidden_tokens: Sequence[int] | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    beam_size: int | None = None,
    seed: int | jax.Array | None = None,
    pad_output: bool = False,
    *,
    min_p: float | None = None,
    num_samples: int = 1,
    stop_strings: str | Sequence[str] = (),
    return_logprobs: bool = False,
    include_eos: bool = False,
    length_penalty: float = 1.0,
    exact: bool = False,
    first_prompt: int = 0,
    engine_options: Mapping[str, Any] | None = None,
  ) -> SamplerOutput:
    """Completes prompts. `docs/guides/sampling.md` has the rules in full.

    Args:
      input_strings: prompts, each a string or a sequence of token ids (see
        `tokenize`); one string alone is one prompt.
      max_generation_steps: most tokens to generate a row; one int, or one a prompt.
      max_prompt_length: pad prompts to this many tokens instead of a power of two.
      echo: `text` and `tokens` begin with the prompt; logits and log-probs never do.
      return_logits: return float32 logits before temperature and forbidden tokens;
        the device holds them for all rows and tokens.
      eos_tokens: ids that end a row; None: all of the tokenizer's; empty: none.
      forbidden_tokens: ids that are never generated.
      temperature: 0 takes the most likely token; above, draws from
        softmax(logits / temperature).
      top_p, top_k, min_p: leave out unlikely tokens, see `filters.keep`; None is off.
      beam_size: search with this many beams instead, see `beam_search.search`.
      seed: an int or a jax.random key. What a row draws depends on it, on the row's
        number, and on nothing else. None: another one every call.
      pad_output: return arrays instead of lists: tokens [B, max_generation_steps]
        filled up with the padding id (behind `padded_prompt_tokens` with `echo`),
        log-probs and logits filled up with 0.
      num_samples: completions a prompt, which is prefilled once for all of them; with
        `beam_size` the best of its beams, best first.
      stop_strings: texts that end a row. Its text ends before, its tokens with the
        one that completes the string.
      return_logprobs: return the generated tokens' log-probs, of both kinds.
      include_eos: tokens, log-probs and logits keep the end-of-sequence token that
        ended a row; text never does.
      length_penalty: a beam's score is its log-probability / tokens ** length_penalty.
      exact: score the sampled tokens once more, each row by itself (see exact.py): the
        bits of its log-probs then depend on no other row, and are those that a trainer
        computes in exact mode at the same widths.
      first_prompt: number of the first prompt, for its rows' draws: a batch that is
        sampled in parts draws what it would draw at once.
      engine_options: more fields of an engine's requests, by the engine's own names.

    Raises:
      TypeError: a prompt, the seed, or a stop string of another kind.
      ValueError: no prompts, an empty prompt, one longer than `max_prompt_length`,
        ids outside the vocabulary, an option out of its range or against another (see
        `SamplingOptions`), one that this sampler does not honour, or more tokens than
        it holds.
    """
    options = SamplingOptions(
      max_generation_steps=max_generation_steps,
      max_prompt_length=max_prompt_length,
      echo=echo,
      return_logits=return_logits,
      eos_tokens=eos_tokens,
      forbidden_tokens=forbidden_tokens,
      temperature=temperature,
      top_p=top_p,
      top_k=top_k,
      beam_size=beam_size,
      seed=seed,
      pad_output=pad_output,
      min_p=min_p,
      num_samples=num_samples,
      stop_strings=stop_strings,
      return_logprobs=return_logprobs,
      include_eos=include_eos,
      length_penalty=length_penalty,
      exact=exact,
      first_prompt=first_prompt,
      engine_options=engine_options or {},
    )
    return self._sample(self._token_ids(input_strings, options), options)

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    """Completions of P prompts, int32 ids each; returns when all rows are done."""
    raise TypeError(f"{type(self).__name__} has neither _sample nor __call__")

  def _token_ids(
    self, inputs: str | Sequence[Prompt], options: SamplingOptions
  ) -> list[np.ndarray]:
    """The token ids of every prompt of a call that this sampler takes.

    Raises:
      ValueError: an option that is not honoured, no prompts, or one longer than
        `max_prompt_length`.
    """
    options.refuse(
      self.not_honoured,
      self.name,
      "choose a sampler that does (docs/guides/engines.md has a table)",
    )
    prompts = [
      self.tokenize(x) for x in ([inputs] if isinstance(inputs, str) else inputs)
    ]
    if not prompts:
      raise ValueError("there are no prompts: give at least one")
    longest, most = max(map(len, prompts)), options.max_prompt_length
    if most is not None and longest > most:
      raise ValueError(
        f"a prompt has {longest} tokens, max_prompt_length is {most}: shorten the "
        "prompt or raise max_prompt_length"
      )
    return prompts

  def _eos_ids(self, options: SamplingOptions) -> list[int]:
    """The ids that end a row."""
    stated = options.eos_tokens
    return [int(i) for i in (self.tokenizer.eos_ids() if stated is None else stated)]

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
