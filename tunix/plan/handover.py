"""The weights that rollouts receive after each batch, and those that wait there.

They are the weights that are trained: the adapters with LoRA, else all. They travel if
the rollouts have devices of their own.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.perf.chips import Chip
from tunix.plan import residents
from tunix.plan.residents import gib
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.weights import placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handover:
  """The devices that only sample, and the weights that they receive.

  Attributes:
    mesh: {axis: size} of these devices.
    devices: their number.
    trained_bytes: bytes of the weights that are trained, in the form that samples.
    received_bytes: bytes of them that each of these devices receives after a batch.
    seconds: lower bound of the time of that; None: the rate of the links is not known.
    lag: batches that may be sampled ahead; 0: sampling and updates wait for each other.
  """

  mesh: dict[str, int]
  devices: int
  trained_bytes: int
  received_bytes: int
  seconds: float | None
  lag: int

  def __str__(self) -> str:
    time = "" if self.seconds is None else f", in at least {self.seconds * 1e3:,.1f} ms"
    order = f"at the same time (lag {self.lag})" if self.lag else "one after the other"
    return (
      f"weights: after each batch {gib(self.trained_bytes)} go to the {self.devices} "
      f"devices that sample, {gib(self.received_bytes)} to each{time}; sampling and "
      f"updates run {order}"
    )


def of_cluster(cluster: RLCluster, mesh: Mesh, chip: Chip | None, lag: int) -> Handover:
  """Returns the transfer of a cluster of shapes.

  Args:
    cluster: its rollouts are on `mesh`, and its actor is not.
    mesh: the devices that sample.
    chip: rates of a device; None: not known.
    lag: see `Handover`.
  """
  whole, of_device = _trained(cluster)
  trained = sum(x.size * x.dtype.itemsize for x in _sent(cluster))
  senders = max(len(x.sharding.device_set) for x in whole)
  rate = None if chip is None else chip.link_rate
  # Every byte leaves the devices that train, and each of the others receives its part.
  moved = max(of_device, trained / senders)
  return Handover(
    mesh={str(axis): int(size) for axis, size in mesh.shape.items()},
    devices=mesh.size,
    trained_bytes=trained,
    received_bytes=of_device,
    seconds=None if rate is None else moved / rate,
    lag=lag,
  )


def waiting_bytes(cluster: RLCluster, mesh: Mesh | None, copies: int) -> int:
  """Returns bytes of the weights that wait on each device that samples.

  Args:
    cluster: a cluster of shapes.
    mesh: the devices that only sample; None: those that train sample too.
    copies: sets of weights in memory besides the learner's.
  """
  # Devices that only sample have one set as arguments of their programs.
  more = copies if mesh is None else copies - 1
  return more * _trained(cluster)[1] if more > 0 else 0


def _trained(cluster: RLCluster) -> tuple[list[jax.ShapeDtypeStruct], int]:
  """Returns the trained weights, and their bytes on a device that samples."""
  whole = jax.tree.leaves(nnx.state(cluster.actor_trainer.model, _kind(cluster)))
  return whole, sum(map(residents.shard_bytes, _sent(cluster)))


def _sent(cluster: RLCluster) -> list[jax.ShapeDtypeStruct]:
  """Returns the trained weights in the form in which they sample, and travel."""
  return jax.tree.leaves(nnx.state(cluster.rollout.model(), _kind(cluster)))


def _kind(cluster: RLCluster) -> type[nnx.Param]:
  actor, sampled = cluster.actor_trainer.model, cluster.rollout.model()
  only = placement.sync_needs(actor, sampled) == "adapters"
  return nnx.LoRAParam if only else nnx.Param
