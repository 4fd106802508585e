import jax
import jax.numpy as jnp
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

from tunix.models.transformer.attention import blockwise
from tunix.models.transformer.visibility import Visibility
from tunix.perf.flops import attention_flops
from tunix.perf.hlo_flops import PASSES, SHARE, count_flops


def flops(function, *arguments):
  counted = count_flops(jax.jit(function).lower(*arguments))
  assert counted.unknown_loops == 0
  return counted.flops


def test_products():
  # (2, 3, 4) x (2, 4, 5): 2 * 2 * 3 * 5 outputs, 4 terms each.
  x, y = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))
  assert flops(jnp.matmul, x, y) == 2 * 2 * 3 * 5 * 4
  assert flops(lambda x: jnp.einsum("bij,bij->b", x, x), x) == 2 * 2 * 12
  assert flops(lambda x: x + 1, x) == 0


def test_convolution():
  def conv(x, k):
    return jax.lax.conv_general_dilated(
      x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )

  # 8 output places, 7 channels, each a sum over 3 * 5.
  assert flops(conv, jnp.ones((2, 10, 5)), jnp.ones((3, 5, 7))) == 2 * 2 * 8 * 7 * 15


@pytest.mark.parametrize("unroll", [1, 2, 8])
def test_nested_loops_with_gradient_and_remat(unroll):
  def loss(w, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    for_token = lambda x, _: (jax.lax.scan(layer, x, w, unroll=unroll)[0], None)
    return jax.lax.scan(for_token, x, None, length=5)[0].sum()

  w, x = jnp.ones((8, 4, 4)), jnp.ones((3, 4))
  product = 2 * 3 * 4 * 4
  assert flops(loss, w, x) == 5 * 8 * product
  # forward, forward again, two gradients
  assert flops(jax.grad(loss), w, x) == 5 * 8 * product * 4


def test_counted_loops():
  x = jnp.ones((4, 4))
  product = 2 * 4**3

  def loop(start, stop):
    return lambda x: jax.lax.fori_loop(start, stop, lambda i, x: x @ x, x)

  assert flops(loop(2, 9), x) == 7 * product
  assert flops(loop(9, 2), x) == 0

  def stepped(x):
    body = lambda c: (c[0] + 3, c[1] @ c[1])
    return jax.lax.while_loop(lambda c: c[0] < 10, body, (1, x))[1]

  assert flops(stepped, x) == 3 * product  # 1, 4, 7


def test_loops_that_depend_on_data_count_once_and_say_so():
  x = jnp.ones((4, 4))
  until = lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: x @ x, x)
  counted = count_flops(jax.jit(until).lower(x, 3))
  assert (counted.flops, counted.unknown_loops) == (2 * 4**3, 1)
  halving = lambda x: jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)
  assert count_flops(jax.jit(halving).lower(x)).unknown_loops == 0  # nothing inside


def test_a_loop_that_depends_on_data_may_say_how_often_it_runs():
  def until(x, n):
    with set_xla_metadata(**{PASSES: "2.5"}):
      return jax.lax.fori_loop(0, n, lambda i, x: x @ x, x)

  assert flops(until, jnp.ones((4, 4)), 3) == 2.5 * 2 * 4**3


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(("length", "window"), [(64, None), (72, None), (64, 20)])
def test_attention_by_blocks_counts_at_least_its_visible_pairs(
  length, window, segmented
):
  """Else the bound of a step would be too low, and its MFU above 100 %."""
  b, n, k, h = 2, 4, 2, 8
  ids = jnp.ones((b, length), jnp.int32) if segmented else None
  visible = Visibility(jnp.arange(length), segment_ids=ids, aligned=True)

  def total(query, key, value):
    options = {"query_block": 16, "key_block": 16, "window": window}
    return jnp.sum(blockwise.attend(query, key, value, visible, scale=1.0, **options))

  query, key = jnp.ones((b, length, n, h)), jnp.ones((b, length, k, h))
  sizes = {"num_layers": 1, "num_heads": n, "head_dim": h, "window": window}
  forward = attention_flops([length] * b, **sizes)
  counted = flops(total, query, key, key)
  assert forward <= counted < 1.3 * forward  # 1.3: padding, whole blocks
  # The formula has twice the forward pass; blocks compute their scores again.
  backward = flops(jax.grad(total, (0, 1, 2)), query, key, key) - counted
  assert backward == pytest.approx(2.5 * counted)


def test_the_dearest_branch_counts():
  def branches(x, i):
    return jax.lax.switch(i, [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x], x)

  assert flops(branches, jnp.ones((4, 4)), 0) == 2 * 2 * 4**3


@pytest.mark.parametrize("share", [None, 0.25])
def test_grouped_products_and_their_gradients(share):
  """As for TPUs; a CPU has no such operation, and computes every group on all rows."""
  rows, groups, width, out = 128, 8, 32, 64
  told = {} if share is None else {SHARE: str(share)}

  def product(x, matrices, sizes):
    with set_xla_metadata(**told):
      return jnp.sum(jax.lax.ragged_dot(x, matrices, sizes) ** 2)

  shapes = [
    jax.ShapeDtypeStruct((rows, width), jnp.float32),
    jax.ShapeDtypeStruct((groups, width, out), jnp.float32),
    jax.ShapeDtypeStruct((groups,), jnp.int32),
  ]
  gradients = jax.jit(jax.grad(product, (0, 1))).trace(*shapes)
  lowered = gradients.lower(lowering_platforms=("tpu",))
  once = 2 * rows * width * out * (share or 1.0)
  assert count_flops(lowered).flops == 3 * once
