"""Optimizer state in host memory, which frees device memory for a step.

The step copies the state to the device for the update and back in the same program. The
forward and the backward pass can use the freed memory. ZeRO-Offload (Ren et al. 2021,
arXiv:2101.06840) updates on the host instead; the processors of a TPU host would need
more time for the update than the transfer takes.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from tunix.utils import mesh as mesh_lib

_HOST, _DEVICE = "pinned_host", "device"


def check(mesh: jax.sharding.Mesh | None) -> None:
  """Refuses devices that have no host memory for arrays.

  Raises:
    ValueError: A kind of memory is missing; the message lists the kinds.
  """
  if mesh is not None and mesh_lib.is_planned(mesh):
    return  # a mesh of a plan has no devices; its compiler checks the memory kinds
  device = jax.local_devices()[0]
  kinds = {memory.kind for memory in device.addressable_memories()}
  if not {_HOST, _DEVICE} <= kinds:
    raise ValueError(
      f"offload_optimizer is True and {device.platform} devices have the memory kinds "
      f"{', '.join(sorted(kinds))}; expected {_HOST} and {_DEVICE}. Leave it out."
    )


def layout(opt_state: optax.OptState, shardings: object) -> Any:
  """Returns shardings that place an optimizer's state in host memory.

  Args:
    opt_state: arrays or shapes; scalars stay on the device.
    shardings: their shardings on the device.
  """
  return jax.tree.map(
    lambda x, sharding: sharding.with_memory_kind(_HOST) if x.ndim else sharding,
    opt_state,
    shardings,
  )


def is_on_host(x: object) -> bool:
  """Returns True if an array, or a shape with a sharding, is in host memory."""
  sharding = mesh_lib.sharding_of(x)
  return sharding is not None and sharding.memory_kind == _HOST


def on_device(arrays: object) -> Any:
  """Returns arrays, or shapes, with those in host memory moved to their devices."""

  def moved(x: Any) -> Any:
    if not is_on_host(x):
      return x
    return mesh_lib.put(x, x.sharding.with_memory_kind(_DEVICE))

  return jax.tree.map(moved, arrays)


def updated_on_device(
  tx: optax.GradientTransformation, shardings: object
) -> optax.GradientTransformation:
  """Returns `tx` for a state in host memory, which it updates on the device.

  Args:
    tx: the optimizer.
    shardings: shardings of its state, from `layout`.
  """

  def moved(state: object, kind: str) -> Any:
    return jax.tree.map(
      lambda x, sharding: (
        jax.device_put(x, sharding.with_memory_kind(kind))
        if sharding.memory_kind == _HOST
        else x
      ),
      state,
      shardings,
    )

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates, state = tx.update(updates, moved(state, _DEVICE), params)
    return updates, moved(state, _HOST)

  return optax.GradientTransformation(tx.init, update)
