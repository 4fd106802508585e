"""Sampler: prompts in, completions out, with our own decoder or any other module.

Requests are filled up to a few fixed shapes, so that few programs are compiled: rows
to a power of two, prompts to a power of two from 16 up (or to `max_prompt_length`),
and the space for new tokens likewise. `Sampler.buckets` lists them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.generate import (
  beam_search,
  decode,
  exact as exact_lib,
  layout,
  outputs,
  requests,
)
from tunix.generate.base_sampler import BaseSampler, Prompt, SamplerOutput
from tunix.generate.batching import Shape
from tunix.generate.completions import Completions, Increment
from tunix.generate.layout import GatherWeights
from tunix.generate.options import SamplingOptions
from tunix.generate.outputs import Row
from tunix.generate.requests import Request
from tunix.perf import programs
from tunix.utils import checks, mesh as mesh_lib

# What there is at the end alone.
NOT_STREAMED = frozenset({"echo", "pad_output", "return_logits", "beam_size", "exact"})
STOP_STEPS = 16  # a row that a stop string has ended costs at most so many steps more


@dataclasses.dataclass(frozen=True)
class CacheConfig:
  """How much a sampler may remember.

  Attributes:
    cache_size: most tokens of a row, prompt (with its padding, where
      `max_prompt_length` states it) and completion. A call that needs less gets a
      smaller cache.
    num_layers, num_kv_heads, head_dim: of the model; checked against its config when
      given.
  """

  cache_size: int
  num_layers: int | None = None
  num_kv_heads: int | None = None
  head_dim: int | None = None

  def __post_init__(self):
    names = [field.name for field in dataclasses.fields(self)]
    checks.fields(self, **dict.fromkeys(names, checks.COUNT))


class Sampler(BaseSampler):
  """Samples from a model that this process holds.

  Each call reads the model's current weights. Models are called as
  `(tokens, positions, cache, attention_mask) -> (logits, cache)` when they have
  `init_cache(batch_size, cache_size)`; others are run over the whole sequence for
  every token, with those arguments or with tokens alone.

  Attributes:
    transformer: the model.
    cache_config: the limit, or None: as large as a call needs.
    gather_weights: what becomes of weights that are split by the batch's axes (fsdp).
      True: gather them once a request, instead of in every step; "split": lay them out
      once so that they split the products of a step, and activations are what moves
      (our own decoder); False: leave them; None: the first of these that takes at most
      a quarter of a device's memory, which CPUs do not tell.
  """

  def __init__(
    self,
    transformer: nnx.Module,
    tokenizer: Any,
    cache_config: CacheConfig | None = None,
    gather_weights: GatherWeights = None,
  ):
    """Takes a model, a tokenizer (see BaseSampler), and a limit.

    Raises:
      ValueError: the cache config describes another model, or there is no such layout.
    """
    layout.check(gather_weights)
    super().__init__(tokenizer)
    self.transformer = transformer
    self.cache_config = cache_config
    self.gather_weights: GatherWeights = gather_weights
    config = getattr(transformer, "config", None)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
      stated = getattr(cache_config, name, None)
      actual = getattr(config, name, stated)
      if stated is not None and stated != actual:
        raise ValueError(
          f"CacheConfig.{name} is {stated}, the model has {actual}: give the model's, "
          "or leave it out"
        )
    self._cache_size = None if cache_config is None else cache_config.cache_size

  name = "Sampler"
  not_honoured = frozenset({"engine_options"})

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    request = self._prepare(prompts, options)
    completions = self._completions(request)
    if options.beam_size is None:
      every = STOP_STEPS if options.stops else None
      for out in self._decode(request, completions, every):
        completions.read(out)
    else:
      completions.read(self._search(request, options.beam_size))
    rows = completions.rows()
    if options.exact:
      rows = self._exact(request, rows)
    return outputs.sampler_output(self.tokenizer, prompts, rows, options, request.width)

  def stream(
    self,
    input_strings: str | Sequence[Prompt],
    max_generation_steps: int | Sequence[int],
    *,
    every: int = 8,
    **options: Any,
  ) -> Iterator[Increment]:
    """Completes prompts and gives what there is as it comes.

    Args:
      input_strings, max_generation_steps: as in `__call__`.
      every: decode steps between two looks at the rows; the first token comes alone.
      **options: of `__call__`, but those of NOT_STREAMED.

    Returns: the increments of all rows. Put together they are what `__call__` returns;
      text that may yet turn out to begin a stop string is held back. Abandoning the
      iterator ends the decoding.

    Raises: as `__call__`, at once, and ValueError for options that it does not take.
    """
    if every < 1:
      raise ValueError(f"every is {every}, it must be at least 1 decode step")
    asked = SamplingOptions(max_generation_steps=max_generation_steps, **options)
    asked.refuse(NOT_STREAMED, "a stream", "call the sampler")
    request = self._prepare(self._token_ids(input_strings, asked), asked)
    rows = self._completions(request)

    def increments():
      for out in self._decode(request, rows, every):
        rows.read(out)
        for row in range(request.rows):
          if (new := rows.increment(row)) is not None:
            yield new

    return increments()

  def buckets(
    self,
    prompts: int,
    longest: int,
    max_generation_steps: int,
    *,
    num_samples: int = 1,
    max_prompt_length: int | None = None,
  ) -> list[Shape]:
    """All shapes that programs are compiled for, in requests of up to so many prompts,
    tokens of the longest prompt, new tokens and samples a prompt.

    Prefill is compiled once for each, the token loop once for each different
    `Shape.decode`; and both anew for another kind of request: greedy or drawn, with
    other filters on, with forbidden tokens, logits or log-probs, with samples that
    share a prompt, or with more than 8 ids in a list.
    """
    mesh = requests.mesh_of(nnx.state(self.transformer))
    limits = requests.limits_of(self.transformer, mesh, self._cache_size)
    return limits.shapes(
      prompts, num_samples, longest, max_generation_steps, max_prompt_length
    )

  def _prepare(self, prompts: list[np.ndarray], options: SamplingOptions) -> Request:
    """The request in its fixed shape."""
    eos_ids = self._eos_ids(options)
    return requests.prepare(
      self.transformer,
      prompts,
      options,
      eos_ids,
      self._cache_size,
      self.gather_weights,
    )

  def _decode(
    self, request: Request, rows: Completions, every: int | None
  ) -> Iterator[decode.Generated]:
    """Runs the programs, and gives what they have written after each `every` steps;
    with None once, at the end.

    Logits stay on the device until the end.
    """
    graph, state = request.opened
    rules = request.rules

    def advance(out, memory, until):
      with mesh_lib.use_mesh(request.mesh):
        return programs.call(
          "decode", decode.advance, graph, state, rules, out, memory, np.int32(until)
        )

    with mesh_lib.use_mesh(request.mesh):
      out, memory = programs.call(
        "prefill", decode.start, graph, state, request.start, rules, request.plan
      )
    if every is None:
      yield mesh_lib.to_host(advance(out, memory, request.plan.columns)[0])
      return
    while True:
      seen = mesh_lib.to_host(dataclasses.replace(out, logits=None))
      yield seen
      rules = dataclasses.replace(rules, limits=rows.limits(rules.limits))
      if np.all(seen.done | (seen.lengths >= rules.limits)):
        break
      out, memory = advance(out, memory, int(seen.steps) + every)
    if request.plan.return_logits:
      yield mesh_lib.to_host(out)

  def _search(self, request: Request, beams: int) -> decode.Generated:
    """The best beams of every prompt."""
    with mesh_lib.use_mesh(request.mesh):
      out = beam_search.search(
        *request.opened,
        request.start,
        request.rules,
        request.plan,
        beams,
        np.float32(request.options.length_penalty),
      )
    best = request.options.num_samples
    chosen = np.arange(out.lengths.shape[0]).reshape(-1, beams)[:, :best].reshape(-1)
    pick = lambda x: x[chosen] if x.ndim else x
    return jax.tree.map(pick, mesh_lib.to_host(out))

  def _completions(self, request: Request) -> Completions:
    return Completions(self.tokenizer.decode, request.rows, request.options)

  def _exact(self, request: Request, rows: list[Row]) -> list[Row]:
    """The rows with raw log-probs, and those under the temperature (0 where nothing was
    drawn), of the tokens that the caller gets."""
    options = request.options
    prompts = [p for p in request.prompts for _ in range(options.num_samples)]
    tokens = [row.kept(options) for row in rows]
    with mesh_lib.use_mesh(request.mesh):
      score = functools.partial(exact_lib.logps, self.transformer, prompts, tokens)
      raw = score(1.0)
      if options.temperature == 0:
        drawn = [np.zeros_like(row) for row in raw]
      else:
        drawn = raw if options.temperature == 1 else score(float(options.temperature))
    return [
      dataclasses.replace(row, logprobs=row_raw, sampling_logprobs=row_drawn)
      for row, row_raw, row_drawn in zip(rows, raw, drawn)
    ]
