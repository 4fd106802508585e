"""The teacher's unembedding beside the student's weights.

It is needed in every step, for the divergence from hidden states, and must not travel
with the batches. A `FrozenParam` of the student is neither trained nor donated nor
saved, and leaves the names of the student's own parameters as they are.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from tunix.ops.vocab_softmax import Layout
from tunix.sft.module_state import FrozenParam
from tunix.utils import mesh as mesh_lib

_NAME = "teacher_table"


def attach(student: Any, teacher: Any) -> Layout:
  """Gives the student the teacher's table (the same memory where both lie on one
  device); returns how it is stored.

  Raises:
    ValueError: the student has something of that name.
  """
  if hasattr(student, _NAME):
    raise ValueError(
      f"the student has an attribute {_NAME!r} already: another trainer distills into "
      "it and is not closed; call its close()"
    )
  table, layout = teacher.unembedding()
  placed = to_device(table, _device(student))
  spec = table.sharding.spec if isinstance(table.sharding, NamedSharding) else None
  variable = FrozenParam(placed, out_sharding=spec, eager_sharding=False)
  setattr(student, _NAME, variable)
  return Layout(transposed=layout.transposed, softcap=layout.softcap)


def detach(student: Any) -> None:
  """Takes it away again, where it is."""
  if hasattr(student, _NAME):
    delattr(student, _NAME)


def of(student: Any) -> jax.Array:
  """The table."""
  return getattr(student, _NAME)[...]


def to_device(x: Any, device: Any) -> Any:
  """An array of a teacher's on the student's device; None: the student has a mesh, and
  lays out its parameters and batches by itself."""
  if device is None or not isinstance(x, jax.Array) or x.devices() == {device}:
    return x
  return jax.device_put(x, device)


def _device(student: Any) -> Any:
  leaves = jax.tree.leaves(nnx.state(student, nnx.Param))
  if mesh_lib.current_mesh() or mesh_lib.mesh_of(leaves) or not leaves:
    return None
  return next(iter(leaves[0].devices()))
