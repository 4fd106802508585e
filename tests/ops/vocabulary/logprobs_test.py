import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops.vocabulary import chunks as vocab_chunks
from tunix.ops.vocabulary.logprobs import logps_at, token_logps, weighted_nll
from tunix.ops.vocabulary.softmax import Layout, Pulls, Rule

B, T, D, V = 8, 40, 16, 64
# 64 tokens a chunk, the least there is: 320 tokens make 5 chunks.
CHUNKED = Layout(chunk_bytes=1)


def plain(hidden, unembed, targets, weights):
  logits = hidden.astype(jnp.float32) @ unembed.astype(jnp.float32)
  logps = jax.nn.log_softmax(logits)
  picked = jnp.take_along_axis(logps, targets[..., None], -1)[..., 0]
  return -jnp.sum(picked * weights)


@pytest.fixture(scope="module")
def inputs():
  keys = jax.random.split(jax.random.key(0), 4)
  return (
    jax.random.normal(keys[0], (B, T, D)),
    jax.random.normal(keys[1], (D, V)),
    jax.random.randint(keys[2], (B, T), 0, V),
    jax.random.uniform(keys[3], (B, T)) * (jax.random.uniform(keys[3], (B, T)) > 0.3),
  )


def value_and_grads(fn, inputs, argnums=(0, 1, 3)):
  return jax.jit(jax.value_and_grad(fn, argnums))(*inputs)


@pytest.fixture(scope="module")
def want(inputs):
  return value_and_grads(plain, inputs)


def check(got, want, tolerance=1e-5):
  np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
  for ours, theirs in zip(got[1], want[1]):
    difference = np.linalg.norm(np.asarray(ours, np.float32) - theirs)
    assert difference <= tolerance * np.linalg.norm(theirs)


def test_by_hand():
  # One token, two words, logits (0, ln 3): p = (1/4, 3/4). nll of word 0 is ln 4, and
  # the gradient in the logits is p - onehot = (-3/4, 3/4), times the weight 2.
  hidden, unembed = jnp.ones((1, 1, 1)), jnp.array([[0.0, math.log(3.0)]])
  args = hidden, unembed, jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 2.0)
  loss, (d_hidden, d_unembed, d_weights) = value_and_grads(weighted_nll, args)
  np.testing.assert_allclose(loss, 2 * math.log(4.0), rtol=1e-6)
  np.testing.assert_allclose(d_unembed, [[-1.5, 1.5]], rtol=1e-6)
  np.testing.assert_allclose(d_hidden[0, 0], [1.5 * math.log(3.0)], rtol=1e-6)
  np.testing.assert_allclose(d_weights, [[math.log(4.0)]], rtol=1e-6)


@pytest.mark.parametrize("layout", [Layout(), CHUNKED], ids=["one", "chunked"])
def test_value_and_gradients(inputs, want, layout):
  check(value_and_grads(lambda *a: weighted_nll(*a, layout), inputs), want)


def test_without_jit_and_without_gradients(inputs, want):
  np.testing.assert_allclose(weighted_nll(*inputs, CHUNKED), want[0], rtol=1e-5)


def test_transposed_table(inputs, want):
  hidden, unembed, targets, weights = inputs
  layout = CHUNKED._replace(transposed=True)
  loss, (d_hidden, d_table, d_weights) = value_and_grads(
    lambda *a: weighted_nll(*a, layout), (hidden, unembed.T, targets, weights)
  )
  check((loss, (d_hidden, d_table.T, d_weights)), want)


@pytest.mark.parametrize("tokens", [1, 63, 65, 129])
def test_any_number_of_tokens(inputs, tokens):
  hidden, unembed, targets, weights = inputs
  cut = (
    hidden.reshape(1, B * T, D)[:, :tokens],
    unembed,
    targets.reshape(1, B * T)[:, :tokens],
    weights.reshape(1, B * T)[:, :tokens] + 0.1,
  )
  got = value_and_grads(lambda *a: weighted_nll(*a, CHUNKED), cut)
  check(got, value_and_grads(plain, cut))


def test_gradient_follows_the_cotangent(inputs, want):
  loss = lambda *a: -3.0 * weighted_nll(*a, CHUNKED)
  value, grads = value_and_grads(loss, inputs)
  check((value / -3.0, [g / -3.0 for g in grads]), want)


def test_loss_that_nobody_differentiates(inputs):
  hidden, *rest = inputs

  def other(hidden):
    return jnp.sum(hidden), weighted_nll(hidden, *rest)

  gradient, loss = jax.jit(jax.grad(other, has_aux=True))(hidden)
  np.testing.assert_array_equal(gradient, jnp.ones_like(hidden))
  assert loss > 0


def test_large_logits_stay_finite(inputs):
  hidden, unembed, targets, weights = inputs
  loss, grads = value_and_grads(weighted_nll, (hidden * 1e4, unembed, targets, weights))
  assert np.isfinite(loss) and all(np.isfinite(g).all() for g in grads)


def test_weights_of_zero_drop_tokens(inputs):
  hidden, unembed, targets, weights = inputs
  masked = weights.at[:, 20:].set(0.0)
  args = hidden[:, :20], unembed, targets[:, :20], weights[:, :20]
  got = value_and_grads(weighted_nll, (hidden, unembed, targets, masked), (0, 1))
  want = value_and_grads(plain, args, (0, 1))
  np.testing.assert_array_equal(got[1][0][:, 20:], 0.0)
  check((got[0], (got[1][0][:, :20], got[1][1])), want)


@pytest.mark.parametrize(
  "fixture, vocab_axis, vocab",
  [
    (None, None, V),
    ("mesh_fsdp8", None, V),
    ("mesh_fsdp8", None, 2048),  # each device computes columns for the tokens of all
    ("mesh_fsdp4_tp2", "tp", V),
    ("mesh_fsdp4_tp2", "tp", 2048),
  ],
)
def test_tokens_of_uneven_rows(fixture, vocab_axis, vocab, request):
  """Row r trains its last r/8, so that devices skip different numbers of chunks."""
  mesh = request.getfixturevalue(fixture) if fixture else None
  layout = Layout(False, mesh, ("fsdp",) if mesh else (), vocab_axis, chunk_bytes=1)
  rows, length = 8, 200
  keys = jax.random.split(jax.random.key(2), 4)
  trained = jnp.arange(length) >= length - jnp.arange(rows)[:, None] * length / 8
  args = (
    jax.random.normal(keys[0], (rows, length, D)),
    jax.random.normal(keys[1], (D, vocab)),
    jax.random.randint(keys[2], (rows, length), 0, vocab),
    jax.random.uniform(keys[3], (rows, length)) * trained,
  )
  got = value_and_grads(lambda *a: weighted_nll(*a, layout), args, (0, 1))
  check(got, value_and_grads(plain, args, (0, 1)))


def test_chunks_without_weight_are_not_computed(inputs):
  hidden, unembed, targets, _ = inputs
  needed = jnp.zeros((B, T), bool).at[:, ::4].set(True)  # 80 of 320: two chunks of 64
  rule = Rule(CHUNKED)
  arrays = hidden, unembed, targets
  every = vocab_chunks.run(*arrays, pulls=Pulls(), rule=rule).logps
  some = vocab_chunks.run(*arrays, pulls=Pulls(), rule=rule, needed=needed).logps
  np.testing.assert_allclose(some[needed], every[needed], rtol=1e-5)
  assert int(jnp.sum(some != 0)) == 128


@pytest.mark.parametrize(
  "fixture, argnums", [(None, (0,)), (None, (0, 1)), ("mesh_fsdp8", (0, 1))]
)
def test_scores_of_needed_tokens(fixture, argnums, request):
  """The others have the value 0 and no gradient, whatever their cotangents are."""
  mesh = request.getfixturevalue(fixture) if fixture else None
  layout = Layout(False, mesh, ("fsdp",) if mesh else (), chunk_bytes=1)
  rows, length = 8, 200
  keys = jax.random.split(jax.random.key(2), 4)
  needed = jnp.arange(length) >= length - jnp.arange(rows)[:, None] * length / 8
  weights = jax.random.uniform(keys[3], (rows, length))
  args = (
    jax.random.normal(keys[0], (rows, length, D)),
    jax.random.normal(keys[1], (D, V)),
    jax.random.randint(keys[2], (rows, length), 0, V),
    weights,
  )

  def loss(hidden, unembed, targets, weights):
    scores = token_logps(hidden, unembed, targets, layout, needed=needed)
    return -jnp.sum(scores.logps * weights)

  want = value_and_grads(plain, (*args[:3], weights * needed), argnums)
  check(value_and_grads(loss, args, argnums), want)
  scores = token_logps(*args[:3], layout, entropy=True, needed=needed)
  every = token_logps(*args[:3], layout, entropy=True)
  for some, all_ in zip(scores, every):
    np.testing.assert_allclose(some, np.where(needed, all_, 0.0), rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_frozen_unembedding_costs_no_product(inputs, transposed):
  hidden, unembed, targets, weights = inputs
  layout = Layout(transposed=transposed)
  table = unembed.T if transposed else unembed

  def products(argnums):
    loss = lambda *a: weighted_nll(*a, layout)
    lowered = jax.jit(jax.grad(loss, argnums)).lower(hidden, table, targets, weights)
    return lowered.as_text().count("stablehlo.dot_general")

  assert products((0, 1)) == 3  # logits, and one for each gradient
  assert products((0,)) == 2
  assert products((1,)) == 2
  assert products((3,)) == 1


def test_no_array_of_all_logits(inputs):
  def text(fn):
    return jax.jit(jax.grad(fn, (0, 1))).lower(*inputs).as_text()

  everything = (f"tensor<{B}x{T}x{V}x", f"tensor<{B * T}x{V}x")
  assert any(shape in text(plain) for shape in everything)
  chunked = text(lambda *a: weighted_nll(*a, CHUNKED))
  assert not any(shape in chunked for shape in everything)
  assert f"tensor<64x{V}x" in chunked


def test_bfloat16(inputs, want):
  hidden, unembed, targets, weights = inputs
  half = hidden.astype(jnp.bfloat16), unembed.astype(jnp.bfloat16), targets, weights
  loss, grads = value_and_grads(lambda *a: weighted_nll(*a, CHUNKED), half)
  assert loss.dtype == jnp.float32
  assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
  # 8 bits of mantissa in every factor: 1/256 per product.
  check((loss, grads), want, tolerance=1e-2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
  "fixture, vocab_axis",
  [("mesh_fsdp8", None), ("mesh_fsdp4_tp2", "tp"), ("mesh_fsdp4_tp2", None)],
)
def test_sharded(inputs, want, fixture, vocab_axis, transposed, request):
  mesh = request.getfixturevalue(fixture)
  layout = Layout(transposed, mesh, ("fsdp",), vocab_axis, chunk_bytes=1)
  hidden, unembed, targets, weights = inputs
  table = unembed.T if transposed else unembed
  loss, (d_hidden, d_table, d_weights) = value_and_grads(
    lambda *a: weighted_nll(*a, layout), (hidden, table, targets, weights)
  )
  d_table = d_table.T if transposed else d_table
  check((loss, (d_hidden, d_table, d_weights)), want)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
  ("axes", "vocab_axis"),
  [
    ({"fsdp": 8}, None),
    ({"fsdp": 4, "tp": 2}, "tp"),
    ({"dp": 2, "fsdp": 2, "tp": 2}, "tp"),
  ],
)
def test_words_are_shared_where_they_are_more_than_tokens(axes, vocab_axis, transposed):
  rows, length, vocab = 8, 40, 512
  keys = jax.random.split(jax.random.key(1), 4)
  hidden = jax.random.normal(keys[0], (rows, length, D))
  unembed = jax.random.normal(keys[1], (D, vocab))
  targets = jax.random.randint(keys[2], (rows, length), 0, vocab)
  weights = jax.random.uniform(keys[3], (rows, length))
  want = value_and_grads(plain, (hidden, unembed, targets, weights))
  kinds = (jax.sharding.AxisType.Auto,) * len(axes)
  mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
  batch = tuple(axis for axis in axes if axis != "tp")
  layout = Layout(transposed, mesh, batch, vocab_axis, chunk_bytes=1)
  assert vocab_chunks.splits_vocabulary(layout, targets.size, D, vocab)
  table = unembed.T if transposed else unembed
  step = jax.jit(
    jax.value_and_grad(lambda *a: weighted_nll(*a, layout), argnums=(0, 1, 3))
  )
  args = hidden, table, targets, weights
  loss, (d_hidden, d_table, d_weights) = step(*args)
  d_table = d_table.T if transposed else d_table
  check((loss, (d_hidden, d_table, d_weights)), want)
  # No device ever holds all of D for the words of its column, nor all tokens' logits.
  rows_spec = jax.P(batch)
  specs = [rows_spec, vocab_chunks.gradient_spec(layout, table.shape), *[rows_spec] * 2]
  shapes = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))
    for x, spec in zip(args, specs)
  ]
  words = vocab // axes.get("tp", 1)
  text = step.lower(*shapes).compile().as_text()
  assert f"[{words},{D}]" not in text and f"[{D},{words}]" not in text
  assert "all-to-all" in text


def test_dimension_that_the_batch_axes_do_not_divide(inputs, mesh_fsdp8):
  # D = 15 over 8 devices: the gradient of the table is summed, not scattered.
  hidden, unembed, targets, weights = inputs
  args = hidden[..., :15], unembed[:15], targets, weights
  layout = Layout(mesh=mesh_fsdp8, batch_axes=("fsdp",))
  got = value_and_grads(lambda *a: weighted_nll(*a, layout), args)
  check(got, value_and_grads(plain, args))


@pytest.mark.parametrize("vocab_axis", [None, "tp"])
def test_soft_capped_logits(inputs, mesh_fsdp4_tp2, vocab_axis):
  cap = 3.0  # the logits reach 15, so that it bends most of them

  def capped(hidden, unembed, targets, weights):
    logits = cap * jnp.tanh(hidden @ unembed / cap)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -jnp.sum(picked[..., 0] * weights)

  layout = CHUNKED._replace(softcap=cap)
  if vocab_axis is not None:
    layout = layout._replace(
      mesh=mesh_fsdp4_tp2, batch_axes=("fsdp",), vocab_axis=vocab_axis
    )
  got = value_and_grads(lambda *a: weighted_nll(*a, layout), inputs)
  check(got, value_and_grads(capped, inputs))


def test_float16_with_a_vocabulary_beyond_its_range():
  # The words beside the target weigh V - 1 together, more than float16's 65504.
  vocab = 80_000
  keys = jax.random.split(jax.random.key(1), 2)
  hidden = jax.random.normal(keys[0], (1, 4, 4)).astype(jnp.float16)
  unembed = (0.01 * jax.random.normal(keys[1], (4, vocab))).astype(jnp.float16)
  args = hidden, unembed, jnp.arange(4)[None], jnp.ones((1, 4))
  got = value_and_grads(weighted_nll, args)
  check(got, value_and_grads(plain, args), tolerance=1e-2)


@pytest.mark.parametrize(
  "fixture, vocab_axis, transposed",
  [(None, None, False), (None, None, True), ("mesh_fsdp4_tp2", "tp", False)],
)
def test_several_tokens_at_every_position(
  inputs, request, fixture, vocab_axis, transposed
):
  # 40 positions of all rows in 40 blocks.
  mesh = request.getfixturevalue(fixture) if fixture else None
  axes = ("fsdp",) if mesh else ()
  layout = Layout(transposed, mesh, axes, vocab_axis, chunk_bytes=1, softcap=3.0)
  hidden, unembed, targets, _ = inputs
  ids = jnp.stack([targets, (targets + 5) % V, (targets * 7) % V], axis=-1)
  pulls = jax.random.normal(jax.random.key(5), ids.shape)

  def blocks(hidden, unembed):
    table = unembed.T if transposed else unembed
    return jnp.sum(pulls * logps_at(hidden, table, ids, layout, temperature=0.7))

  def whole(hidden, unembed):
    logps = jax.nn.log_softmax(3 * jnp.tanh(hidden @ unembed / 3) / 0.7)
    return jnp.sum(pulls * jnp.take_along_axis(logps, ids, axis=-1))

  of = lambda fn: value_and_grads(fn, (hidden, unembed), (0, 1))
  check(of(blocks), of(whole), 1e-4)
