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

from tunix.ops.recurrences import delta_rule, state_space

GROUPS, HEADS, SIZE = 2, 4, 128


def draw_delta(length):
  """Returns the arguments of a gated delta rule with the sizes of Qwen3.5's heads."""
  keys, normal = source(length)
  k = normal(keys[1], GROUPS, SIZE)
  return (
    normal(keys[0], GROUPS, SIZE) * SIZE**-0.5,
    k / jnp.linalg.norm(k, axis=-1, keepdims=True),
    normal(keys[2], HEADS, SIZE),
    -jax.nn.softplus(normal(keys[3], HEADS)),
    jax.nn.sigmoid(normal(keys[4], HEADS)),
  )


def draw_states(length):
  """Returns the arguments of Mamba-2 with the sizes of Nemotron 3's heads."""
  keys, normal = source(length)
  return (
    normal(keys[0], HEADS, SIZE // 2),
    jax.nn.softplus(normal(keys[1], HEADS)),
    -jnp.exp(jax.random.normal(keys[2], (HEADS,))),
    normal(keys[3], GROUPS, SIZE),
    normal(keys[4], GROUPS, SIZE),
  )


def source(length):
  keys = jax.random.split(jax.random.key(0), 5)
  return keys, lambda key, *shape: jax.random.normal(key, (1, length, *shape))


MIXERS = (("delta_rule", delta_rule, draw_delta), ("states", state_space, draw_states))


def measure(form, arrays):
  """Returns (milliseconds, MB of temporaries) of value and gradient."""
  loss = lambda *arrays: jnp.sum(form(*arrays)[0] ** 2)
  program = jax.jit(jax.value_and_grad(loss, range(5))).lower(*arrays).compile()
  times = []
  for _ in range(4):
    start = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    times.append(time.perf_counter() - start)
  memory = program.memory_analysis()
  assert memory is not None
  return 1e3 * min(times[1:]), memory.temp_size_in_bytes / 2**20


def main():
  parser = argparse.ArgumentParser(description="Recurrences of mixers.")
  parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
  for length in parser.parse_args().lengths:
    for name, module, draw in MIXERS:
      arrays = draw(length)
      for form in (module.chunked, module.recurrent):
        wall, size = measure(form, arrays)
        print(
          f"{length:6} tokens {name:10} {form.__name__:9} {wall:9.1f} ms {size:8.1f} MB"
        )


if __name__ == "__main__":
  main()
