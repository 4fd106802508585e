import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tunix.ops.vocabulary import chunks as vocab_chunks
from tunix.ops.vocabulary.logprobs import logits_logps, logps_at, token_logps
from tunix.ops.vocabulary.softmax import Layout

B, T, D, V = 8, 40, 16, 64
CHUNKED = Layout(chunk_bytes=1)  # 64 tokens a chunk: 320 tokens make 5 chunks


def plain(hidden, unembed, targets, *, temperature=1.0, softcap=None):
  logits = hidden.astype(jnp.float32) @ unembed.astype(jnp.float32)
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  logps = jax.nn.log_softmax(logits / temperature)
  picked = jnp.take_along_axis(logps, targets[..., None], -1)[..., 0]
  return picked, -jnp.sum(jnp.exp(logps) * logps, axis=-1)


@pytest.fixture(scope="module")
def inputs():
  keys = jax.random.split(jax.random.key(0), 5)
  return (
    jax.random.normal(keys[0], (B, T, D)),
    0.5 * jax.random.normal(keys[1], (D, V)),
    jax.random.randint(keys[2], (B, T), 0, V),
    jax.random.normal(keys[3], (2, B, T)),  # cotangents of logps and of entropy
  )


def pulled(fn, inputs, used=(1.0, 1.0)):
  """Values and the gradients of their sum, weighted with the cotangents."""
  hidden, unembed, targets, pulls = inputs

  def total(hidden, unembed):
    out = fn(hidden, unembed, targets)
    terms = [u * jnp.sum(c * x) for u, c, x in zip(used, pulls, out) if u]
    return sum(terms), tuple(out)

  grads, out = jax.jit(jax.grad(total, (0, 1), has_aux=True))(hidden, unembed)
  return out, grads


def check(got, want, tolerance=1e-6):
  for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    ours = np.asarray(ours, np.float64)
    difference = np.linalg.norm(ours - np.asarray(theirs, np.float64))
    assert difference <= tolerance * np.linalg.norm(theirs)


def test_by_hand():
  # Two words, logits (0, 2 ln 3) at temperature 2: p = (1/4, 3/4). The entropy is
  # ln 4 - 3/4 ln 3. d logp(0) / d logits = (3/4, -3/4) / 2; d H / d logit_1 =
  # -p_1 (ln p_1 + H) / 2 = -(3/4) (1/4) ln 3 / 2.
  hidden, unembed = jnp.ones((1, 1, 1)), jnp.array([[0.0, 2 * math.log(3.0)]])
  targets = jnp.zeros((1, 1), jnp.int32)
  run = lambda w: token_logps(hidden, w, targets, temperature=2.0, entropy=True)
  out = run(unembed)
  np.testing.assert_allclose(out.logps, [[-math.log(4.0)]], rtol=1e-6)
  want = math.log(4.0) - 0.75 * math.log(3.0)
  np.testing.assert_allclose(out.entropy, [[want]], rtol=1e-6)
  d_logp = jax.jit(jax.grad(lambda w: run(w).logps[0, 0]))(unembed)
  np.testing.assert_allclose(d_logp, [[0.375, -0.375]], rtol=1e-6)
  d_entropy = jax.jit(jax.grad(lambda w: run(w).entropy[0, 0]))(unembed)
  slope = 0.75 * 0.25 * math.log(3.0) / 2
  np.testing.assert_allclose(d_entropy, [[slope, -slope]], rtol=1e-5)


@pytest.mark.parametrize("layout", [Layout(), CHUNKED], ids=["one", "chunked"])
@pytest.mark.parametrize("used", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)], ids=str)
def test_values_and_gradients(inputs, layout, used):
  options = {"temperature": 0.7}
  want = pulled(lambda *a: plain(*a, **options), inputs, used)
  ours = lambda *a: token_logps(*a, layout, entropy=True, **options)
  check(pulled(ours, inputs, used), want)


def test_without_entropy(inputs):
  hidden, unembed, targets, _ = inputs
  out = token_logps(hidden, unembed, targets, CHUNKED)
  assert out.entropy is None and out.logps.dtype == jnp.float32
  check(out.logps, plain(hidden, unembed, targets)[0])
  (values,), grads = pulled(lambda *a: token_logps(*a, CHUNKED)[:1], inputs)
  want_values, want = pulled(lambda *a: plain(*a)[:1], inputs)
  check((values, grads), (want_values[0], want))


def test_of_logits(inputs):
  hidden, unembed, targets, _ = inputs
  logits = hidden @ unembed
  got = logits_logps(logits, targets, temperature=0.7, entropy=True)
  check(tuple(got), plain(hidden, unembed, targets, temperature=0.7))
  assert logits_logps(logits, targets).entropy is None


def test_tokens_without_a_cotangent_pull_nothing(inputs):
  hidden, unembed, targets, pulls = inputs
  pulls = pulls.at[:, :, 20:].set(0.0)
  score = lambda *a: token_logps(*a, CHUNKED, entropy=True)
  _, (d_hidden, d_table) = pulled(score, (hidden, unembed, targets, pulls))
  np.testing.assert_array_equal(d_hidden[:, 20:], 0.0)
  cut = hidden[:, :20], unembed, targets[:, :20], pulls[:, :, :20]
  check(d_table, pulled(plain, cut)[1][1])


@pytest.mark.parametrize("vocab_axis", [None, "tp"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_sharded_and_soft_capped(
  inputs, mesh_fsdp4_tp2, vocab_axis, transposed, chunk_bytes
):
  hidden, unembed, targets, pulls = inputs
  options = {"temperature": 1.5}
  want = pulled(lambda *a: plain(*a, softcap=2.0, **options), inputs)
  layout = Layout(transposed, mesh_fsdp4_tp2, ("fsdp",), vocab_axis, 2.0, chunk_bytes)
  table = unembed.T if transposed else unembed
  score = lambda *a: token_logps(*a, layout, entropy=True, **options)
  values, (d_hidden, d_table) = pulled(score, (hidden, table, targets, pulls))
  d_table = d_table.T if transposed else d_table
  check((values, (d_hidden, d_table)), want)


@pytest.mark.parametrize("used", [(1.0, 1.0), (1.0, 0.0)], ids=["entropy", "logps"])
def test_words_are_shared_where_they_are_more_than_tokens(inputs, mesh_fsdp4_tp2, used):
  hidden, unembed, targets, pulls = inputs
  few = hidden[:, :8], unembed, targets[:, :8], pulls[:, :, :8]
  layout = Layout(False, mesh_fsdp4_tp2, ("fsdp",), "tp", 2.0, 1)
  assert vocab_chunks.splits_vocabulary(layout, B * 8, D, V)
  score = lambda *a: token_logps(*a, layout, entropy=used[1] > 0, temperature=1.5)
  want = pulled(lambda *a: plain(*a, softcap=2.0, temperature=1.5), few, used)
  (logps, entropy), gradients = pulled(score, few, used)
  check((logps, gradients), (want[0][0], want[1]))
  assert entropy is None or check(entropy, want[0][1]) is None


def test_rows_that_the_batch_axes_do_not_divide(inputs, mesh_fsdp8):
  hidden, unembed, targets, pulls = inputs
  cut = hidden[:3], unembed, targets[:3], pulls[:, :3]
  layout = Layout(mesh=mesh_fsdp8, batch_axes=("fsdp",))
  score = lambda *a: token_logps(*a, layout, entropy=True)
  check(pulled(score, cut), pulled(plain, cut))


def sizes(jaxpr, found):
  """Elements of every array inside a jaxpr."""
  for eqn in jaxpr.eqns:
    found.update(v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
    for inner in jaxprs_in_params(eqn.params):
      sizes(inner, found)
  return found


def test_no_array_of_all_logits(inputs):
  hidden, unembed, targets, pulls = inputs

  def total(fn):
    def loss(hidden, unembed):
      logps, entropy = fn(hidden, unembed, targets)
      return jnp.sum(pulls[0] * logps + pulls[1] * entropy)

    return jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, unembed)

  def largest(fn):
    return max(sizes(total(fn).jaxpr, set()))

  assert largest(plain) == B * T * V
  ours = largest(lambda *a: token_logps(*a, CHUNKED, entropy=True))
  assert ours == B * T * D  # the hidden states themselves
  at = lambda h, u, ids: jnp.moveaxis(
    logps_at(h, u, jnp.stack([ids, ids], -1), CHUNKED), -1, 0
  )
  assert largest(at) == B * T * D


def test_memory_of_the_compiled_program():
  # 2048 tokens, 4096 words: [B, T, V] is 32 MiB; two chunks of 64 tokens are 2 MiB.
  hidden, unembed = jnp.ones((4, 512, 8)), jnp.ones((8, 4096))
  targets = jnp.zeros((4, 512), jnp.int32)

  def temporary(fn):
    loss = lambda h, w: jnp.sum(fn(h, w, targets)[0])
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, unembed).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary(plain) > 32 * 2**20
  assert temporary(lambda *a: token_logps(*a, CHUNKED)) < 8 * 2**20


@pytest.mark.parametrize(
  ("layout", "entropy", "counts"),
  [  # of the products for both gradients, that of hidden, that of unembed
    (Layout(), False, (4, 2, 3)),
    (Layout(), True, (4, 3, 3)),
    (CHUNKED, False, (4, 2, 3)),
    (CHUNKED, True, (4, 3, 3)),
  ],
  ids=str,
)
def test_what_is_computed_again(inputs, layout, entropy, counts):
  hidden, unembed, targets, _ = inputs

  def products(argnums):
    def loss(*a):
      out = token_logps(*a, targets, layout, entropy=entropy)
      return sum(jnp.sum(x) for x in jax.tree.leaves(out))

    lowered = jax.jit(jax.value_and_grad(loss, argnums)).lower(hidden, unembed)
    return lowered.as_text().count("stablehlo.dot_general")

  assert (products((0, 1)), products((0,)), products((1,))) == counts


@pytest.mark.parametrize("layout", [Layout(), CHUNKED], ids=["one", "chunked"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("argnum", [0, 1])
def test_one_gradient_is_that_of_both(inputs, layout, entropy, argnum):
  hidden, unembed, targets, pulls = inputs

  def total(*a):
    out = token_logps(*a, targets, layout, entropy=entropy, temperature=0.7)
    return sum(jnp.sum(c * x) for c, x in zip(pulls, jax.tree.leaves(out)))

  both = jax.jit(jax.grad(total, (0, 1)))(hidden, unembed)
  alone = jax.jit(jax.grad(total, argnum))(hidden, unembed)
  check(alone, both[argnum])


def test_one_chunk_is_computed_once(inputs):
  """What comes twice is merged by XLA, as there is no loop around it."""
  hidden, unembed, targets, _ = inputs
  loss = lambda *a: jnp.sum(token_logps(*a, targets).logps)
  step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, unembed).compile()
  cost = step.cost_analysis()
  assert cost is not None
  assert 3 <= cost["flops"] / (2 * B * T * D * V) < 3.5


def test_a_slope_that_float16_cannot_hold_is_not_asked_for():
  hidden = jnp.ones((1, 2, 4), jnp.float16)
  unembed = jnp.array(np.random.default_rng(0).choice([-3e4, 3e4], (4, 6)), jnp.float16)
  targets, weights = jnp.array([[1, 2]]), jnp.array([[0.0, 0.0]])
  score = lambda h: token_logps(h, unembed, targets, temperature=0.1).logps
  gradient = jax.jit(jax.grad(lambda h: jnp.sum(weights * score(h))))(hidden)
  np.testing.assert_array_equal(gradient, jnp.zeros_like(hidden))


def test_a_mesh_of_one_device(inputs):
  hidden, unembed, targets, pulls = inputs
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), devices=jax.devices()[:1])
  layout = Layout(False, mesh, ("fsdp",), "tp")
  score = lambda layout: lambda *a: token_logps(*a, layout, entropy=True)
  got = pulled(score(layout), (hidden, unembed, targets, pulls))
  want = pulled(score(Layout()), (hidden, unembed, targets, pulls))
  jax.tree.map(check, got, want)


def test_bfloat16(inputs):
  hidden, unembed, targets, pulls = inputs
  half = hidden.astype(jnp.bfloat16), unembed.astype(jnp.bfloat16), targets, pulls
  score = lambda *a: token_logps(*a, CHUNKED, entropy=True)
  values, grads = pulled(score, half)
  assert [g.dtype for g in grads] == [jnp.bfloat16] * 2
  assert [v.dtype for v in values] == [jnp.float32] * 2
  check((values, grads), pulled(plain, inputs), tolerance=2e-2)


def test_float16_with_a_vocabulary_beyond_its_range():
  # The words beside the target weigh V - 1 together, more than float16's 65504.
  keys = jax.random.split(jax.random.key(1), 2)
  hidden = jax.random.normal(keys[0], (1, 4, 4))
  unembed = 0.01 * jax.random.normal(keys[1], (4, 80_000))
  args = unembed, jnp.arange(4)[None], jnp.ones((2, 1, 4))
  score = lambda *a: token_logps(*a, entropy=True)
  for used in ((1.0, 0.0), (1.0, 1.0)):
    got = pulled(score, (hidden.astype(jnp.float16), *args), used)
    check(got, pulled(plain, (hidden, *args), used), tolerance=2e-2)


def test_float16_holds_the_gradient_of_a_mean():
  # Cotangents of 1e-8 are zero in float16; what 1024 of them add up to is not.
  hidden = jnp.ones((1, 1024, 2), jnp.float16)
  unembed = jnp.array([[0.0, 1.0], [0.0, 1.0]], jnp.float16)
  targets = jnp.zeros((1, 1024), jnp.int32)
  loss = lambda w: 1e-8 * jnp.sum(token_logps(hidden, w, targets).logps)
  pull = 1024e-8 / (1 + math.exp(-2.0))
  np.testing.assert_allclose(
    jax.jit(jax.grad(loss))(unembed), [[pull, -pull]] * 2, rtol=1e-2
  )


def test_refuses_a_temperature_that_is_none(inputs):
  for wrong in (0.0, -1.0, math.nan):
    with pytest.raises(ValueError, match="must be a positive number"):
      token_logps(*inputs[:3], temperature=wrong)
    with pytest.raises(ValueError, match="must be a positive number"):
      logits_logps(inputs[0], inputs[2], temperature=wrong)
