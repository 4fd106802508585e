"""From checked options and prompts to what the programs of a request read."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.generate import batching, capacity, decode, layout
from tunix.generate.batching import Limits
from tunix.generate.layout import GatherWeights
from tunix.generate.options import SamplingOptions
from tunix.models import calling
from tunix.models.transformer.model import Transformer
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib

_LONG = 2**20  # slots of a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Prompts and options in their fixed shape.

  Attributes:
    options: what was asked for.
    prompts: token ids of each prompt.
    start: what prefill reads.
    rules, plan: of decoding.
    opened: the model's split.
    mesh: of the model, or the surrounding one.
  """

  options: SamplingOptions
  prompts: list[np.ndarray]
  start: decode.Prompts
  rules: decode.Rules
  plan: decode.Plan
  opened: decode.Opened
  mesh: Mesh | None

  @property
  def rows(self) -> int:
    """Completions that the caller gets."""
    return len(self.prompts) * self.options.num_samples

  @property
  def width(self) -> int:
    """W, tokens of a padded prompt."""
    return self.start.mask.shape[1]


def prepare(
  model: nnx.Module,
  prompts: list[np.ndarray],
  options: SamplingOptions,
  eos_ids: Sequence[int],
  cache_size: int | None,
  gather_weights: GatherWeights = None,
) -> Request:
  """The request in its fixed shape; `gather_weights` as in `layout.for_decoding`.

  Raises:
    TypeError: a seed of another kind.
    ValueError: ids outside the vocabulary, or more tokens than fit.
  """
  vocab_size = calling.vocab_size(model)
  for prompt in prompts:
    _check_ids(prompt, "a prompt", vocab_size)
  # The tokenizer's own may lie outside the model's vocabulary: they never come.
  if options.eos_tokens is not None:
    _check_ids(options.eos_tokens, "eos_tokens", vocab_size)
  count, samples = len(prompts), options.beam_size or options.num_samples
  graph, state = nnx.split(model)
  state = mesh_lib.on_auto(state)
  mesh = mesh_of(state)
  each = options.limits(count)
  longest, steps = max(map(len, prompts)), int(each.max())
  _check_positions(model, longest, steps)
  limit = limits_of(model, mesh, cache_size)
  _check_memory(model, limit, options, count, longest, steps)
  shape = limit.shape(
    count, samples, longest, steps, options.max_prompt_length, options.beam_size
  )
  limits = np.zeros(shape.rows, np.int32)
  limits[: count * samples] = np.repeat(each, samples)
  # With 0, and not the tokenizer's padding id, which may lie outside the model's
  # vocabulary.
  tokens, mask = batching.left_padded(prompts, shape.prompts, shape.width, 0)
  source = np.minimum(np.arange(shape.rows) // samples, shape.prompts - 1)
  regular = limit.shards > 1 and shape.rows == shape.prompts * samples
  copies = samples if regular else 1  # on one device it would make no difference
  tight = shape.slots < shape.width + shape.columns and isinstance(model, Transformer)
  over = np.int32(max(0, shape.width + steps - shape.slots))
  make_key = _key(options)
  with mesh_lib.use_mesh(mesh):
    # Devices that are only compiled for hold no key.
    key = _planned_key(make_key, mesh) if programs.is_recording() else make_key()
    draw = _draw(options, shape.rows, vocab_size, key)
    where = layout.for_decoding(model, state, gather_weights)
    opened = decode.opened(graph, state, where)
  return Request(
    options=options,
    prompts=prompts,
    start=decode.Prompts(
      tokens=tokens,
      mask=mask,
      source=source.astype(np.int32) if samples > copies else None,
      shift=over if tight else None,
    ),
    rules=decode.Rules(limits=limits, eos=batching.id_list(eos_ids), draw=draw),
    plan=decode.Plan(
      slots=shape.slots,
      columns=shape.columns,
      copies=copies,
      return_logits=options.return_logits,
      return_logps=options.return_logprobs,
    ),
    opened=opened,
    mesh=mesh,
  )


def _check_positions(model: nnx.Module, longest: int, steps: int) -> None:
  most = getattr(getattr(model, "config", None), "max_position", None)
  if most is not None and longest + steps > most:
    raise ValueError(
      f"{longest} prompt tokens and max_generation_steps={steps} make "
      f"{longest + steps}, the model has {most} positions: generate at most "
      f"{max(most - longest, 0)} tokens"
    )


def _check_memory(
  model: nnx.Module,
  limits: Limits,
  options: SamplingOptions,
  prompts: int,
  longest: int,
  steps: int,
) -> None:
  """Refuses rows whose tokens and keys and values memory cannot hold. What a row takes
  is read off the shapes of its cache."""
  slot = 4 + 1  # a token, and whether it is visible

  @functools.cache
  def row(slots: int) -> int:
    if not hasattr(model, "init_cache"):
      return slots * slot
    if slots > _LONG:  # which no array could have; from here on it grows evenly
      return row(_LONG) + (slots - _LONG) * (row(_LONG) - row(_LONG - 1))
    cache = jax.eval_shape(lambda: model.init_cache(1, slots))
    sizes = (x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return slots * slot + sum(sizes)

  def needed(rows: int, new: int) -> int:
    shape = limits.shape(
      prompts, rows, longest, new, options.max_prompt_length, options.beam_size and rows
    )
    return shape.rows * row(shape.slots)

  what = "the tokens and the cache of all rows"
  rows = "num_samples" if options.beam_size is None else "beam_size"
  count = getattr(options, rows)
  capacity.require(rows, count, lambda n: needed(n, 1), what)
  capacity.require("max_generation_steps", steps, lambda n: needed(count, n), what)


def limits_of(model: nnx.Module, mesh: Mesh | None, cache_size: int | None) -> Limits:
  """What the model's requests must keep to."""
  # Only our cache is known to take its prompts elsewhere; see `memory.shift`.
  is_foreign = hasattr(model, "init_cache") and not isinstance(model, Transformer)
  rules = getattr(getattr(model, "config", None), "sharding", None)
  shards = 1
  if mesh is not None and rules is not None:
    shards = math.prod(mesh.shape.get(axis, 1) for axis in rules.batch_axes)
  return Limits(cache_size=cache_size, movable=not is_foreign, shards=shards)


def mesh_of(state: Any) -> Mesh | None:
  """The mesh that the weights lie on, else the surrounding one."""
  mesh = mesh_lib.mesh_of(state)
  return mesh_lib.current_mesh() if mesh is None else mesh


def _key(options: SamplingOptions) -> Callable[[], jax.Array]:
  """What makes the call's key, under the mesh that draws. A key that was made under
  another mesh is of that mesh; its numbers are of none."""
  greedy = options.temperature == 0
  key = batching.random_key(0 if options.seed is None and greedy else options.seed)
  words, kind = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)
  return lambda: jax.random.wrap_key_data(jnp.asarray(words), impl=kind)


def _planned_key(make: Callable[[], jax.Array], mesh: Mesh | None) -> Any:
  """The key as a shape, laid out as it is where it is made."""
  key = jax.eval_shape(make)
  where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
  return key if where is None else mesh_lib.put(key, where)


def _draw(
  options: SamplingOptions,
  rows: int,
  vocab_size: int | None,
  key: jax.Array,
) -> decode.Draw:
  """How rows choose; what is off is not there."""
  greedy = options.temperature == 0
  first = options.first_prompt * options.num_samples
  rules = {} if greedy else {"temperature": options.temperature, **options.filters}
  return decode.Draw(
    rows=np.arange(first, first + rows, dtype=np.int32),
    key=key,
    forbidden=_forbidden(options.forbidden_tokens, vocab_size),
    **{
      name: np.full(rows, value, np.int32 if name == "top_k" else np.float32)
      for name, value in rules.items()
    },
  )


def _forbidden(
  tokens: Sequence[int] | None, vocab_size: int | None
) -> np.ndarray | None:
  if tokens is None or len(tokens) == 0:
    return None
  _check_ids(tokens, "forbidden_tokens", vocab_size)
  if len(set(tokens)) == vocab_size:
    raise ValueError("forbidden_tokens names every token: leave at least one")
  return batching.id_list(tokens)


def _check_ids(ids: Any, what: str, vocab_size: int | None) -> None:
  ids = np.asarray(ids)
  size = batching.NO_TOKEN if vocab_size is None else vocab_size
  wrong = ids[(ids < 0) | (ids >= size)]
  if wrong.size:
    known = "0 or more" if vocab_size is None else f"from 0 to {vocab_size - 1}"
    raise ValueError(
      f"{what} has token id {wrong[0]}, the model's ids are {known}: does the "
      "tokenizer belong to this model?"
    )
