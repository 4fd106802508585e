"""Base class and output of every sampler: our own, and those of external engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.sizes import text_size
from tunix.generate.tokenizer_adapter import adapted
from tunix.models.images.prompt_images import PromptImages

Prompt = str | Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerOutput:
  """The completions of one call, one entry for each row.

  Rows are ordered by prompt: the samples of the first prompt, then of the second, ...

  Attributes:
    text: completions as text, without end-of-sequence tokens, up to the stop string.
      With `echo` each begins with its prompt.
    tokens: int32 ids, one array of the row's length for each row; with `pad_output`
      one array [B, N].
    padded_prompt_tokens: int32 [B, P], prompt of each row, padded on the left.
    logits: float32 [length, V] for each row, the model's own; None without
      `return_logits`.
    logprobs: float32 [length] for each row, in nats: log-probability of each generated
      token under the model's own distribution (temperature 1, no token forbidden or
      filtered); or None.
    sampling_logprobs: float32 [length] for each row, in nats: the same under the
      distribution that the token was drawn from, after forbidden tokens, temperature
      and filters. 0 at temperature 0, where nothing is drawn; or None.
    routes: the experts of each row's prompt and generated tokens, [T + length, M, k]
      for each row, in the form of experts/route_records.py. The last generated token
      has none, because the model never ran it. None without `return_routes`.
    finish_reasons: "eos", "stop" (a stop string) or "length" for each row.
  """

  text: list[str]
  tokens: list[np.ndarray] | np.ndarray
  padded_prompt_tokens: np.ndarray
  logits: list[np.ndarray] | np.ndarray | None = None
  logprobs: list[np.ndarray] | np.ndarray | None = None
  sampling_logprobs: list[np.ndarray] | np.ndarray | None = None
  routes: list[np.ndarray] | None = None
  finish_reasons: list[str]


class BaseSampler:
  """A callable that turns prompts into completions.

  Subclasses write `_sample`, which receives token ids and checked options. A sampler
  with other options writes `__call__` itself.

  Attributes:
    tokenizer: adapter that encodes string prompts and decodes completions.
    name: name of the sampler in messages.
    not_honoured: options that the sampler does not support; a call with one of them is
      refused.
  """

  name: ClassVar[str] = "this sampler"
  not_honoured: ClassVar[frozenset[str]] = frozenset()

  def __init__(self, tokenizer: Any):
    """Stores the tokenizer: a TokenizerAdapter, or any object that one can wrap."""
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
    return_routes: bool = False,
    first_prompt: int = 0,
    images: Sequence[PromptImages | None] | None = None,
    engine_options: Mapping[str, Any] | None = None,
  ) -> SamplerOutput:
    """Completes prompts. `docs/guides/sampling.md` has the rules in full.

    Args:
      input_strings: prompts, each a string or a sequence of token ids (see
        `tokenize`). One string alone is one prompt.
      max_generation_steps: largest number of tokens to generate per row: one int, or
        one int for each prompt.
      max_prompt_length: pad prompts to this many tokens instead of a power of two.
      echo: begin `text` and `tokens` with the prompt; logits and log-probs never do.
      return_logits: return float32 logits before temperature and forbidden tokens.
        The device holds them for all rows and tokens.
      eos_tokens: ids that end a row. None: all of the tokenizer's; empty: none.
      forbidden_tokens: ids that are never generated.
      temperature: 0 takes the most likely token; above 0, tokens are sampled from
        softmax(logits / temperature).
      top_p: keep the most likely tokens with this total probability, see
        `filters.keep`; None: all.
      top_k: keep this many of the most likely tokens, see `filters.keep`; None: all.
      beam_size: search with this many beams instead, see `beam_search.search`.
      seed: an int or a jax.random key. The random choices of a row depend only on the
        seed and the row's number. None: a new seed in every call.
      pad_output: return arrays instead of lists: tokens [B, max_generation_steps]
        padded with the padding id, log-probs and logits padded with 0. With `echo` the
        tokens begin with `padded_prompt_tokens`.
      min_p: keep tokens at least this likely relative to the most likely one, see
        `filters.keep`; None: all.
      num_samples: completions of each prompt, which is prefilled once for all of them.
        With `beam_size`: the best of its beams, best first.
      stop_strings: texts that end a row. The row's text ends before the stop string;
        its tokens end with the one that completes the stop string. At most 64 texts, of
        1,024 characters together.
      return_logprobs: return both kinds of log-probs of the generated tokens.
      include_eos: keep the end-of-sequence token that ended a row in tokens, log-probs
        and logits; text never has it.
      length_penalty: exponent p of a beam's score, log-probability / tokens ** p.
      exact: score the sampled tokens again, each row separately (see padded/exact.py).
        The bits of a row's log-probs then do not depend on other rows, and equal those
        that a trainer computes in exact mode at the same widths.
      return_routes: return the experts of each token of a mixture of experts; see
        `SamplerOutput.routes`.
      first_prompt: number of the first prompt. With it, a batch that is sampled in
        several calls gets the same tokens as in one call.
      images: the images of each prompt, or None for one without. The prompts hold their
        soft tokens, see docs/guides/images.md. With images, the soft token is also
        forbidden.
      engine_options: further fields of an engine's requests, by the engine's names.

    Raises:
      TypeError: a prompt, the seed or a stop string has another type.
      ValueError: no prompts; an empty prompt; one longer than `max_prompt_length`; ids
        outside the vocabulary; an option out of range, in conflict with another (see
        `SamplingOptions`) or not honored by this sampler; or more tokens than the
        sampler holds.
    """
    # Every parameter but the prompts is an option of the same name.
    arguments: dict[str, Any] = {
      **locals(),
      "images": images or (),
      "engine_options": engine_options or {},
    }
    names = [field.name for field in dataclasses.fields(SamplingOptions)]
    options = SamplingOptions(**{name: arguments[name] for name in names})
    return self._sample(self._token_ids(input_strings, options), options)

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    """Returns the completions of all prompts when all rows are done.

    Args:
      prompts: P prompts, int32 ids each.
      options: checked options of the call.
    """
    raise TypeError(f"{type(self).__name__} has neither _sample nor __call__")

  def _token_ids(
    self, inputs: str | Sequence[Prompt], options: SamplingOptions
  ) -> list[np.ndarray]:
    """Checks a call and returns the token ids of its prompts.

    Raises:
      ValueError: an option that is not honored, no prompts, or a prompt longer than
        `max_prompt_length`.
    """
    options.refuse(
      self.not_honoured,
      self.name,
      "choose a sampler that does (docs/guides/engines.md has a table)",
    )
    texts = [inputs] if isinstance(inputs, str) else inputs
    remedy = "Shorten the prompt, or raise max_prompt_length"
    if (limit := options.max_prompt_length) is not None:
      text_size.check([x for x in texts if isinstance(x, str)], limit, remedy)
    prompts = [self.tokenize(x) for x in texts]
    if not prompts:
      raise ValueError("there are no prompts: give at least one")
    longest = max(map(len, prompts))
    if limit is not None and longest > limit:
      raise ValueError(
        f"a prompt has {longest} tokens and max_prompt_length is {limit}. {remedy}"
      )
    return prompts

  def _eos_ids(self, options: SamplingOptions) -> list[int]:
    """Returns the ids that end a row: the call's, or the tokenizer's."""
    ids = options.eos_tokens
    return [int(i) for i in (self.tokenizer.eos_ids() if ids is None else ids)]

  def tokenize(self, prompt: Prompt) -> np.ndarray:
    """Returns the ids of one prompt, int32 [T].

    The ids of a string begin with BOS. BOS is not added twice if the text itself begins
    with it, as texts of chat templates do. Ids are used unchanged.

    Raises:
      TypeError: the prompt is neither a string nor a flat sequence of integers.
      ValueError: the prompt has no tokens.
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
        f"the prompt {prompt!r} has no tokens, expected at least 1: give one, such as "
        "the BOS token"
      )
    return ids.astype(np.int32)
