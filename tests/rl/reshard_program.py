"""The reshard drill, in a process of its own: prints by how many MiB the process's
memory rose above what it holds with the tree, at its highest on each stretch."""

import gc
import json
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from tunix.rl.weights import reshard
from tunix.utils import mesh as mesh_lib

STATUS = pathlib.Path("/proc/self/status")


def resident(which):
  """Bytes by a line of the process's status: VmRSS now, VmHWM at its highest."""
  lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
  return 1024 * int(lines[which].split()[0])


def layout(axes, spec):
  count = 1
  for size in axes.values():
    count *= size
  return NamedSharding(mesh_lib.create_mesh(axes, jax.devices()[:count]), spec)


def main():
  layouts = [
    layout({"f": 8}, P("f")),
    layout({"f": 2, "t": 4}, P("f", "t")),
    layout({"f": 4}, P("f")),
    layout({"f": 1}, P()),
  ]
  make = lambda: [jnp.full((4096, 4096), i, jnp.float32) for i in range(3)]
  arrays = jax.jit(make, out_shardings=layouts[0])()
  way = [*layouts[1:], *layouts[-2::-1]]
  rises = {}
  for _ in range(2):  # the first time compiles
    for i, where in enumerate(way):
      gc.collect()
      before = resident("VmRSS")
      pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
      arrays = reshard.reshard_pytree(arrays, where, donate_input=True)
      rises[i] = round((resident("VmHWM") - before) / 2**20)
  print(json.dumps(list(rises.values())))
  for i, x in enumerate(arrays):
    assert (x == i).all()
  print("done")


if __name__ == "__main__":
  main()
