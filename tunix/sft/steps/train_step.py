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

from tunix.models.transformer.experts import routing
from tunix.ops.reductions import WeightedSum, safe_divide
from tunix.sft.steps import router_losses
from tunix.sft.steps.module_state import Skeleton
from tunix.utils import tree

# (model, batch) -> scalar | WeightedSum | (either, dict of either)
BatchLoss = Callable[[nnx.Module, Any], Any]


class Group(NamedTuple):
  """The k micro-batches of a global batch that have equal shapes.

  Attributes:
    batches: one pytree for each micro-batch.
    weights: float32 [k]; 0 for a filler, a micro-batch that only completes the number.
  """

  batches: Sequence[Any]
  weights: Any


class StepMetrics(NamedTuple):
  """The scalars of one step, on the device.

  Attributes:
    loss: weighted mean of the loss over the global batch, with the weighted losses of
      routers.
    weight: sum of the weights (trained tokens, or examples).
    grad_norm: global L2 norm of the mean gradient.
    learning_rate: the rate in the state of `optax.inject_hyperparams`, else None.
    aux: extra outputs of the loss, each a mean with its own weights.
    router: metrics of the routers of experts by name, see `router_losses`; empty for
      other models.
  """

  loss: jax.Array
  weight: jax.Array
  grad_norm: jax.Array
  learning_rate: jax.Array | None
  aux: Any
  router: Any = None


class _Sums(NamedTuple):
  """The sums over the micro-batches of a global batch."""

  total: Any
  weight: Any
  aux: Any
  router: Any
  gradient: Any


def examples_in(batch: object) -> int:
  """Returns the first dimension of the first array that has one.

  Raises:
    TypeError: No array has a dimension.
  """
  for leaf in jax.tree.leaves(batch):
    if tree.has_axes(leaf):
      return leaf.shape[0]
  raise TypeError(
    f"a batch of type {type(batch).__name__} holds no array with a batch dimension, so "
    "it cannot be weighted by example. Return a WeightedSum from the loss."
  )


def weigh(out: object, batch: object) -> tuple[WeightedSum, Any]:
  """Converts the return value of a loss into weighted sums.

  A scalar loss is taken as a mean over the micro-batch's examples, and its weight is
  their number. A scalar in aux has the weight of the loss.

  Args:
    out: a scalar or a WeightedSum, or a pair of one of them and aux.
    batch: the micro-batch.

  Returns: (the loss, aux with a WeightedSum at every leaf).

  Raises:
    TypeError: The loss returned something else.
  """
  aux = {}
  if isinstance(out, tuple) and not isinstance(out, WeightedSum):
    if len(out) != 2:
      raise TypeError(
        f"a loss returned {len(out)} values; expected loss or (loss, aux)"
      )
    out, aux = out
  if not isinstance(out, WeightedSum):
    value = jnp.asarray(out)
    if value.ndim:
      raise TypeError(
        f"a loss returned an array of shape {value.shape}; expected a scalar. Return a "
        "mean, or tunix.ops.reductions.weighted_sum(values, weights)."
      )
    examples = examples_in(batch)
    # A mean over no example is NaN, and 0 * NaN would make the sums NaN.
    total = value * examples if examples else jnp.zeros_like(value)
    out = WeightedSum(total, jnp.asarray(examples, jnp.float32))
  return out, map_sums(lambda leaf: _as_sum(leaf, out.weight), aux)


def _as_sum(leaf: object, weight: jax.Array) -> WeightedSum:
  if isinstance(leaf, WeightedSum):
    return leaf
  return WeightedSum(jnp.asarray(leaf, jnp.float32) * weight, weight)


def map_sums(function: Callable[[Any], Any], aux: object) -> Any:
  """Applies a function to every leaf of aux; a WeightedSum is one leaf."""
  return jax.tree.map(function, aux, is_leaf=lambda x: isinstance(x, WeightedSum))


def make_train_step(
  skeleton: Skeleton, loss: BatchLoss, tx: optax.GradientTransformation
) -> Callable[..., tuple[Any, Any, Any, StepMetrics]]:
  """Builds `step(params, opt_state, rest, frozen, groups)`.

  Args:
    skeleton: merges the arrays into a module.
    loss: function of a merged module and one micro-batch.
    tx: the optimizer.

  Returns: a pure function that returns (params, opt_state, rest, StepMetrics). Its
    `groups` are a sequence of Group. The module is in train mode: dropout is on.
  """

  def one(params, rest, frozen, batch) -> tuple[Any, _Sums]:
    def weighted(params):
      model = skeleton.merge(params, frozen, rest)
      model.train()
      with routing.logged(model) as logs:
        result, aux = weigh(loss(model, batch), batch)
        result, router = router_losses.added(result, logs)
      return result.total, (result.weight, aux, router, skeleton.rest_of(model))

    grad = jax.value_and_grad(weighted, has_aux=True)
    (total, (weight, aux, router, rest)), gradient = grad(params)
    return rest, _Sums(total, weight, aux, router, gradient)

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
      router=map_sums(WeightedSum.mean, sums.router),
    )
    return params, opt_state, rest, metrics

  return step


def jit_train_step(
  skeleton: Skeleton,
  loss: BatchLoss,
  tx: optax.GradientTransformation,
  layout: tuple[Any, Any] | None,
) -> Callable[..., Any]:
  """Returns the jitted train step, which donates parameters and optimizer state.

  Args:
    skeleton, loss, tx: see `make_train_step`.
    layout: shardings of (params, opt_state), which the results keep; None: one device.
  """
  options: dict[str, Any] = {"donate_argnums": (0, 1)}
  if layout is not None:
    options["out_shardings"] = (*layout, None, None)
  return jax.jit(make_train_step(skeleton, loss, tx), **options)


def make_gradient(skeleton: Skeleton, loss: BatchLoss) -> Callable[..., Any]:
  """Builds `gradient(params, rest, frozen, groups)`, the mean gradient of a step.

  It is the gradient that a train step with the same arguments gives to the optimizer.
  """
  # An "optimizer" whose new state is the gradient.
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

  The module is in eval mode: dropout is off, batch statistics are fixed.
  """

  def step(params, rest, frozen, batch):
    model = skeleton.merge(params, frozen, rest)
    model.eval()
    return weigh(loss(model, batch), batch)

  return step


def jit_eval_step(skeleton: Skeleton, loss: BatchLoss) -> Callable[..., Any]:
  """Returns the jitted evaluation step."""
  return jax.jit(make_eval_step(skeleton, loss))


def injected_learning_rate(opt_state: optax.OptState) -> jax.Array | None:
  """Returns the learning rate in the state of `optax.inject_hyperparams`, or None."""
  rates = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
  return jnp.asarray(rates[0][1], jnp.float32) if rates else None


def _accumulate(one, params, rest, frozen, groups) -> tuple[Any, _Sums]:
  """Sums over all micro-batches, with a scan over each group of equal shapes."""
  if len(groups) == 1 and len(groups[0].batches) == 1:
    return one(params, rest, frozen, groups[0].batches[0])  # it is never a filler

  first = groups[0].batches[0]
  shapes = jax.eval_shape(lambda: one(params, rest, frozen, first)[1])
  sums = jax.tree.map(_zeros, shapes)

  def add(carry, item):
    rest, sums = carry
    batch, weight = item
    after, part = one(params, rest, frozen, batch)
    # A filler must change nothing: neither RNG counters nor batch statistics.
    rest = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), after, rest)
    return (rest, jax.tree.map(jnp.add, sums, _scaled(part, weight))), None

  for group in groups:
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *group.batches)
    (rest, sums), _ = jax.lax.scan(add, (rest, sums), (stacked, group.weights))
  return rest, sums


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns zeros for a sum: float32, or the dtype of `x` if it is wider."""
  return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _scaled(sums: _Sums, weight: jax.Array) -> _Sums:
  """Returns the sums, or zeros for a filler.

  `jnp.where` drops a NaN of the filler; a product with 0 would keep it.
  """
  return jax.tree.map(lambda x: jnp.where(weight > 0, x, jnp.zeros_like(x)), sums)
