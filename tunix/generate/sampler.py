"""Sampler of a model in this process: our own decoder or any other module.

Requests are padded to a few fixed shapes, so that few programs are compiled: rows to a
power of two; prompts to a power of two of at least 16, or to `max_prompt_length`; the
space for new tokens to a power of two of at least 16. `Sampler.buckets` lists them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.generate import beam_search, outputs
from tunix.generate.base_sampler import BaseSampler, Prompt, SamplerOutput
from tunix.generate.decoders import layout
from tunix.generate.decoders.layout import GatherWeights
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.padded import decode, exact as exact_lib, requests
from tunix.generate.padded.completions import Increment, RowReader
from tunix.generate.padded.requests import Request
from tunix.generate.sizes.batching import Shape
from tunix.generate.tokens import Completion
from tunix.models import calling
from tunix.perf import programs
from tunix.utils import attributes, checks, mesh as mesh_lib

# Options whose result exists only when all rows have ended.
NOT_STREAMED = frozenset(
  {"echo", "pad_output", "return_logits", "beam_size", "exact", "return_routes"}
)
# Decode steps between two searches for stop strings, each of which waits for the device
# and copies all rows to the host. A row that a stop string ends costs at most 16 steps
# more than it returns.
STOP_STEPS = 16


@dataclasses.dataclass(frozen=True)
class CacheConfig:
  """The bounds of a sampler's KV cache.

  Attributes:
    cache_size: largest number of tokens of a row, prompt and completion together. The
      padding of a prompt counts if `max_prompt_length` is given. A call that needs
      fewer tokens gets a smaller cache.
    num_layers: layers of the model; compared with its config. None: not compared.
    num_kv_heads: key-value heads of the model; compared with its config.
    head_dim: dimensions of a head of the model; compared with its config.
  """

  cache_size: int
  num_layers: int | None = None
  num_kv_heads: int | None = None
  head_dim: int | None = None

  def __post_init__(self):
    names = [field.name for field in dataclasses.fields(self)]
    checks.fields(self, **dict.fromkeys(names, checks.COUNT))


class Sampler(BaseSampler):
  """A sampler whose model is in this process.

  Each call reads the current weights of the model. A model with
  `init_cache(batch_size, cache_size)` is called as
  `(tokens, positions, cache, attention_mask) -> (logits, cache)`. Any other model runs
  over the whole sequence for every token, with those arguments or with tokens alone.

  Attributes:
    transformer: the model.
    cache_config: bounds of the cache; None: each call gets the cache that it needs.
    gather_weights: layout, during decoding, of weights that are sharded over the batch
      axes (fsdp), see `layout.for_decoding`. True: all-gather them once per request
      instead of in every step. "split": reshard them once per request so that the
      devices share the matrix products of a step (our own decoder only). False: leave
      them unchanged. None: the first of True and "split" whose weights take at most a
      quarter of a device's memory, else False; always False on CPUs.
  """

  def __init__(
    self,
    transformer: nnx.Module,
    tokenizer: object,
    cache_config: CacheConfig | None = None,
    gather_weights: GatherWeights = None,
  ):
    """Stores the model, its tokenizer (see BaseSampler) and the options.

    Raises:
      ValueError: `cache_config` describes another model, or `gather_weights` is none of
        the values above.
    """
    layout.check(gather_weights)
    super().__init__(tokenizer)
    self.transformer = transformer
    self.cache_config = cache_config
    self.gather_weights: GatherWeights = gather_weights
    names = ("num_layers", "num_kv_heads", "head_dim")
    sizes = {} if cache_config is None else attributes.known(cache_config, names)
    for name, expected in sizes.items():
      actual = calling.config_value(transformer, name, expected)
      if expected != actual:
        raise ValueError(
          f"CacheConfig.{name} is {expected}, the model has {actual}: give the "
          "model's, or leave it out"
        )
    self._cache_size = None if cache_config is None else cache_config.cache_size

  name = "Sampler"
  not_honoured = frozenset({"engine_options"})

  def sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    """Completes prompts that were checked already; see `BaseSampler._sample`."""
    return self._sample(prompts, options)

  def complete(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> list[Completion]:
    """Completes prompts that were checked already; the texts are not decoded."""
    return self._completed(self._prepare(prompts, options), prompts)

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    request = self._prepare(prompts, options)
    rows = self._completed(request, prompts)
    return outputs.output_of(self.tokenizer, prompts, options, rows, request.width)

  def _completed(self, request: Request, prompts: list[np.ndarray]) -> list[Completion]:
    options = request.options
    reader = self._reader(request)
    if options.beam_size is None:
      every = STOP_STEPS if options.stops else None
      for out in self._decode(request, reader, every):
        reader.read(out)
    else:
      reader.read(self._search(request, options.beam_size))
    rows = reader.completions(prompts)
    if options.exact:
      rows = exact_lib.scored(self.transformer, rows, options, request.mesh)
    return rows

  def stream(
    self,
    input_strings: str | Sequence[Prompt],
    max_generation_steps: int | Sequence[int],
    *,
    every: int = 8,
    **options: object,
  ) -> Iterator[Increment]:
    """Completes prompts and yields the completions while they grow.

    Args:
      input_strings: prompts, as in `__call__`.
      max_generation_steps: largest number of new tokens, as in `__call__`.
      every: number of decode steps between two increments; the first increment has one
        token.
      **options: options of `__call__`, except those in NOT_STREAMED.

    Returns:
      An iterator over the increments of all rows. The increments of a row, joined, are
      the row that `__call__` returns. Text that may be the beginning of a stop string
      is not yielded yet. Decoding ends if the iterator is deleted.

    Raises:
      TypeError: see `__call__`; raised by `stream` itself, not by the iterator.
      ValueError: see `__call__`; or an option in NOT_STREAMED, or `every` below 1.
    """
    checked = stream_options(max_generation_steps, every, options)
    request = self._prepare(self._token_ids(input_strings, checked), checked)
    reader = self._reader(request)

    def increments():
      for out in self._decode(request, reader, every):
        reader.read(out)
        for row in range(request.rows):
          if (new := reader.increment(row)) is not None:
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
    """Returns all shapes that requests up to the given sizes compile programs for.

    Prefill is compiled once for each shape, the token loop once for each different
    `Shape.decode`. Both are compiled again if the kind of request changes: greedy or
    sampled, the set of filters, forbidden tokens, logits or log-probs, several samples
    per prompt, or more than 8 ids in a list.

    Args:
      prompts: largest number of prompts.
      longest: largest number of tokens of a prompt.
      max_generation_steps: largest number of new tokens of a row.
      num_samples: largest number of completions of each prompt.
      max_prompt_length: width of the prompts, as in `__call__`.
    """
    mesh = requests.mesh_of(nnx.state(self.transformer))
    limits = requests.limits_of(self.transformer, mesh, self._cache_size)
    return limits.shapes(
      prompts, num_samples, longest, max_generation_steps, max_prompt_length
    )

  def _prepare(self, prompts: list[np.ndarray], options: SamplingOptions) -> Request:
    """Returns the request in its fixed shape."""
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
    self, request: Request, reader: RowReader, every: int | None
  ) -> Iterator[decode.Generated]:
    """Runs the programs and yields the rows, copied to the host.

    Args:
      request: the request.
      reader: reader of the yielded rows, whose stop strings end them.
      every: decode steps between two copies; None: one copy at the end. Logits and
        routes are copied at the end only: 16 steps of 32 rows and 152,000 tokens are
        300 MB.
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
      some = dataclasses.replace(out, logits=None, routes=None, prompt_routes=None)
      seen = mesh_lib.to_host(some)
      yield seen
      rules = dataclasses.replace(rules, limits=reader.limits(rules.limits))
      if np.all(seen.done | (seen.lengths >= rules.limits)):
        break
      out, memory = advance(out, memory, int(seen.steps) + every)
    if request.plan.return_logits or request.plan.return_routes:
      yield mesh_lib.to_host(out)

  def _search(self, request: Request, beams: int) -> decode.Generated:
    """Returns the best `num_samples` beams of every prompt."""
    with mesh_lib.use_mesh(request.mesh):
      out = beam_search.search(
        *request.opened,
        request.start,
        request.rules,
        request.plan,
        beams,
        np.float32(request.options.length_penalty),
      )
    # Rows are [prompts, beams], best beam first. The last prompts may only fill the
    # batch, and are cut off.
    best = request.options.num_samples
    chosen = np.arange(out.lengths.shape[0]).reshape(-1, beams)[:, :best].reshape(-1)

    def pick(x):
      return x[chosen] if x.ndim else x

    return jax.tree.map(pick, mesh_lib.to_host(out))

  def _reader(self, request: Request) -> RowReader:
    return RowReader(self.tokenizer.decode, request.rows, request.options)


def stream_options(
  max_generation_steps: int | Sequence[int], every: int, options: Mapping[str, Any]
) -> SamplingOptions:
  """Returns the checked options of a stream; see `Sampler.stream`."""
  if every < 1:
    raise ValueError(f"every is {every}, expected at least 1 decode step")
  checked = SamplingOptions(max_generation_steps=max_generation_steps, **options)
  checked.refuse(NOT_STREAMED, "a stream", "call the sampler")
  return checked
