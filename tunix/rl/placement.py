"""Where the roles' weights lie, who shares them, and how they get to each other.

Pure helpers: which role lives where is decided in rl_cluster.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.models import backbone, lora, lora_modules
from tunix.models.transformer.model import Transformer
from tunix.rl.reshard import reshard_pytree
from tunix.sft import stamp
from tunix.utils import tree

Reshard = Callable[[Any, Any], Any]
Needs = Literal["adapters", "merged", "weights"]

_HOST_KINDS = ("pinned_host", "unpinned_host")
_HOME = "offloaded_from"


class WeightSyncError(RuntimeError):
  """Weights did not arrive: the target does not hold what was sent."""


def _adapters(model: nnx.Module) -> dict[str, jax.Array]:
  return tree.flatten(nnx.state(model, nnx.LoRAParam))


def check_devices(meshes: Mapping[str, Mesh]) -> None:
  """What several processes ask of the meshes of roles: axes may differ, devices may
  not. Arrays go from layout to layout by programs, which keep the devices and their
  order; no process can send alone what lies on other devices.

  Raises:
    ValueError: two roles have other devices.
  """
  if not meshes or jax.process_count() == 1:
    return
  (first, mesh), *others = meshes.items()
  for role, other in others:
    if list(other.devices.flat) != list(mesh.devices.flat):
      raise ValueError(
        f"the {role} has other devices than the {first}, or the same in another order: "
        f"with {jax.process_count()} processes every role takes all devices, in one "
        "order; give the mesh of each of them by create_mesh(axes), whose axes may "
        "differ, or run one process"
      )


def offload(model: Any) -> Any:
  """Moves a module's parameters to host memory, in place, until `onload`.

  Pinned memory where the backend has it, else unpinned, else NumPy arrays. One array
  moves at a time; what other modules share stays on the devices for them, and comes
  back as a second copy.

  Returns:
    `model`, which cannot run until `onload`.
  """
  for variable in _parameters(model):
    value = variable.get_value()
    if isinstance(value, np.ndarray):
      continue
    where = value.sharding
    kind = _host_kind(value)
    if kind is None:
      moved = np.asarray(value)
      variable.set_metadata(_HOME, where)
    else:
      moved = jax.device_put(value, where.with_memory_kind(kind)).block_until_ready()
    del value
    variable.set_value(moved)
  return model


def onload(model: Any) -> Any:
  """Brings back what `offload` moved: the same bits on the same devices, split as they
  were. Parameters that are there already stay as they are.

  Returns:
    `model`.
  """
  for variable in _parameters(model):
    value = variable.get_value()
    home = variable.get_metadata().get(_HOME)
    if home is not None:
      variable.set_value(jax.device_put(value, home))
      variable.del_metadata(_HOME)
    elif value.sharding.memory_kind in _HOST_KINDS:
      kind = next(iter(value.devices())).default_memory().kind
      where = value.sharding.with_memory_kind(kind)
      variable.set_value(jax.device_put(value, where))
  return model


def _parameters(model: nnx.Module) -> list[nnx.Variable]:
  return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]


def _host_kind(x: jax.Array) -> str | None:
  device = next(iter(x.devices()))
  offered = {memory.kind for memory in device.addressable_memories()}
  return next((kind for kind in _HOST_KINDS if kind in offered), None)


def sync_needs(source: nnx.Module, target: nnx.Module) -> Needs:
  """What of `source` makes `target` the same policy.

  "adapters" where both are adapted alike and only these can differ after a first
  sync, "merged" where only the source is adapted, "weights" where neither is.

  Raises:
    ValueError: only the target is adapted, or they are adapted differently.
  """
  ours, theirs = _adapters(source), _adapters(target)
  if not theirs:
    return "merged" if ours else "weights"
  if ours.keys() != theirs.keys() or _scales(source) != _scales(target):
    raise ValueError(
      f"the source's adapters ({_summary(ours)}) are not the target's "
      f"({_summary(theirs)}), or are scaled differently: apply one LoraConfig to both, "
      "or take the target's adapters away, which makes it get merged weights"
    )
  return "adapters"


def _summary(adapters: dict[str, jax.Array]) -> str:
  return f"{len(adapters)}, from {next(iter(adapters))}" if adapters else "none"


def _scales(model: nnx.Module) -> dict[str, float]:
  if not isinstance(model, Transformer):
    return {}
  adapted = lora_modules.adapted(model)
  return {path: linear.lora_scale for path, linear in adapted.items()}


def copy_weights(source: Any, target: Any, reshard: Reshard = reshard_pytree) -> int:
  """Gives `target` the policy of `source`, in place; see `sync_needs`.

  Only parameters whose content differs are sent: of a LoRA actor and a target with the
  same frozen weights, the adapters. They are cast to the target's dtypes first. What
  arrived is compared with what was sent by content stamps, so that a transport which
  loses an update is noticed. Both models are read once (about as long as reading their
  weights from memory); arrays that they share are not.

  Args:
    source: the trained model; unchanged.
    target: of the same architecture, on any mesh, with or without adapters; its dtypes
      may differ.
    reshard: called with a dict of arrays and one of shardings by the same names.

  Returns:
    Bytes that were sent, at their size in the target; 0 when nothing differs.

  Raises:
    ValueError: the models' parameters or adapters do not match.
    WeightSyncError: the target does not hold what was sent.
  """
  if sync_needs(source, target) == "merged":
    source = _merged(source)
  held = _parameter_arrays(target)
  arrays = _matched(_parameter_arrays(source), held)
  want, before = stamp.leaf_stamps(arrays), _stamps_of(held, arrays)
  sent = {path: x for path, x in arrays.items() if want[path] != before[path]}
  if not sent:
    return 0
  moved = reshard(sent, {path: held[path].sharding for path in sent})
  _check_arrival({path: want[path] for path in sent}, stamp.leaf_stamps(moved), before)
  variables = _by_path(target)
  for path, value in moved.items():
    variables[path].set_value(value)
  return tree.size_bytes(moved)


def _merged(source: Any) -> Any:
  if not isinstance(source, Transformer) or not lora_modules.adapted(source):
    raise ValueError(
      f"the adapters of {type(source).__name__} are not of lora.apply and cannot be "
      "merged here: give the target the same adapters"
    )
  return lora.merge(source)


def _by_path(model: nnx.Module) -> dict[str, nnx.Variable]:
  return {
    ".".join(map(str, path)): node
    for path, node in nnx.iter_graph(model)
    if isinstance(node, nnx.Param)
  }


def _parameter_arrays(model: nnx.Module) -> dict[str, jax.Array]:
  return {path: variable.get_value() for path, variable in _by_path(model).items()}


def _stamps_of(arrays: dict[str, jax.Array], paths: Iterable[str]) -> dict[str, str]:
  return stamp.leaf_stamps({path: arrays[path] for path in paths})


def _matched(
  arrays: dict[str, jax.Array], held: dict[str, jax.Array]
) -> dict[str, jax.Array]:
  """The source's arrays in the target's dtypes, without those that are the target's."""
  odd = sorted(arrays.keys() ^ held.keys())
  if odd:
    side = "source" if odd[0] in arrays else "target"
    raise ValueError(
      f"only the {side} has the parameter {odd[0]!r} ({len(odd)} such): weights go "
      "between models of one architecture, stacked and quantised alike"
    )
  out = {}
  for path, x in arrays.items():
    if x.shape != held[path].shape:
      raise ValueError(
        f"parameter {path!r} has shape {x.shape} in the source and "
        f"{held[path].shape} in the target: they are models of different sizes"
      )
    if not backbone.same_memory(x, held[path]):
      out[path] = x.astype(held[path].dtype)
  return out


def _check_arrival(
  want: dict[str, str], got: dict[str, str], before: dict[str, str]
) -> None:
  """Compares the stamps of what was sent with those of what is there now."""
  wrong = sorted(path for path in want if got.get(path) != want[path])
  if not wrong:
    return
  first = wrong[0]
  there = {None: "got nothing", before[first]: "still has its old content"}
  raise WeightSyncError(
    f"{len(wrong)} of {len(want)} changed parameters did not arrive: the target "
    f"{there.get(got.get(first), 'has something else')} for {first!r}; the transport "
    "lost the update, and rollouts would be by another policy"
  )
