"""Optimizer state in the host's memory, where that of the devices is short.

It comes to the device for the update and goes back in the same program; forward and
backward pass have its place. (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, updates
on the host instead: processors of a TPU's host would take longer than the transfer.)
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from tunix.utils import mesh as mesh_lib

_HOST, _DEVICE = "pinned_host", "device"


def check(mesh: jax.sharding.Mesh | None) -> None:
  """Refuses devices that cannot keep arrays in their host's memory.

  Raises:
    ValueError: names what they have.
  """
  if mesh is not None and mesh_lib.is_planned(mesh):
    return  # the compiler knows
  device = jax.local_devices()[0]
  kinds = {memory.kind for memory in device.addressable_memories()}
  if not {_HOST, _DEVICE} <= kinds:
    raise ValueError(
      f"offload_optimizer keeps the optimizer's state in {_HOST} memory, and "
      f"{device.platform} devices here have {', '.join(sorted(kinds))} only: leave it "
      "out"
    )


def layout(opt_state: Any, where: Any) -> Any:
  """The shardings of an optimizer's state with what is large in the host's memory.

  Args:
    opt_state: arrays or shapes; scalars stay where they are.
    where: their shardings.
  """
  return jax.tree.map(
    lambda x, place: place.with_memory_kind(_HOST) if x.ndim else place,
    opt_state,
    where,
  )


def is_on_host(x: Any) -> bool:
  """Of an array or a shape."""
  where = getattr(x, "sharding", None)
  return where is not None and where.memory_kind == _HOST


def updated_on_device(
  tx: optax.GradientTransformation, where: Any
) -> optax.GradientTransformation:
  """`tx` for a state that lies as `where` says, some of it in the host's memory."""

  def moved(state: Any, kind: str) -> Any:
    return jax.tree.map(
      lambda x, place: (
        jax.device_put(x, place.with_memory_kind(kind))
        if place.memory_kind == _HOST
        else x
      ),
      state,
      where,
    )

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates, state = tx.update(updates, moved(state, _DEVICE), params)
    return updates, moved(state, _HOST)

  return optax.GradientTransformation(tx.init, update)
