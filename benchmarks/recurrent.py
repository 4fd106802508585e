"""Time and memory of the recurrences of mixers, by chunks and by tokens.

  python -m benchmarks.recurrent --lengths 512 2048 8192

Milliseconds are the least of three runs of value and gradient, after one that is not
counted; MB are XLA's temporaries of this program.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp

from tunix.ops import delta_rule

GROUPS, HEADS, SIZE = 2, 4, 128


def draw(length):
  """Returns the arguments of a gated delta rule with the sizes of Qwen3.5's heads."""
  keys = jax.random.split(jax.random.key(0), 5)
  normal = lambda key, *shape: jax.random.normal(key, (1, length, *shape))
  k = normal(keys[1], GROUPS, SIZE)
  return (
    normal(keys[0], GROUPS, SIZE) * SIZE**-0.5,
    k / jnp.linalg.norm(k, axis=-1, keepdims=True),
    normal(keys[2], HEADS, SIZE),
    -jax.nn.softplus(normal(keys[3], HEADS)),
    jax.nn.sigmoid(normal(keys[4], HEADS)),
  )


def measure(form, arrays):
  """Returns (milliseconds, MB of temporaries) of value and gradient."""
  loss = lambda *arrays: jnp.sum(form(*arrays)[0] ** 2)
  program = jax.jit(jax.value_and_grad(loss, range(5))).lower(*arrays).compile()
  times = []
  for _ in range(4):
    start = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    times.append(time.perf_counter() - start)
  size = program.memory_analysis().temp_size_in_bytes
  return 1e3 * min(times[1:]), size / 2**20


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
  for length in parser.parse_args().lengths:
    arrays = draw(length)
    for form in (delta_rule.chunked, delta_rule.recurrent):
      wall, size = measure(form, arrays)
      print(f"{length:6} tokens {form.__name__:10} {wall:10.1f} ms {size:10.1f} MB")


if __name__ == "__main__":
  main()
