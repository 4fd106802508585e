"""Attaches the teacher's unembedding table to the student.

Every step needs the table to compute the divergence from hidden states. The table is
too large to be a part of each batch, so it becomes a `FrozenParam` of the student: it
is not trained, donated or saved, and does not change the names of the student's
parameters.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from tunix.ops.vocabulary.softmax import Layout
from tunix.sft.steps.module_state import FrozenParam
from tunix.utils import mesh as mesh_lib

_NAME = "teacher_table"


def attach(student: nnx.Module, teacher: Any) -> Layout:
  """Attaches the teacher's table to the student; returns the layout of the table.

  On one device student and teacher share the memory of the table.

  Raises:
    ValueError: the student has an attribute of the same name.
  """
  if hasattr(student, _NAME):
    raise ValueError(
      f"the student has an attribute {_NAME!r} already: another trainer that distills "
      "into it is still open; call its close()"
    )
  table, layout = teacher.unembedding()
  placed = to_device(table, _device(student))
  spec = table.sharding.spec if isinstance(table.sharding, NamedSharding) else None
  variable = FrozenParam(placed, out_sharding=spec, eager_sharding=False)
  setattr(student, _NAME, variable)
  return Layout(transposed=layout.transposed, softcap=layout.softcap)


def detach(student: nnx.Module) -> None:
  """Removes the table from the student, if it is attached."""
  if hasattr(student, _NAME):
    delattr(student, _NAME)


def of(student: nnx.Module) -> jax.Array:
  """Returns the attached table."""
  return getattr(student, _NAME)[...]


def to_device(x: Any, device: object) -> Any:
  """Moves an array of the teacher to a device.

  Args:
    x: an array, or another value, which is returned unchanged.
    device: device of the student; None if the student has a mesh, which places its
      parameters and batches.
  """
  if device is None or not isinstance(x, jax.Array) or x.devices() == {device}:
    return x
  return jax.device_put(x, device)


def _device(student: nnx.Module) -> Any:
  leaves = jax.tree.leaves(nnx.state(student, nnx.Param))
  if mesh_lib.current_mesh() or mesh_lib.mesh_of(leaves) or not leaves:
    return None
  return next(iter(leaves[0].devices()))
