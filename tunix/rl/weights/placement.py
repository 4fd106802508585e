"""Moves weights between the devices of roles, and between devices and host memory.

A role is one of the models of an RL run, such as the actor. `rl_cluster` decides which
role uses which devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.models import backbone, lora, quantization
from tunix.models.adapters import lora_modules
from tunix.models.transformer.model import Transformer
from tunix.rl.weights.policy_version import PolicyVersion
from tunix.rl.weights.reshard import laid_out, landed, reshard_pytree
from tunix.sft.checkpoints import stamp
from tunix.sft.steps.module_state import trained_kind
from tunix.utils import tree

Reshard = Callable[[Any, Any], Any]
Needs = Literal["adapters", "merged", "weights"]

_HOST_KINDS = ("pinned_host", "unpinned_host")
# Key of the metadata that keeps the sharding of a parameter while it is a NumPy array.
_SHARDING = "offloaded_from"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """The weights of a policy, for rollouts that are sampled later.

  Attributes:
    version: version of the policy.
    arrays: parameters by path, on the devices of the model that samples, where `put`
      gives them its layout; or NumPy arrays, for engines on other hosts.
  """

  version: PolicyVersion
  arrays: Mapping[str, Any]


class WeightSyncError(RuntimeError):
  """The target model does not hold the weights that were sent to it."""


def devices_of(*models: nnx.Module | None) -> set[Any]:
  """Returns the devices that hold parameters of the models."""
  arrays = [x for m in models if m is not None for x in jax.tree.leaves(nnx.state(m))]
  return {d for x in arrays if isinstance(x, jax.Array) for d in x.devices()}


def _adapters(model: nnx.Module) -> dict[str, jax.Array]:
  return tree.flatten(nnx.state(model, nnx.LoRAParam))


def check_devices(meshes: Mapping[str, Mesh]) -> None:
  """Checks, if there are several processes, that all roles use the same devices.

  The order of the devices must be equal too; the axes of the meshes may differ. With
  several processes, only a compiled program can change the layout of an array, and it
  keeps the devices and their order. A single process cannot send the shards that are on
  devices of other processes.

  Raises:
    ValueError: two roles have different devices.
  """
  if not meshes or jax.process_count() == 1:
    return
  (first, mesh), *others = meshes.items()
  for role, other in others:
    if list(other.devices.flat) != list(mesh.devices.flat):
      raise ValueError(
        f"the {role} has other devices than the {first}, or the same in another order: "
        f"with {jax.process_count()} processes every role needs all devices in the "
        "same order; make the mesh of each role by create_mesh(axes), whose axes may "
        "differ, or run one process"
      )


def offload(model: nnx.Module) -> Any:
  """Moves the parameters of a module to host memory, in place, until `onload`.

  The parameters go to pinned host memory if the backend has it, else to unpinned host
  memory, else to NumPy arrays. One array moves at a time. If another module shares an
  array, the array also stays on the devices for that module, and `onload` makes a
  second copy there.

  Returns:
    `model`, which cannot run until `onload`.
  """
  for variable in _by_path(model).values():
    value = variable.get_value()
    if isinstance(value, np.ndarray):
      continue
    sharding = value.sharding
    kind = _host_kind(value)
    if kind is None:
      moved = np.asarray(value)
      variable.set_metadata(_SHARDING, sharding)
    else:
      moved = jax.device_put(value, sharding.with_memory_kind(kind)).block_until_ready()
    del value  # otherwise the array stays on the device until the next iteration
    variable.set_value(moved)
  return model


def onload(model: nnx.Module) -> Any:
  """Moves the parameters of an offloaded module back to the devices, in place.

  Bits, devices and shardings are the same as before `offload`. Parameters that are on
  devices are unchanged.

  Returns:
    `model`.
  """
  for variable in _by_path(model).values():
    value = variable.get_value()
    sharding = variable.get_metadata().get(_SHARDING)
    if sharding is not None:
      variable.set_value(jax.device_put(value, sharding))
      variable.del_metadata(_SHARDING)
    elif value.sharding.memory_kind in _HOST_KINDS:
      # The default memory is the accelerator's own memory. The rest of the sharding did
      # not change in `offload`.
      kind = next(iter(value.devices())).default_memory().kind
      sharding = value.sharding.with_memory_kind(kind)
      variable.set_value(jax.device_put(value, sharding))
  return model


def _host_kind(x: jax.Array) -> str | None:
  device = next(iter(x.devices()))
  offered = {memory.kind for memory in device.addressable_memories()}
  return next((kind for kind in _HOST_KINDS if kind in offered), None)


def sync_needs(source: nnx.Module, target: nnx.Module) -> Needs:
  """Returns which weights of `source` make `target` the same policy.

  Returns:
    "adapters" if both have the same adapters, because after a first sync no other
    weights can differ. "merged" if only the source has adapters. "weights" if neither
    has adapters.

  Raises:
    ValueError: only the target has adapters, or the adapters differ.
  """
  sent, held = _adapters(source), _adapters(target)
  if not held:
    return "merged" if sent else "weights"
  # Equal A and B with another scale (alpha / r) give another policy.
  if sent.keys() != held.keys() or scales(source) != scales(target):
    raise ValueError(
      f"the source has adapters ({_summary(sent)}) and the target others "
      f"({_summary(held)}), or their scales differ: apply one LoraConfig to both, or "
      "remove the target's adapters so that it receives merged weights"
    )
  return "adapters"


def _summary(adapters: dict[str, jax.Array]) -> str:
  return f"{len(adapters)}, from {next(iter(adapters))}" if adapters else "none"


def scales(model: nnx.Module) -> dict[str, float]:
  """Returns the scale of each adapter (alpha / r) by its path."""
  if not isinstance(model, Transformer):
    return {}
  adapted = lora_modules.adapted(model)
  return {path: linear.lora_scale for path, linear in adapted.items()}


def copy_weights(source: Any, target: Any, reshard: Reshard = reshard_pytree) -> int:
  """Copies the policy of `source` to `target`, in place; see `sync_needs`.

  Only parameters whose content differs are sent, cast to the target's dtypes. For a
  LoRA actor and a target with the same frozen weights, these are the adapters. Content
  stamps (checksums) are compared before and after the transfer, so that a `reshard`
  function that loses an update raises an error. Computing the stamps reads the weights
  of both models once, except arrays that the models share.

  Args:
    source: the trained model; unchanged.
    target: a model of the same architecture on any mesh, with or without adapters and
      with any dtypes. Kernels that it alone stores quantized are encoded; under
      adapters, which do not change them, they stay (`quantization.for_sampling`).
    reshard: function that moves the arrays, from a dict of arrays and a dict of
      shardings with the same keys to a dict of arrays.

  Returns:
    Number of bytes that were sent, in the dtypes of the target; 0 if nothing differs.

  Raises:
    ValueError: the models' parameters or adapters do not match.
    WeightSyncError: the target does not hold the weights that were sent.
  """
  if (needs := sync_needs(source, target)) == "merged":
    source = _merged(source)
  variables = _by_path(target)
  held = _arrays(variables)
  # `_matched` leaves out arrays that both models share, so they need no stamp.
  arrays = _matched(*_in_forms_of(target, _arrays(_by_path(source)), held, needs))
  new = stamp.leaf_stamps(arrays)
  old = stamp.leaf_stamps({path: held[path] for path in arrays})
  sent = {path: x for path, x in arrays.items() if new[path] != old[path]}
  if not sent:
    return 0
  moved = reshard(sent, {path: held[path].sharding for path in sent})
  # Checked before the target is changed, so that a failed transfer leaves it unchanged.
  _check_arrival({path: new[path] for path in sent}, stamp.leaf_stamps(moved), old)
  for path, value in moved.items():
    variables[path].set_value(value)
  return tree.size_bytes(moved)


def sent(source: Any, target: Any) -> dict[str, jax.Array]:
  """Returns the parameters of `source` that `target` does not share, for `put`.

  They are the trained parameters: with LoRA, the adapters, on any mesh. On the devices
  of `source` they are its own arrays. A trainer copies its arrays before an update if
  its module holds them, so these stay alive as long as the result (see
  sft/steps/module_state.py).

  Args:
    source: the trained model.
    target: a clone of it, on any mesh, whose devices may run programs of another
      thread meanwhile; this function starts none on them.
  """
  kind = trained_kind(source)
  held = _arrays(_by_path(target, kind))
  arrays = quantization.encode_like(_arrays(_by_path(source, kind)), target)
  arrays = _matched(arrays, held)
  # An array that is in its place already is not moved: `device_put` would commit it to
  # its device, and programs are compiled again for committed arrays.
  far = {path: x for path, x in arrays.items() if x.sharding != held[path].sharding}
  moved = landed(far, {path: held[path].sharding for path in far})
  return arrays | moved


def put(model: nnx.Module, arrays: Mapping[str, jax.Array]) -> None:
  """Gives a model the parameters that `sent` returned, in place."""
  variables = _by_path(model)
  for path, value in arrays.items():
    held = variables[path].get_value()
    variables[path].set_value(laid_out(value, held.sharding))


def _merged(source: object) -> Any:
  if not isinstance(source, Transformer) or not lora_modules.adapted(source):
    raise ValueError(
      f"the adapters of {type(source).__name__} were not made by lora.apply and cannot "
      "be merged: give the target the same adapters"
    )
  return lora.merge(source)


def _in_forms_of(
  target: nnx.Module, arrays: dict[str, Any], held: dict[str, Any], needs: Needs
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the arrays of source and target whose paths match."""
  if needs != "adapters":
    return quantization.encode_like(arrays, target), held
  parts = (".codes", ".scales")
  alone = {x for x in held.keys() - arrays.keys() if x.endswith(parts)}
  frozen = {x.rpartition(".")[0] for x in alone}
  return (
    {path: x for path, x in arrays.items() if path not in frozen},
    {path: x for path, x in held.items() if path not in alone},
  )


def _by_path(model: nnx.Module, kind: Any = nnx.Param) -> dict[str, nnx.Variable]:
  return {
    ".".join(map(str, path)): node
    for path, node in nnx.iter_graph(model)
    if isinstance(node, kind)
  }


def _arrays(variables: dict[str, nnx.Variable]) -> dict[str, jax.Array]:
  return {path: variable.get_value() for path, variable in variables.items()}


def _matched(
  arrays: dict[str, jax.Array], held: dict[str, jax.Array]
) -> dict[str, jax.Array]:
  """Returns the source's arrays in the target's dtypes, without shared arrays."""
  unmatched = sorted(arrays.keys() ^ held.keys())
  if unmatched:
    side = "source" if unmatched[0] in arrays else "target"
    raise ValueError(
      f"only the {side} has the parameter {unmatched[0]!r} ({len(unmatched)} "
      "parameters do not match): the models need the same architecture, stacking and "
      "quantization"
    )
  out = {}
  for path, x in arrays.items():
    if x.shape != held[path].shape:
      raise ValueError(
        f"parameter {path!r} has shape {x.shape} in the source and "
        f"{held[path].shape} in the target: they are models of different sizes"
      )
    # The cast comes before the stamps, because stamps compare bits: bfloat16 weights
    # never have the bits of float32 weights.
    if not backbone.same_memory(x, held[path]):
      is_equal = x.dtype == held[path].dtype
      out[path] = x if is_equal else x.astype(held[path].dtype)
  return out


def _check_arrival(
  sent: dict[str, str], received: dict[str, str], old: dict[str, str]
) -> None:
  """Compares the content stamps of parameters before and after the transfer."""
  wrong = sorted(path for path in sent if received.get(path) != sent[path])
  if not wrong:
    return
  first = wrong[0]
  state = {None: "got nothing", old[first]: "still has its old content"}
  raise WeightSyncError(
    f"{len(wrong)} of {len(sent)} changed parameters did not arrive: the target "
    f"{state.get(received.get(first), 'has other content')} for {first!r}; the "
    "transport lost the update, and rollouts would come from another policy"
  )
