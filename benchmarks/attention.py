"""Time and memory of the attention paths, forward and backward, on this machine.

  python -m benchmarks.attention --lengths 512 2048 4096
  python -m benchmarks.attention --paths blockwise --lengths 4096 --window 512

CPU and wall milliseconds are the least of a few runs, after one that is not counted;
MB are XLA's temporaries of the gradient's program.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp

from tunix.models.transformer.attention.paths import attend
from tunix.models.transformer.visibility import Visibility


def programs(args, path, length):
  """(forward, gradient) of one call, and its arguments."""
  keys = jax.random.split(jax.random.key(0), 4)
  heads = (args.heads, args.kv_heads, args.kv_heads)
  draw = lambda key, n: jax.random.normal(key, (args.batch, length, n, args.head_dim))
  query, key, value = (draw(k, n) for k, n in zip(keys, heads))
  weights = draw(keys[3], args.heads)
  visible = Visibility(jnp.arange(length), aligned=True)

  def run(query, key, value):
    options = {"softcap": args.softcap, "window": args.window}
    return attend(query, key, value, visible, implementation=path, **options)

  def loss(*arrays):
    return jnp.sum(run(*arrays) * weights)

  arrays = query, key, value
  compiled = [
    jax.jit(f).lower(*arrays).compile() for f in (run, jax.grad(loss, (0, 1, 2)))
  ]
  return compiled, arrays


def least(program, arrays, runs):
  """(wall, CPU) milliseconds."""
  jax.block_until_ready(program(*arrays))
  wall, cpu = [], []
  for _ in range(runs):
    start = time.perf_counter(), time.process_time()
    jax.block_until_ready(program(*arrays))
    wall.append(time.perf_counter() - start[0])
    cpu.append(time.process_time() - start[1])
  return 1e3 * min(wall), 1e3 * min(cpu)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--paths", nargs="+", default=["plain", "blockwise"])
  parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 2048, 4096])
  parser.add_argument("--batch", type=int, default=1)
  parser.add_argument("--heads", type=int, default=8)
  parser.add_argument("--kv-heads", type=int, default=4)
  parser.add_argument("--head-dim", type=int, default=64)
  parser.add_argument("--softcap", type=float)
  parser.add_argument("--window", type=int)
  parser.add_argument("--runs", type=int, default=5)
  args = parser.parse_args()
  for length in args.lengths:
    for path in args.paths:
      (forward, gradient), arrays = programs(args, path, length)
      wall, cpu = least(forward, arrays, args.runs)
      both_wall, both_cpu = least(gradient, arrays, args.runs)
      size = gradient.memory_analysis().temp_size_in_bytes / 1e6
      print(
        f"T {length} {path}: forward {wall:.1f} ms ({cpu:.1f} CPU), with backward "
        f"{both_wall:.1f} ms ({both_cpu:.1f} CPU), {size:.1f} MB",
        flush=True,
      )


if __name__ == "__main__":
  main()
