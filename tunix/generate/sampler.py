"""Sampler: prompts in, completions out, with our own decoder or any other module.

Requests are filled up to a few fixed shapes, so that few programs are compiled: rows
to a power of two, prompts to a power of two from 16 up (or to `max_prompt_length`),
and the space for new tokens likewise, as far as `cache_size` allows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.generate import batching, decode
from tunix.generate.base_sampler import BaseSampler, Prompt, SamplerOutput
from tunix.generate.decode import Generated, Plan, Request
from tunix.utils import mesh as mesh_lib

MIN_TOKENS = 16  # smallest space for a prompt, and for new tokens


@dataclasses.dataclass(frozen=True)
class CacheConfig:
  """How much a sampler may remember.

  Attributes:
    cache_size: most tokens of a row, prompt (with its padding) and completion. A call
      that needs less gets a smaller cache.
    num_layers, num_kv_heads, head_dim: of the model; checked against its config when
      given.
  """

  cache_size: int
  num_layers: int | None = None
  num_kv_heads: int | None = None
  head_dim: int | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None and value < 1:
        raise ValueError(f"{field.name} is {value}, it must be at least 1")


class Sampler(BaseSampler):
  """Samples from a model that this process holds.

  Each call reads the model's current weights. Models are called as
  `(tokens, positions, cache, attention_mask) -> (logits, cache)` when they have
  `init_cache(batch_size, cache_size)`; others are run over the whole sequence for
  every token, with those arguments or with tokens alone.

  Attributes:
    transformer: the model.
    cache_config: the limit, or None: as large as a call needs.
  """

  def __init__(
    self,
    transformer: nnx.Module,
    tokenizer: Any,
    cache_config: CacheConfig | None = None,
  ):
    """Takes a model, a tokenizer (see BaseSampler), and a limit.

    Raises:
      ValueError: the cache config describes another model.
    """
    super().__init__(tokenizer)
    self.transformer = transformer
    self.cache_config = cache_config
    config = getattr(transformer, "config", None)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
      said = getattr(cache_config, name, None)
      has = getattr(config, name, said)
      if said is not None and said != has:
        raise ValueError(
          f"CacheConfig.{name} is {said}, the model has {has}: give the model's, or "
          "leave it out"
        )
    self._vocab_size: int | None = getattr(config, "vocab_size", None)

  def __call__(
    self,
    input_strings: str | Sequence[Prompt],
    max_generation_steps: int,
    max_prompt_length: int | None = None,
    echo: bool = False,
    return_logits: bool = False,
    eos_tokens: Sequence[int] | None = None,
    forbidden_tokens: Sequence[int] | None = None,
    temperature: float = 0.0,
    *,
    return_logprobs: bool = False,
    include_eos: bool = False,
    seed: int | jax.Array | None = None,
    pad_output: bool = False,
  ) -> SamplerOutput:
    """Completes prompts.

    Args:
      input_strings: prompts, each a string or a sequence of token ids (see
        `tokenize`); one string alone is one prompt.
      max_generation_steps: most tokens to generate a prompt.
      max_prompt_length: pad prompts to this many tokens instead of a power of two.
      echo: `text` and `tokens` begin with the prompt; logits and log-probs never do.
      return_logits: return float32 logits before temperature and forbidden tokens;
        the device holds them for all rows and tokens.
      return_logprobs: return the generated tokens' log-probs.
      eos_tokens: ids that end a row; None: all of the tokenizer's; empty: none, each
        row gets `max_generation_steps` tokens.
      include_eos: tokens, log-probs and logits keep the end-of-sequence token that
        ended a row; text never does.
      forbidden_tokens: ids that are never generated.
      temperature: 0 takes the most likely token; above, draws from
        softmax(logits / temperature).
      seed: an int or a jax.random key. What a row draws depends on it, on the row's
        place among the prompts, and on nothing else. None: another one every call.
      pad_output: return arrays instead of lists: tokens [B, max_generation_steps]
        filled up with the padding id (behind `padded_prompt_tokens` with `echo`),
        log-probs and logits filled up with 0.

    Raises:
      TypeError: a prompt, or the seed, of another kind.
      ValueError: no prompts, an empty prompt, one longer than `max_prompt_length`,
        ids outside the vocabulary, a negative temperature, or more tokens than
        `cache_size` holds.
    """
    prompts = self._prompts(input_strings)
    if max_generation_steps < 1:
      raise ValueError(
        f"max_generation_steps is {max_generation_steps}, it must be at least 1"
      )
    if not (math.isfinite(temperature) and temperature >= 0):
      raise ValueError(
        f"temperature is {temperature}, it must be 0 (greedy) or a positive number"
      )
    longest = max(map(len, prompts))
    width = self._prompt_width(longest, max_generation_steps, max_prompt_length)
    plan = Plan(
      slots=self._slots(width, max_generation_steps),
      greedy=temperature == 0,
      return_logits=return_logits,
      return_logps=return_logprobs,
    )
    graph, state = nnx.split(self.transformer)
    mesh = mesh_lib.mesh_of(state)
    mesh = mesh_lib.current_mesh() if mesh is None else mesh
    rows = batching.bucket(len(prompts))
    rows += -rows % self._row_shards(mesh)
    padded, mask = batching.left_padded(prompts, rows, width, self._fill())
    request = Request(
      # A padding id may lie outside the model's vocabulary.
      tokens=np.where(mask, padded, 0),
      mask=mask,
      limits=np.where(np.arange(rows) < len(prompts), max_generation_steps, 0),
      rows=np.arange(rows, dtype=np.int32),
      key=batching.random_key(0 if seed is None and plan.greedy else seed),
      temperature=np.float32(temperature),
      eos=self._eos(eos_tokens),
      forbidden=self._forbidden(forbidden_tokens),
    )
    with mesh_lib.use_mesh(mesh):
      out = jax.device_get(decode.generate(graph, state, request, plan))
    width = max_generation_steps if pad_output else None
    return self._output(prompts, padded, out, include_eos, echo, width)

  def _prompts(self, inputs: str | Sequence[Prompt]) -> list[np.ndarray]:
    """Checked token ids of every prompt."""
    prompts = [
      self.tokenize(p) for p in ([inputs] if isinstance(inputs, str) else inputs)
    ]
    if not prompts:
      raise ValueError("there are no prompts: give at least one")
    for prompt in prompts:
      self._check_ids(prompt, "a prompt")
    return prompts

  def _check_ids(self, ids: Any, what: str) -> None:
    size = self._vocab_size
    ids = np.asarray(ids)
    wrong = ids[(ids < 0) | (ids >= (batching.NO_TOKEN if size is None else size))]
    if wrong.size:
      known = "0 or more" if size is None else f"from 0 to {size - 1}"
      raise ValueError(
        f"{what} has token id {wrong[0]}, the model's ids are {known}: does the "
        "tokenizer belong to this model?"
      )

  def _eos(self, tokens: Sequence[int] | None) -> np.ndarray:
    if tokens is None:
      return batching.id_list(self.tokenizer.eos_ids())
    self._check_ids(tokens, "eos_tokens")
    return batching.id_list(tokens)

  def _forbidden(self, tokens: Sequence[int] | None) -> np.ndarray | None:
    if tokens is None or len(tokens) == 0:
      return None
    self._check_ids(tokens, "forbidden_tokens")
    if len(set(tokens)) == self._vocab_size:
      raise ValueError("forbidden_tokens names every token: leave at least one")
    return batching.id_list(tokens)

  def _fill(self) -> int:
    pad = self.tokenizer.pad_id()
    return 0 if pad is None else pad

  def _prompt_width(self, longest: int, steps: int, stated: int | None) -> int:
    """P, tokens of the padded prompts."""
    if stated is not None and longest > stated:
      raise ValueError(
        f"a prompt has {longest} tokens, max_prompt_length is {stated}: shorten the "
        "prompt or raise max_prompt_length"
      )
    width = batching.bucket(longest, MIN_TOKENS) if stated is None else stated
    if self.cache_config is None:
      return width
    size = self.cache_config.cache_size
    if stated is None:
      width = min(width, max(longest, size - steps))
    if width + steps > size:
      raise ValueError(
        f"{width} prompt tokens and max_generation_steps={steps} make {width + steps}, "
        f"the cache holds {size}: raise CacheConfig.cache_size or generate fewer tokens"
      )
    return width

  def _slots(self, width: int, steps: int) -> int:
    """S, prompt and generated tokens."""
    wanted = width + batching.bucket(steps, MIN_TOKENS)
    config = self.cache_config
    return wanted if config is None else min(wanted, config.cache_size)

  def _row_shards(self, mesh: Mesh | None) -> int:
    """Over how many devices the mesh spreads rows."""
    rules = getattr(getattr(self.transformer, "config", None), "sharding", None)
    if mesh is None or rules is None:
      return 1
    return math.prod(mesh.shape.get(axis, 1) for axis in rules.batch_axes)

  def _output(
    self,
    prompts: list[np.ndarray],
    padded: np.ndarray,
    out: Generated,
    include_eos: bool,
    echo: bool,
    width: int | None,
  ) -> SamplerOutput:
    """The real rows of `out`, cut to their lengths or filled up to `width`."""
    count = len(prompts)
    worded = (out.lengths - out.stopped)[:count]
    lengths = out.lengths[:count] if include_eos else worded
    tokens = batching.cut(out.tokens, lengths, width, self._fill())
    texts = batching.cut(out.tokens, worded)
    if echo:
      texts = [np.concatenate(pair) for pair in zip(prompts, texts)]
      if width is None:
        tokens = [np.concatenate(pair) for pair in zip(prompts, tokens)]
      else:
        tokens = np.concatenate([padded[:count], np.asarray(tokens)], axis=1)
    beside = [
      None if x is None else batching.cut(x, lengths, width)
      for x in (out.logits, out.logps)
    ]
    return SamplerOutput(
      text=[self.tokenizer.decode(row) for row in texts],
      tokens=tokens,
      padded_prompt_tokens=padded[:count],
      logits=beside[0],
      logprobs=beside[1],
    )
