"""The routes of a decoder's calls: logged for losses and metrics, recorded, replayed.

A log is a part of the model while it is open. Calls of the decoder then add the sums of
`ops.router` to it, and gradients flow through these sums:

    with routing.logged(model) as log:
      loss = loss_fn(model, batch)
    loss += weight * log.sums().balance_loss()

Replay gives a call the experts that each token uses, as an earlier call recorded them.
The weights of the experts are still those of the call's own router (Ma et al. 2025,
"rollout routing replay", arXiv:2510.11370).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.models.transformer.config import MoEConfig
from tunix.models.transformer.visibility import Visibility
from tunix.ops import router
from tunix.ops.router import RouterSums


class RouterSum(nnx.Variable):
  """Sums over the routes of all calls since the log was opened."""


class RouterChoice(nnx.Variable):
  """Numbers of the experts of the last call's tokens, int32 [L, B, T, k]."""


class RouterLog(nnx.Module):
  """The log of one decoder.

  Attributes:
    total: the sums of all calls.
    choice: the experts of the last call, if they are recorded; else None.
    has_replay: True if a call replayed recorded experts.
    balance_weight, z_weight: see `MoEConfig`.
  """

  def __init__(self, config: MoEConfig, *, records: bool = False):
    self.total = RouterSum(router.empty(config.num_experts))
    self.balance_weight = config.balance_weight
    self.z_weight = config.z_weight
    self.has_replay = False
    self.choice = nnx.data(
      RouterChoice(jnp.zeros((0, 0, 0, 0), jnp.int32)) if records else None
    )


class Logs(list[RouterLog]):
  """The open logs of the decoders with experts in a model."""

  def sums(self) -> RouterSums | None:
    """Returns the sums of all calls; None if the model has no experts."""
    totals = [log.total.get_value() for log in self]
    return functools.reduce(RouterSums.plus, totals) if totals else None


@contextlib.contextmanager
def logged(model: nnx.Module, *, records: bool = False) -> Iterator[Logs]:
  """Opens a log in every decoder with experts, and removes it at the end.

  Args:
    model: a decoder, or a module that contains some.
    records: if True, the experts of the last call are recorded. The calls must not be
      differentiated: with `remat` each layer would keep the whole record.
  """
  decoders, logs = _decoders(model), Logs()
  for decoder in decoders:
    decoder.router_log = nnx.data(RouterLog(decoder.config.moe, records=records))
    logs.append(decoder.router_log)
  try:
    yield logs
  finally:
    for decoder in decoders:
      decoder.router_log = nnx.data(None)


@contextlib.contextmanager
def unlogged(model: nnx.Module) -> Iterator[None]:
  """Takes the logs away for a while: inside `jax.checkpoint` they cannot be written."""
  logs = [(decoder, decoder.router_log) for decoder in _decoders(model)]
  for decoder, _ in logs:
    decoder.router_log = nnx.data(None)
  try:
    yield
  finally:
    for decoder, log in logs:
      decoder.router_log = nnx.data(log)


def _decoders(model: nnx.Module) -> list[Any]:
  """Returns the decoders with experts in a model."""
  modules: list[Any] = [module for _, module in nnx.iter_modules(model)]
  return [
    module
    for module in modules
    if hasattr(module, "router_log") and module.config.moe is not None
  ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carried:
  """The state that goes from layer to layer beside the residual stream.

  Attributes:
    layer: number of the layer.
    sums: the sums so far, or None.
    choice: the record so far, int32 [L, B, T, k], or None.
  """

  layer: jax.Array
  sums: RouterSums | None
  choice: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Routes:
  """The settings of one call of the decoder.

  Attributes:
    log: the open log, or None.
    replay: the experts of each layer's tokens, integers [L, B, T, k], or None.
    weights: 1 for tokens that count in the sums and 0 for padding.
    start: the state before the first layer.
  """

  log: RouterLog | None
  replay: Int[Array, "L B T k"] | None
  weights: Float[Array, "B T"]
  start: Carried

  def layer(self, carried: Carried) -> LayerRoutes:
    """Returns the routes of the next layer."""
    return LayerRoutes(self, carried)

  def finish(self, carried: Carried) -> None:
    """Adds the sums of the call to the log, and writes the record."""
    if self.log is None:
      return
    assert carried.sums is not None
    self.log.has_replay |= self.replay is not None
    self.log.total.set_value(self.log.total.get_value().plus(carried.sums))
    if self.log.choice is not None:
      self.log.choice.set_value(carried.choice)


class LayerRoutes:
  """The routes of one layer; a layer with experts calls `add` once."""

  def __init__(self, routes: Routes, carried: Carried):
    self._routes, self._carried = routes, carried

  @property
  def replay(self) -> Int[Array, "B T k"] | None:
    """The experts that the layer's tokens use; None lets the router choose.

    The router also chooses for a token whose numbers are negative.
    """
    replay = self._routes.replay
    if replay is None:
      return None
    return replay[self._carried.layer].astype(jnp.int32)

  def add(
    self,
    logits: Float[Array, "B T E"],
    chosen: Int[Array, "B T k"],
    replaced: Float[Array, "B T 1"],
  ) -> None:
    """Logs the routes of the layer's tokens.

    Args:
      logits: logits of the router.
      chosen: the experts that are used.
      replaced: 1 where these are others than the router's choice, else 0.
    """
    carried, changes = self._carried, {}
    if carried.sums is not None:
      own = router.sums(logits, chosen, self._routes.weights, replaced[..., 0])
      changes["sums"] = carried.sums.plus(own)
    if carried.choice is not None:
      changes["choice"] = carried.choice.at[carried.layer].set(chosen)
    self._carried = dataclasses.replace(carried, **changes)

  def carried(self) -> Carried:
    """Returns the state for the next layer."""
    return dataclasses.replace(self._carried, layer=self._carried.layer + 1)


def of_call(
  model: nnx.Module,
  shape: tuple[int, int],
  visible: Visibility,
  replay: Int[Array, "L B T k"] | None,
) -> Routes | None:
  """Returns the routes of a call; None if nothing is logged or replayed.

  Args:
    model: the decoder.
    shape: (B, T) of the call.
    visible: the keys that each query attends to; it tells padding, if it is known.
    replay: see `Routes`.

  Raises:
    ValueError: the model has no experts, or `replay` has another shape.
  """
  log, moe, layers = model.router_log, model.config.moe, model.config.num_layers
  if log is None and replay is None:
    return None
  if moe is None:
    raise ValueError(
      "expert_choice is given; expected None for a model without experts"
    )
  full = (layers, *shape, moe.experts_per_token)
  if replay is not None and replay.shape != full:
    raise ValueError(
      f"expert_choice has shape {replay.shape}; expected [layers, rows, tokens, "
      f"experts of a token], {full}"
    )
  records = log is not None and log.choice is not None
  start = Carried(
    layer=jnp.zeros((), jnp.int32),
    sums=None if log is None else router.empty(moe.num_experts),
    choice=jnp.zeros(full, jnp.int32) if records else None,
  )
  return Routes(log, replay, visible.valid(*shape).astype(jnp.float32), start)
