"""From hidden states, in chunks and on meshes: the loss and gradients of the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops import distill, distill_hidden
from tunix.ops.distill import Divergence
from tunix.ops.distill_hidden import States, hidden_top_k, weighted_distillation
from tunix.ops.vocabulary.softmax import Layout
from tunix.utils import mesh as mesh_lib

B, T, D, E, V = 8, 20, 16, 24, 40  # 160 tokens: chunks of 64 on one device
SOFT, HARD = 1.7, 0.4
CHUNKED = Layout(chunk_bytes=1)
ALL = [
  Divergence("forward_kl", None, 2.0),
  Divergence("reverse_kl"),
  Divergence("jsd", 0.3, 1.5),
]


@pytest.fixture(scope="module")
def arrays():
  keys = jax.random.split(jax.random.key(0), 7)
  kept = jax.random.uniform(keys[6], (B, T)) > 0.3
  return {
    "hidden": jax.random.normal(keys[0], (B, T, D)),
    "table": jax.random.normal(keys[1], (D, V)),
    "theirs": jax.random.normal(keys[2], (B, T, E)),
    "their_table": 0.5 * jax.random.normal(keys[3], (E, V)),
    "targets": jax.random.randint(keys[4], (B, T), 0, V),
    "weights": jax.random.uniform(keys[5], (B, T)) * kept,
  }


def plain(hidden, table, weights, arrays, how, k=None, cap=None):
  """The same from logits."""
  bend = lambda x: x if cap is None else cap * jnp.tanh(x / cap)
  student = bend(hidden @ table)
  teacher = bend(arrays["theirs"] @ arrays["their_table"])
  if k is None:
    gaps = distill.divergence(student, teacher, how)
  else:
    words = distill.top_k(teacher, k, how.temperature)
    gaps = distill.top_k_divergence(student, words, how)
  logps = jax.nn.log_softmax(student)
  nll = -jnp.take_along_axis(logps, arrays["targets"][..., None], -1)[..., 0]
  return jnp.sum(weights * (SOFT * gaps + HARD * nll))


def chunked(hidden, table, weights, arrays, how, layout, k=None):
  """From hidden states; the student's table is stored as the layout says, and the
  teacher's the other way."""
  other = layout._replace(transposed=not layout.transposed)
  their_table = arrays["their_table"]
  teacher = States(arrays["theirs"], their_table.T if other.transposed else their_table)
  if k is not None:
    teacher = hidden_top_k(*teacher, k, how.temperature, other)
  return weighted_distillation(
    hidden,
    table.T if layout.transposed else table,
    teacher,
    arrays["targets"],
    weights,
    how,
    soft=SOFT,
    hard=HARD,
    layout=layout,
    teacher_layout=Layout(other.transposed, softcap=layout.softcap),
  ).total


def check(arrays, how, layout, k=None, tolerance=1e-5):
  args = arrays["hidden"], arrays["table"], arrays["weights"]
  want_of = functools.partial(plain, arrays=arrays, how=how, k=k, cap=layout.softcap)
  got_of = functools.partial(chunked, arrays=arrays, how=how, layout=layout, k=k)
  want = jax.jit(jax.value_and_grad(want_of, (0, 1, 2)))(*args)
  got = jax.jit(jax.value_and_grad(got_of, (0, 1, 2)))(*args)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("k", [None, 5, V])
@pytest.mark.parametrize("how", ALL, ids=lambda h: h.name)
def test_value_and_gradients(arrays, how, k):
  check(arrays, how, CHUNKED, k)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_tables_stored_by_word_and_soft_caps(arrays, cap):
  check(arrays, ALL[2], CHUNKED._replace(transposed=True, softcap=cap))
  check(arrays, ALL[2], CHUNKED._replace(softcap=cap), k=5)


@pytest.mark.parametrize(
  ("fixture", "vocab_axis"), [("mesh_fsdp8", None), ("mesh_fsdp4_tp2", "tp")]
)
@pytest.mark.parametrize("k", [None, 5, V])
def test_sharded(arrays, fixture, vocab_axis, k, request):
  mesh = request.getfixturevalue(fixture)
  layout = Layout(k == 5, mesh, ("fsdp",), vocab_axis, 3.0, 1)
  check(arrays, ALL[0] if k else ALL[1], layout, k)


@pytest.mark.parametrize("k", [None, 5])
def test_a_mesh_of_one_device_has_no_axes_to_add_up_over(arrays, k):
  one = mesh_lib.create_mesh({"fsdp": 1, "tp": 1}, jax.devices()[:1])
  check(arrays, ALL[0], Layout(False, one, ("fsdp",), "tp"), k)


def test_a_batch_that_the_mesh_does_not_divide(arrays, mesh_fsdp8):
  few = {n: x[:3] if x.shape[:2] == (B, T) else x for n, x in arrays.items()}
  check(few, ALL[2], Layout(mesh=mesh_fsdp8, batch_axes=("fsdp",)))


def test_bfloat16(arrays):
  half = {
    n: x.astype(jnp.bfloat16) if n in ("hidden", "table", "theirs") else x
    for n, x in arrays.items()
  }
  args = half["hidden"], half["table"], half["weights"]
  value, grads = jax.value_and_grad(chunked, (0, 1))(*args, half, ALL[0], CHUNKED)
  assert value.dtype == jnp.float32
  assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]
  check(half, ALL[0], CHUNKED, tolerance=2e-2)


def test_what_is_told_by_token(arrays):
  out = weighted_distillation(
    arrays["hidden"],
    arrays["table"],
    States(arrays["theirs"], arrays["their_table"]),
    arrays["targets"],
    arrays["weights"],
    ALL[0],
    layout=CHUNKED,
  )
  student = arrays["hidden"] @ arrays["table"]
  teacher = arrays["theirs"] @ arrays["their_table"]
  pick = lambda x: (
    -jnp.take_along_axis(jax.nn.log_softmax(x), arrays["targets"][..., None], -1)
  )
  want = [distill.divergence(student, teacher, ALL[0])]
  want += [pick(student)[..., 0], pick(teacher)[..., 0]]
  for got, right in zip(out[1:], want):
    assert got is not None
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(out.total, jnp.sum(arrays["weights"] * want[0]), rtol=1e-5)


def test_hidden_top_k(arrays):
  got = hidden_top_k(arrays["theirs"], arrays["their_table"], 4, 1.5, CHUNKED)
  logits = arrays["theirs"] @ arrays["their_table"]
  want = distill.top_k(logits, 4, 1.5)
  assert got.ids.dtype == jnp.int32
  np.testing.assert_array_equal(got.ids, want.ids)
  np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


def test_gradients_that_nobody_asks_for_cost_nothing(arrays):
  args = arrays["hidden"], arrays["table"], arrays["weights"]

  def products(argnums):
    fn = functools.partial(chunked, arrays=arrays, how=ALL[0], layout=CHUNKED)
    text = jax.jit(jax.grad(fn, argnums)).lower(*args).as_text()
    return text.count("stablehlo.dot_general")

  assert products((0, 1)) == 4  # the logits of both, and one for each gradient
  assert products((0,)) == 3  # LoRA


@pytest.mark.parametrize("k", [None, 8])
def test_memory_follows_a_chunk(k):
  """Logits of all tokens would be 33 MB for each model."""
  batch, length, width, vocab = 4, 512, 32, 4096
  shapes = {
    "hidden": (batch, length, width),
    "table": (width, vocab),
    "theirs": (batch, length, width),
    "their_table": (width, vocab),
    "weights": (batch, length),
  }
  given = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
  given["targets"] = jax.ShapeDtypeStruct((batch, length), jnp.int32)
  layout = Layout(chunk_bytes=64 * 4 * vocab)  # 64 tokens: 1 MB

  def step(given):
    fn = functools.partial(chunked, arrays=given, how=ALL[2], layout=layout, k=k)
    args = given["hidden"], given["table"], given["weights"]
    return jax.value_and_grad(fn, (0, 1))(*args)

  lowered = jax.jit(step).lower(given)
  text = lowered.as_text()
  assert f"{batch}x{length}x{vocab}" not in text
  assert f"{batch * length}x{vocab}" not in text
  memory = lowered.compile().memory_analysis()
  assert memory is not None and memory.temp_size_in_bytes < 16e6


def test_vocabularies_that_differ_are_refused(arrays):
  with pytest.raises(ValueError, match=r"student has 40 .*teacher 39"):
    weighted_distillation(
      arrays["hidden"],
      arrays["table"],
      distill_hidden.States(arrays["theirs"], arrays["their_table"][:, :39]),
      arrays["targets"],
      arrays["weights"],
      ALL[0],
    )
