"""Shows which kernels XLA chooses for an operation with 1 to 16,384 rows.

  python -m benchmarks.rows h100:1
  python -m benchmarks.rows v5e:2x2

compiles three operations for a chip that this machine does not have: x [rows, 1024]
times w [1024, 3072] in bfloat16, the norm of rows, and the logsumexp of rows of 151,936
logits. A line shows what sets the order of a row's sum: the shapes of partial sums, the
sizes of tiles, and on TPUs the windows. The bits of a row do not depend on the number
of rows only if, apart from this number, all lines of an operation are equal. It needs
the extra `plan-gpu`, or libtpu.
"""

import argparse
import os
import re
from collections.abc import Callable

ROWS = (1, 8, 64, 256, 2048, 16_384)
NORM_ROWS = (8, 2048)
DIM, WIDTH, VOCABULARY = 1024, 3072, 151_936
ORDERS = (
  r"= (\w+\[[\d,]*\])\S* (?:reduce|dot|convolution)\(",
  r"\"(output_tiles)\":\[\{\"sizes\":(\[[^\]]*\])",
  r"backend_config=\{\"(sizes)\":(\[[^\]]*\])",
  r"\"(input_window_bounds|output_window_bounds|iteration_bounds)\":(\[[^\]]*\])",
  r"\"(num_warps)\":\"(\d+)\"",
)


def main() -> None:
  """Prints a line for each operation and number of rows."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("topology")
  name = parser.parse_args().topology
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  # Without a GPU, nothing can be timed.
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0"
  import jax
  import jax.numpy as jnp

  from tunix.plan import topology

  device = topology.find(name).devices[0]
  where = jax.sharding.SingleDeviceSharding(device)

  def array(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  def show(what: str, rows: int, function: Callable, *arrays: object) -> None:
    text = jax.jit(function).lower(*arrays).compile().as_text()
    found = [re.findall(pattern, text) for pattern in ORDERS]
    words = [x if isinstance(x, str) else " ".join(x) for one in found for x in one]
    print(f"{what}, {rows} rows: {'; '.join(dict.fromkeys(words))}", flush=True)

  def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)

  def norm(x: jax.Array) -> jax.Array:
    squares = jnp.square(x.astype(jnp.float32))
    return x * jax.lax.rsqrt(jnp.mean(squares, -1, keepdims=True))

  for rows in ROWS:
    show("product", rows, product, array(rows, DIM), array(DIM, WIDTH))
  for rows in NORM_ROWS:
    show("norm", rows, norm, array(rows, DIM))
    logits = array(rows, VOCABULARY, dtype=jnp.float32)
    show("logsumexp", rows, lambda x: jax.nn.logsumexp(x, -1), logits)


if __name__ == "__main__":
  main()
