"""The train and eval steps: pure functions over the arrays of a split module.

A step adds up sums and weights over the micro-batches of a global batch, divides once,
and applies the optimizer. Nothing here knows about cadence, files or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tunix.ops.reductions import WeightedSum, safe_divide
from tunix.sft.module_state import Skeleton

# (model, batch) -> scalar | WeightedSum | (either, dict of either)
BatchLoss = Callable[[nnx.Module, Any], Any]


class Group(NamedTuple):
  """Micro-batches of equal shape.

  Attributes:
    batches: one pytree a micro-batch.
    weights: float32 [k], 0 for a micro-batch that only fills the window up.
  """

  batches: Sequence[Any]
  weights: Any


class StepMetrics(NamedTuple):
  """Scalars of one step, still on the device.

  Attributes:
    loss: mean over everything that had weight.
    weight: the total weight (trained tokens, or examples).
    grad_norm: global L2 norm of the mean gradient.
    learning_rate: of `optax.inject_hyperparams`, else None.
    aux: the loss's extra outputs, each averaged with its own weights.
  """

  loss: jax.Array
  weight: jax.Array
  grad_norm: jax.Array
  learning_rate: jax.Array | None
  aux: Any


class _Sums(NamedTuple):
  """What is added up over micro-batches."""

  total: Any
  weight: Any
  aux: Any
  gradient: Any


def examples_in(batch: Any) -> int:
  """Size of the batch dimension: of the first array that has one.

  Raises:
    TypeError: no array has a batch dimension.
  """
  for leaf in jax.tree.leaves(batch):
    if getattr(leaf, "ndim", 0):
      return leaf.shape[0]
  raise TypeError(
    f"a batch of type {type(batch).__name__} holds no array with a batch dimension, so "
    "it cannot be weighted by example: return a WeightedSum from the loss"
  )


def weigh(out: Any, batch: Any) -> tuple[WeightedSum, Any]:
  """What a loss returned, as (weighted sum, aux with a WeightedSum at every leaf).

  A scalar is the mean over the micro-batch's examples and is weighted by their number;
  a scalar of aux is weighted as the loss is.

  Raises:
    TypeError: something else was returned.
  """
  aux = {}
  if isinstance(out, tuple) and not isinstance(out, WeightedSum):
    if len(out) != 2:
      raise TypeError(
        f"a loss returned {len(out)} values: expected loss or (loss, aux)"
      )
    out, aux = out
  if not isinstance(out, WeightedSum):
    value = jnp.asarray(out)
    if value.ndim:
      raise TypeError(
        f"a loss returned an array of shape {value.shape}: return a scalar mean, or "
        "tunix.ops.reductions.weighted_sum(values, weights)"
      )
    examples = examples_in(batch)
    # A mean over no example is NaN, and 0 * NaN would spoil the sums of the others.
    total = value * examples if examples else jnp.zeros_like(value)
    out = WeightedSum(total, jnp.asarray(examples, jnp.float32))
  return out, map_sums(lambda leaf: _as_sum(leaf, out.weight), aux)


def _as_sum(leaf: Any, weight: jax.Array) -> WeightedSum:
  if isinstance(leaf, WeightedSum):
    return leaf
  return WeightedSum(jnp.asarray(leaf, jnp.float32) * weight, weight)


def map_sums(function: Callable[[Any], Any], aux: Any) -> Any:
  """`function` of every leaf of aux; a WeightedSum is one leaf."""
  return jax.tree.map(function, aux, is_leaf=lambda x: isinstance(x, WeightedSum))


def make_train_step(
  skeleton: Skeleton, loss: BatchLoss, tx: optax.GradientTransformation
) -> Callable[..., tuple[Any, Any, Any, StepMetrics]]:
  """Builds `step(params, opt_state, rest, frozen, groups)`.

  Args:
    skeleton: how the arrays make up the module.
    loss: called on a merged module and one micro-batch.
    tx: the optimizer.

  Returns: a pure function that returns (params, opt_state, rest, StepMetrics);
    `groups` is a sequence of Group. The module runs with `.train()`: dropout on.
  """

  def one(params, rest, frozen, batch) -> tuple[Any, _Sums]:
    def weighted(params):
      model = skeleton.merge(params, frozen, rest)
      model.train()
      result, aux = weigh(loss(model, batch), batch)
      return result.total, (result.weight, aux, skeleton.rest_of(model))

    (total, (weight, aux, rest)), gradient = jax.value_and_grad(weighted, has_aux=True)(
      params
    )
    return rest, _Sums(total, weight, aux, gradient)

  def step(params, opt_state, rest, frozen, groups):
    rest, sums = _accumulate(one, params, rest, frozen, groups)
    gradient = jax.tree.map(
      lambda g, p: safe_divide(g, sums.weight).astype(p.dtype), sums.gradient, params
    )
    with jax.named_scope("optimizer"):
      updates, opt_state = tx.update(gradient, opt_state, params)
      params = optax.apply_updates(params, updates)
    metrics = StepMetrics(
      loss=safe_divide(sums.total, sums.weight),
      weight=sums.weight,
      grad_norm=optax.tree.norm(gradient),
      learning_rate=injected_learning_rate(opt_state),
      aux=map_sums(WeightedSum.mean, sums.aux),
    )
    return params, opt_state, rest, metrics

  return step


def jit_train_step(
  skeleton: Skeleton,
  loss: BatchLoss,
  tx: optax.GradientTransformation,
  layout: tuple[Any, Any] | None,
) -> Callable[..., Any]:
  """`make_train_step` compiled; parameters and optimizer state are donated.

  Args:
    skeleton, loss, tx: as `make_train_step`.
    layout: shardings of (params, opt_state), kept from step to step; None: one device.
  """
  options: dict[str, Any] = {"donate_argnums": (0, 1)}
  if layout is not None:
    options["out_shardings"] = (*layout, None, None)
  return jax.jit(make_train_step(skeleton, loss, tx), **options)


def make_gradient(skeleton: Skeleton, loss: BatchLoss) -> Callable[..., Any]:
  """Builds `gradient(params, rest, frozen, groups)`: the mean gradient that a step of
  the same arguments would hand to the optimizer."""
  captured = optax.GradientTransformation(
    lambda params: params, lambda updates, state, params=None: (updates, updates)
  )
  step = make_train_step(skeleton, loss, captured)

  def gradient(params, rest, frozen, groups):
    return step(params, params, rest, frozen, groups)[1]

  return gradient


def make_eval_step(
  skeleton: Skeleton, loss: BatchLoss
) -> Callable[..., tuple[WeightedSum, Any]]:
  """Builds `step(params, rest, frozen, batch) -> (WeightedSum, aux of WeightedSums)`.

  The module runs with `.eval()`: dropout off, batch statistics fixed.
  """

  def step(params, rest, frozen, batch):
    model = skeleton.merge(params, frozen, rest)
    model.eval()
    return weigh(loss(model, batch), batch)

  return step


def injected_learning_rate(opt_state: Any) -> jax.Array | None:
  """The learning rate in the state of `optax.inject_hyperparams`, if it is there."""
  rates = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
  return jnp.asarray(rates[0][1], jnp.float32) if rates else None


def _accumulate(one, params, rest, frozen, groups) -> tuple[Any, _Sums]:
  """Sums over all micro-batches; a scan where several share a shape."""
  if len(groups) == 1 and len(groups[0].batches) == 1:
    return one(params, rest, frozen, groups[0].batches[0])  # never a filler

  first = groups[0].batches[0]
  shapes = jax.eval_shape(lambda: one(params, rest, frozen, first)[1])
  sums = jax.tree.map(_zeros, shapes)

  def add(carry, item):
    rest, sums = carry
    batch, weight = item
    after, part = one(params, rest, frozen, batch)
    # A filler leaves no trace: no RNG draw, no batch statistics.
    rest = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), after, rest)
    return (rest, jax.tree.map(jnp.add, sums, _scaled(part, weight))), None

  for group in groups:
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *group.batches)
    (rest, sums), _ = jax.lax.scan(add, (rest, sums), (stacked, group.weights))
  return rest, sums


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
  """Where sums begin: in float32, or wider where they are."""
  return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _scaled(sums: _Sums, weight: jax.Array) -> _Sums:
  """A micro-batch's sums, or zeros; no product, so that a filler's NaN is lost."""
  return jax.tree.map(lambda x: jnp.where(weight > 0, x, jnp.zeros_like(x)), sums)
