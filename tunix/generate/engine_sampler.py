"""Sampler over the engine: a call's rows share slots instead of one padded batch."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.generate import outputs, sampler
from tunix.generate.base_sampler import BaseSampler, Prompt, SamplerOutput
from tunix.generate.decoders import decoders, images as images_lib, layout
from tunix.generate.decoders.layout import GatherWeights
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.engine.run import arrays
from tunix.generate.padded import exact, requests
from tunix.generate.padded.completions import Increment
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.generate.sizes import batching
from tunix.generate.tokens import Completion, Delta
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib

# Most completions that run at the same time by default. More rows of a step share the
# time to read the weights, until the products take longer than that; on a CPU this is
# so from 32 rows on. Elsewhere the number is not measured.
MOST_SLOTS = {"cpu": 64}
MOST_SLOTS_ELSEWHERE = 512


def suits(model: nnx.Module, gather_weights: GatherWeights = None) -> bool:
  """Returns True if the engine runs this model as well as the padded sampler does.

  The slots of an engine are not split over devices. On a mesh whose batch axes are
  split, the engine therefore runs only in one process, over `fsdp` alone, and with
  weights whose layout is split for decoding: the heads of its cache are then split as
  well. In any other layout every device would hold the cache of all slots, where the
  padded sampler gives each device its own rows.

  Args:
    model: the model.
    gather_weights: layout of its weights in the token loop, see `Sampler`.
  """
  if not isinstance(model, Transformer):
    return False
  if model.config.batch_invariant:  # the padded sampler has other bits
    return jax.process_count() == 1
  mesh = requests.mesh_of(nnx.state(model))
  shards = requests.limits_of(model, mesh, None).shards
  if shards == 1 or mesh is None:
    return True
  return jax.process_count() == 1 and _splits_cache(model, mesh, gather_weights, shards)


def _splits_cache(
  model: Transformer, mesh: Mesh, gather_weights: GatherWeights, shards: int
) -> bool:
  """Returns True if all axes that split the batch split the heads of the cache."""
  rules = model.config.sharding
  with mesh_lib.use_mesh(mesh):
    state = mesh_lib.on_auto(nnx.state(model))
    chosen = layout.for_decoding(model, state, gather_weights)
  fsdp = (rules.fsdp,) if isinstance(rules.fsdp, str) else rules.fsdp or ()
  if chosen is None or not set(chosen.step) <= set(fsdp):
    return False
  is_all = mesh_lib.axes_size(mesh, chosen.step) == shards
  axes = [axis for axis in (rules.tp, *chosen.step) if axis in mesh.shape]
  return is_all and model.config.num_kv_heads % mesh_lib.axes_size(mesh, axes) == 0


def sampler_of(model: nnx.Module, tokenizer: Any, **options: Any) -> BaseSampler:
  """Returns an `EngineSampler` for a model that suits it, and else a `Sampler`.

  Args:
    model: the model.
    tokenizer: see BaseSampler.
    **options: `cache_config`, `gather_weights`, and those of `EngineSampler`, which the
      padded sampler does without.
  """
  gather = options.get("gather_weights")
  if isinstance(model, Transformer) and suits(model, gather):
    return EngineSampler(model, tokenizer, **options)
  common = {k: v for k, v in options.items() if k in ("cache_config", "gather_weights")}
  return Sampler(model, tokenizer, **common)


class EngineSampler(BaseSampler):
  """A sampler whose rows run in the slots of an engine.

  A row that ends makes room for the next one, so a call takes the time of its tokens
  and not of its longest row. Tokens equal those of `Sampler`, as far as their logits
  are equal: both draw with the same keys. Beams, logits, and more than 320 forbidden
  tokens go to the padded sampler.

  Args:
    transformer: the model.
    tokenizer: see BaseSampler.
    cache_config: bounds of a row's tokens; None: those of each call.
    gather_weights: see `Sampler`.
    slots: number of rows that run at the same time; None: all, at most 64 on a CPU and
      512 elsewhere.
    frozen: if True, the weights do not change between calls. The engine then keeps its
      cache and its copy of the weights, and a prompt that begins as an earlier one is
      prefilled from there on. If False, each call reads the current weights and leaves
      nothing on the device, and its results depend on no earlier call.
    record_head: see `EngineConfig`.

  Attributes:
    transformer, cache_config, gather_weights: as given.
  """

  name = "EngineSampler"
  not_honoured = frozenset({"engine_options"})

  def __init__(
    self,
    transformer: Transformer,
    tokenizer: object,
    cache_config: CacheConfig | None = None,
    gather_weights: GatherWeights = None,
    *,
    slots: int | None = None,
    frozen: bool = False,
    record_head: int = 0,
  ):
    super().__init__(tokenizer)
    layout.check_model(transformer, gather_weights)
    # It checks the arguments, too.
    self._padded = Sampler(transformer, self.tokenizer, cache_config, gather_weights)
    self.transformer = transformer
    self.cache_config = cache_config
    self.gather_weights: GatherWeights = gather_weights
    self._slots, self._frozen, self._head = slots, frozen, record_head
    self._engine: Engine | None = None

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    if self._is_for_padded(options):
      return self._padded.sample(prompts, options)
    rows = self.complete(prompts, options)
    return outputs.output_of(self.tokenizer, prompts, options, rows)

  def complete(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> list[Completion]:
    """Completes prompts that were checked already; see `Sampler.complete`."""
    if self._is_for_padded(options):
      return self._padded.complete(prompts, options)
    engine = self._ready(prompts, options)
    try:
      done = engine.run(self._requests(prompts, options))
    finally:
      self._rest()
    rows = [completion for each in done for completion in each]
    if options.exact:
      mesh = requests.mesh_of(nnx.state(self.transformer))
      rows = exact.scored(self.transformer, rows, options, mesh)
    return rows

  def stream(
    self,
    input_strings: str | Sequence[Prompt],
    max_generation_steps: int | Sequence[int],
    *,
    every: int = 8,
    **options: object,
  ) -> Iterator[Increment]:
    """Completes prompts and yields the completions while they grow; see `Sampler`."""
    checked = sampler.stream_options(max_generation_steps, every, options)
    prompts = self._token_ids(input_strings, checked)
    engine = self._ready(prompts, checked, rounds=every)
    tickets = [engine.submit(r) for r in self._requests(prompts, checked)]

    def increments():
      try:
        while engine.is_busy:
          engine.step()
          for number, ticket in enumerate(tickets):
            first = number * checked.num_samples
            yield from (_increment(first, x, checked) for x in ticket.arrived())
      finally:
        for ticket in tickets:
          engine.cancel(ticket)
        if engine.is_alive:  # not after an interrupt
          engine.step()
        self._rest()

    return increments()

  @contextlib.contextmanager
  def session(
    self,
    slots: int,
    max_tokens: int,
    *,
    record_routes: bool = False,
    images: bool = False,
  ) -> Iterator[Engine]:
    """Lends the engine for requests that follow from each other, such as turns.

    Prompts that begin as earlier ones of the session are prefilled from there on.

    Args:
      slots: rows that run at the same time; at most the limits of this sampler.
      max_tokens: most tokens of a row.
      record_routes: see `EngineConfig`.
      images: True if prompts may have images.
    """
    config = self._config(slots, max_tokens, record_routes=record_routes, images=images)
    try:
      yield self._ready_for(config)
    finally:
      self._rest()

  def separate_engine(
    self,
    slots: int,
    max_tokens: int,
    *,
    record_routes: bool = False,
    images: bool = False,
  ) -> tuple[Engine, nnx.Module]:
    """Returns an engine of its own, and its model: a clone with the same arrays.

    The arguments are those of `session`.
    """
    config = self._config(slots, max_tokens, record_routes=record_routes, images=images)
    model = nnx.clone(self.transformer)
    return Engine(model, self.tokenizer, config, self.gather_weights), model

  def _is_for_padded(self, options: SamplingOptions) -> bool:
    many = len(options.forbidden_tokens or ()) > arrays.BIASES
    many |= len(self._eos_ids(options)) > arrays.STOP_IDS
    return many or options.return_logits or options.beam_size is not None

  def _ready(
    self,
    prompts: list[np.ndarray],
    options: SamplingOptions,
    rounds: int = EngineConfig.rounds,
  ) -> Engine:
    """Returns an engine with room for a call; checks the call."""
    model, size = self.transformer, model_size(self.cache_config)
    vocab_size = model.config.vocab_size
    requests.check(model, prompts, options, vocab_size)
    requests.forbidden(options.forbidden_tokens, vocab_size)
    longest, steps = max(map(len, prompts)), int(options.limits(len(prompts)).max())
    mesh = requests.mesh_of(nnx.state(model))
    bounds = requests.limits_of(model, mesh, size)
    requests.check_memory(model, bounds, options, len(prompts), longest, steps)
    stated = options.max_prompt_length
    bounds.shape(len(prompts), options.num_samples, longest, steps, stated)
    rows = len(prompts) * options.num_samples
    records = options.return_routes
    return self._ready_for(
      self._config(rows, longest + steps, rounds, records, bool(options.images))
    )

  def _config(
    self,
    rows: int,
    tokens: int,
    rounds: int = EngineConfig.rounds,
    record_routes: bool = False,
    images: bool = False,
  ) -> EngineConfig:
    """Returns the sizes of an engine for `rows` rows of at most `tokens` tokens."""
    mesh = requests.mesh_of(nnx.state(self.transformer))
    with mesh_lib.use_mesh(mesh):  # a plan's devices are not those of this machine
      most = MOST_SLOTS.get(mesh_lib.context_platform(), MOST_SLOTS_ELSEWHERE)
    slots = min(batching.bucket(rows), most) if self._slots is None else self._slots
    positions = decoders.max_positions(self.transformer)
    tokens = batching.bucket(tokens, batching.MIN_SLOT_TOKENS)
    both_ways = getattr(self.transformer, "attends_within_images", False)
    return EngineConfig(
      slots=slots,
      max_tokens=tokens if positions is None else min(tokens, positions),
      rounds=rounds,
      record_routes=record_routes,
      record_head=self._head,
      attention="rows" if images and both_ways else "auto",
    )

  def _ready_for(self, config: EngineConfig) -> Engine:
    model, have = self.transformer, self._engine
    # The last bits of log-probs depend on the number of slots. In training they must
    # not depend on earlier calls, which a resumed run does not make again.
    fits = _holds if self._frozen else operator.eq
    if have is None or not have.is_alive or not fits(have.config, config):
      self._engine = Engine(model, self.tokenizer, config, self.gather_weights)
      return self._engine
    return have

  def _requests(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> list[EngineRequest]:
    # In all rows of the call, as the padded sampler does.
    options = images_lib.forbidding(self.transformer, options)
    seed = options.seed
    if options.temperature > 0:
      seed = batching.random_key(seed)
    limits, samples = options.limits(len(prompts)), options.num_samples
    return [
      EngineRequest.of(
        options,
        prompt=prompt,
        max_tokens=int(limit),
        num_samples=samples,
        seed=seed,
        first_row=(options.first_prompt + number) * samples,
        stop_ids=self._eos_ids(options),
        logit_bias=dict.fromkeys(map(int, options.forbidden_tokens or ()), -np.inf),
        logprobs=options.return_logprobs,
        images=images,
      )
      for number, (prompt, limit, images) in enumerate(
        zip(prompts, limits, options.images_of(len(prompts)))
      )
    ]

  def _rest(self) -> None:
    """Leaves nothing on the device, unless the weights are frozen."""
    engine = self._engine
    if engine is not None and engine.is_alive and not self._frozen:
      engine.sleep()


def model_size(cache_config: CacheConfig | None) -> int | None:
  """Returns the largest number of tokens of a row, or None."""
  return None if cache_config is None else cache_config.cache_size


def _holds(have: EngineConfig, need: EngineConfig) -> bool:
  """Returns True if an engine has room for what another one is wanted for."""
  same = all(
    getattr(have, name) == getattr(need, name)
    for name in ("rounds", "record_routes", "attention")
  )
  return same and have.slots >= need.slots and have.max_tokens >= need.max_tokens


def _increment(first: int, delta: Delta, options: SamplingOptions) -> Increment:
  """Returns a delta as an increment of row `first` + its sample."""
  ids = outputs.kept_tokens(delta.ids, delta.finish_reason, options)
  return Increment(
    row=first + delta.sample,
    text=delta.text,
    prompt=delta.prompt,
    finish_reason=delta.finish_reason,
    **delta.cut(len(ids)).columns(),
  )
