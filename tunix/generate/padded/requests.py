"""Prepares a request: prompts and checked options become arrays of fixed shapes."""

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

from tunix.generate.decoders import decoders, images as images_lib, layout
from tunix.generate.decoders.layout import GatherWeights
from tunix.generate.drawing import filters
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.padded import decode
from tunix.generate.sizes import batching, capacity
from tunix.generate.sizes.batching import Limits, Shape
from tunix.models import calling
from tunix.models.images.prompt_images import PromptImages, stacked
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib

_LONG_ROW = 2**20  # slots, see `check_memory`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Prompts and options in their fixed shape.

  Attributes:
    options: options of the call.
    prompts: token ids of each prompt.
    start: arrays of the prompts, for the prefill.
    rules: choice of tokens and limits of the rows.
    plan: static sizes and options of the programs.
    opened: the module, split for decoding.
    mesh: mesh of the weights, or else the mesh of the context; None if there is none.
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
    """Number of completions that the caller receives."""
    return len(self.prompts) * self.options.num_samples

  @property
  def width(self) -> int:
    """W, the number of tokens of a padded prompt."""
    return self.start.mask.shape[1]


def prepare(
  model: nnx.Module,
  prompts: list[np.ndarray],
  options: SamplingOptions,
  eos_ids: Sequence[int],
  cache_size: int | None,
  gather_weights: GatherWeights = None,
) -> Request:
  """Checks a call against the model and pads it to its fixed shape.

  Args:
    model: the module that decodes.
    prompts: int32 ids of each prompt.
    options: options of the call.
    eos_ids: ids that end a row.
    cache_size: largest number of tokens of a row, prompt included; None for no bound.
    gather_weights: layout of the weights, see `layout.for_decoding`.

  Raises:
    TypeError: the seed is not None, an integer or a key.
    ValueError: an id is outside the vocabulary, or the tokens exceed the cache, the
      model's positions or the memory.
  """
  vocab_size = calling.vocab_size(model)
  options = images_lib.forbidding(model, options)
  check(model, prompts, options, vocab_size)
  count, samples = len(prompts), options.beam_size or options.num_samples
  graph, state = nnx.split(model)
  state = mesh_lib.on_auto(state)
  mesh = mesh_of(state)
  each = options.limits(count)
  longest, steps = max(map(len, prompts)), int(each.max())
  bounds = limits_of(model, mesh, cache_size)
  check_memory(model, bounds, options, count, longest, steps)
  shape = bounds.shape(
    count, samples, longest, steps, options.max_prompt_length, options.beam_size
  )
  # If the batch is sharded and every prompt has the same number of rows, each device
  # repeats its own prompts (`memory.rows_of`). Otherwise rows are taken by index, which
  # on one device costs the same.
  is_regular = bounds.shards > 1 and shape.rows == shape.prompts * samples
  copies = samples if is_regular else 1
  limits = np.zeros(shape.rows, np.int32)
  limits[: count * samples] = np.repeat(each, samples)
  make_key = _key_maker(options)
  with mesh_lib.use_mesh(mesh):
    # `tunix plan` compiles for devices that this machine does not have. They cannot
    # hold a key, so its shape takes its place.
    key = _planned_key(make_key, mesh) if programs.is_recording() else make_key()
    draw = _draw(options, shape.rows, vocab_size, key)
    weights = layout.for_decoding(model, state, gather_weights)
    opened = decode.opened(graph, state, weights)
  return Request(
    options=options,
    prompts=prompts,
    start=_prompts(model, prompts, options, shape, samples, copies, steps),
    rules=decode.Rules(limits=limits, eos=batching.id_list(eos_ids), draw=draw),
    plan=decode.Plan(
      slots=shape.slots,
      columns=shape.columns,
      copies=copies,
      return_logits=options.return_logits,
      return_logps=options.return_logprobs,
      return_routes=options.return_routes,
    ),
    opened=opened,
    mesh=mesh,
  )


def check(
  model: nnx.Module,
  prompts: Sequence[np.ndarray],
  options: SamplingOptions,
  vocab_size: int | None,
) -> None:
  """Refuses ids outside the vocabulary, and more tokens than the model has positions.

  Raises:
    ValueError: see above.
  """
  for prompt, images in zip(prompts, options.images_of(len(prompts))):
    check_prompt(model, prompt, images, vocab_size, among_images=bool(options.images))
  # Only ids that the caller gave are checked. The tokenizer's end-of-sequence id may be
  # outside the model's vocabulary; it is then never generated.
  if options.eos_tokens is not None:
    check_ids(options.eos_tokens, "eos_tokens", vocab_size)
  steps = int(options.limits(len(prompts)).max())
  _check_positions(model, max(map(len, prompts)), steps)


def _prompts(
  model: nnx.Module,
  prompts: Sequence[np.ndarray],
  options: SamplingOptions,
  shape: Shape,
  samples: int,
  copies: int,
  steps: int,
) -> decode.Prompts:
  """Returns the arrays of the prompts, with `samples` rows for each prompt."""
  # Padded with 0, because the tokenizer's padding id may be outside the vocabulary.
  tokens, mask = batching.left_padded(prompts, shape.prompts, shape.width, 0)
  source = np.minimum(np.arange(shape.rows) // samples, shape.prompts - 1)
  # The cache may have fewer slots than a padded prompt and the new tokens need
  # together, but enough for the tokens without padding. Prompts are then moved to the
  # left, over their padding, by the number of missing slots.
  is_tight = shape.slots < shape.width + shape.columns
  can_shift = decoders.decoder_of(model).shift is not None
  missing = np.int32(max(0, shape.width + steps - shape.slots))
  return decode.Prompts(
    tokens=tokens,
    mask=mask,
    source=source.astype(np.int32) if samples > copies else None,
    shift=missing if is_tight and can_shift else None,
    images=stacked(options.images, shape.prompts),
  )


def _check_positions(model: nnx.Module, longest: int, steps: int) -> None:
  most = decoders.max_positions(model)
  if most is not None and longest + steps > most:
    raise ValueError(
      f"max_generation_steps is {steps} after a prompt of {longest} tokens, together "
      f"{longest + steps}; expected at most {most}, the positions of the model. "
      f"Generate at most {max(most - longest, 0)} tokens"
    )


def check_memory(
  model: nnx.Module,
  bounds: Limits,
  options: SamplingOptions,
  prompts: int,
  longest: int,
  steps: int,
) -> None:
  """Refuses a request whose tokens and cache are larger than the memory."""
  token_bytes = 4 + 1  # an int32 id, and a bool that is True if the slot is visible
  cache_bytes = decoders.decoder_of(model).cache_bytes

  @functools.cache
  def row_bytes(slots: int) -> int:
    # A cache of 1e9 slots has more elements than JAX can count, even in a shape. Above
    # 2**20 slots, each slot adds the same number of bytes, so the size is extrapolated.
    if slots > _LONG_ROW:
      of_slot = row_bytes(_LONG_ROW) - row_bytes(_LONG_ROW - 1)
      return row_bytes(_LONG_ROW) + (slots - _LONG_ROW) * of_slot
    return slots * token_bytes + cache_bytes(model, slots)

  def needed(samples: int, new: int) -> int:
    beams = options.beam_size and samples
    stated = options.max_prompt_length
    shape = bounds.shape(prompts, samples, longest, new, stated, beams)
    return shape.rows * row_bytes(shape.slots)

  subject = "the tokens and the cache of all rows"
  name, samples = "num_samples", options.num_samples
  if options.beam_size is not None:
    name, samples = "beam_size", options.beam_size
  capacity.require(name, samples, lambda n: needed(n, 1), subject)
  capacity.require("max_generation_steps", steps, lambda n: needed(samples, n), subject)


def limits_of(model: nnx.Module, mesh: Mesh | None, cache_size: int | None) -> Limits:
  """Returns the bounds of the model's requests."""
  rules = decoders.sharding_rules(model)
  shards = 1
  if mesh is not None and rules is not None:
    shards = math.prod(mesh.shape.get(axis, 1) for axis in rules.batch_axes)
  is_movable = decoders.decoder_of(model).shift is not None
  return Limits(cache_size=cache_size, movable=is_movable, shards=shards)


def mesh_of(state: nnx.State) -> Mesh | None:
  """Returns the mesh of the weights, or else the surrounding one."""
  mesh = mesh_lib.mesh_of(state)
  return mesh_lib.current_mesh() if mesh is None else mesh


def _key_maker(options: SamplingOptions) -> Callable[[], jax.Array]:
  """Returns a function that makes the call's random key.

  A key array belongs to the mesh under which it is created, which may not be the mesh
  of the request. The caller's key is therefore copied to the host as integers, and the
  returned function creates a key from them under the mesh of the request.
  """
  is_greedy = options.temperature == 0
  key = batching.random_key(0 if options.seed is None and is_greedy else options.seed)
  data, kind = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)
  return lambda: jax.random.wrap_key_data(jnp.asarray(data), impl=kind)


def _planned_key(make: Callable[[], jax.Array], mesh: Mesh | None) -> Any:
  """Returns the shape of the key, replicated over the mesh like the key itself."""
  key = jax.eval_shape(make)
  sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
  return key if sharding is None else mesh_lib.put(key, sharding)


def _draw(
  options: SamplingOptions, rows: int, vocab_size: int | None, key: jax.Array
) -> decode.Draw:
  """Returns the choice of tokens for all rows."""
  is_greedy = options.temperature == 0
  first = options.first_prompt * options.num_samples

  # One value per row, as an array argument: a new value compiles no new program.
  def each(value, kind):
    return np.full(rows, value, kind)

  return decode.Draw(
    rows=np.arange(first, first + rows, dtype=np.int32),
    key=key,
    forbidden=forbidden(options.forbidden_tokens, vocab_size),
    temperature=None if is_greedy else each(options.temperature, np.float32),
    filter_values={
      name: each(value, filters.OFF[name].dtype)
      for name, value in options.filters.items()
    },
  )


def forbidden(
  tokens: Sequence[int] | None, vocab_size: int | None
) -> np.ndarray | None:
  """Returns ids that are never chosen, padded by `batching.id_list`, or None.

  Raises:
    ValueError: an id is outside the vocabulary, or every id is forbidden.
  """
  if tokens is None or len(tokens) == 0:
    return None
  check_ids(tokens, "forbidden_tokens", vocab_size)
  if len(set(tokens)) == vocab_size:
    raise ValueError("forbidden_tokens names every token: leave at least one")
  return batching.id_list(tokens)


def check_prompt(
  model: nnx.Module,
  prompt: np.ndarray,
  images: PromptImages | None,
  vocab_size: int | None,
  among_images: bool = False,
) -> None:
  """Refuses a prompt with ids outside the vocabulary, or with too few or many images.

  Args:
    model: the model.
    prompt: token ids.
    images: the images of the prompt, or None.
    vocab_size: V; None if it is not known.
    among_images: if True, other prompts of the call have images.

  Raises:
    ValueError: see above.
  """
  if among_images or images is not None:
    images_lib.check(model, prompt, images)
    # A vocabulary need not have the soft token.
    prompt = prompt[prompt != images_lib.soft_token(model)]
  check_ids(prompt, "a prompt", vocab_size)


def check_ids(ids: object, subject: str, vocab_size: int | None) -> None:
  """Refuses token ids outside a vocabulary; None stands for an unknown size."""
  ids = np.asarray(ids)
  size = batching.NO_TOKEN if vocab_size is None else vocab_size
  wrong = ids[(ids < 0) | (ids >= size)]
  if wrong.size:
    allowed = "0 or more" if vocab_size is None else f"from 0 to {vocab_size - 1}"
    raise ValueError(
      f"{subject} has token id {wrong[0]}; expected ids of the model, {allowed}. Check "
      "that the tokenizer belongs to this model"
    )
