"""A job whose rollouts have devices of their own: the weights that go there.

After each batch, the devices that sample get the weights that are trained: the adapters
with LoRA, else all.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.perf.chips import Chip
from tunix.plan import residents
from tunix.plan.residents import gib
from tunix.rl import placement
from tunix.rl.rl_cluster import RLCluster


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handover:
  """The devices that only sample, and the weights that they receive.

  Attributes:
    mesh: {axis: size} of these devices.
    devices: their number.
    trained_bytes: bytes of the weights that are trained.
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
  actor, sampled = cluster.actor_trainer.model, cluster.rollout.model()
  assert sampled is not None
  only = placement.sync_needs(actor, sampled) == "adapters"
  kind = nnx.LoRAParam if only else nnx.Param
  whole = jax.tree.leaves(nnx.state(actor, kind))
  of_device = sum(map(residents.shard_bytes, jax.tree.leaves(nnx.state(sampled, kind))))
  trained = sum(x.size * x.dtype.itemsize for x in whole)
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
