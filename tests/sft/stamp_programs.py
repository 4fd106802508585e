"""One of two processes that stamp an array: stamp_programs.py RANK PORT STAMP."""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from tunix.sft.checkpoints import stamp
from tunix.utils import mesh as mesh_lib

X = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)


def main(rank: str, port: str, want: str) -> None:
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))
  mesh = mesh_lib.create_mesh({"f": -1})
  split = {}
  for name, spec in (("rows", P("f")), ("columns", P(None, "f")), ("whole", P())):
    where = NamedSharding(mesh, spec)
    split[name] = jax.make_array_from_callback(X.shape, where, lambda i: X[i])
  assert not split["rows"].is_fully_addressable
  assert stamp.content_stamp(split) == want
  print("done")


if __name__ == "__main__":
  main(*sys.argv[1:])
