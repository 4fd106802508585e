"""What stays beside a program's arguments."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from tunix.perf.programs import ProgramRecord
from tunix.plan import residents


def test_what_others_are_given_and_none_has_made(mesh_fsdp8):
  rows = NamedSharding(mesh_fsdp8, P("fsdp"))
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=rows)
  weights, moments, other, sliced = shape(8, 16), shape(16, 16), shape(8, 4), shape(8)
  noted = {
    "slice": ProgramRecord(None, (weights,), result=sliced),
    "sample": ProgramRecord(None, (sliced, "static")),
    "learn": ProgramRecord(None, (weights, {"moments": moments})),
    "score": ProgramRecord(None, (other,)),
  }
  assert residents.beside(noted) == {
    "slice": 2 * 2 * 16 + 2 * 4,
    "sample": 2 * 16 + 2 * 2 * 16 + 2 * 4,
    "learn": 2 * 4,
    "score": 2 * 16 + 2 * 2 * 16,
  }
  assert residents.beside(noted, elsewhere=("score",))["learn"] == 0
