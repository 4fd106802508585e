import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.transformer import attention_cases as cases
from tunix.generate.decoders import cached
from tunix.models.transformer.attention import paths as attention_paths, rope
from tunix.models.transformer.attention.layer import Attention
from tunix.models.transformer.attention.paths import FEATURES, Call, attend, choose
from tunix.models.transformer.config import RopeConfig
from tunix.models.transformer.dense.layers import Linear, RMSNorm
from tunix.models.transformer.visibility import Visibility

# Visible keys


def seen(visible, keys, window=None):
  return np.asarray(visible.dense(keys, window)).astype(int).tolist()


def test_a_window_counts_the_token_itself():
  got = seen(Visibility(jnp.arange(4)), 4, window=2)
  assert got == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]]


def test_a_window_lies_over_a_mask():
  # Queries at slots 2 and 3 of five; the mask opens everything but slot 2.
  mask = jnp.ones((1, 2, 5), bool).at[:, :, 2].set(False)
  got = seen(Visibility(jnp.array([2, 3]), mask), 5, window=2)
  assert got == [[[0, 1, 0, 1, 1], [0, 0, 0, 1, 1]]]


def test_groups_see_both_ways_within_the_window_of_the_past():
  groups = jnp.array([[0, 5, 5, 5, 0]])
  visible = Visibility(jnp.arange(5), groups=groups)
  full = [[1, 0, 0, 0, 0], *[[1, 1, 1, 1, 0]] * 3, [1, 1, 1, 1, 1]]
  assert seen(visible, 5) == [full]
  sliding = [
    [1, 0, 0, 0, 0],
    [1, 1, 1, 1, 0],  # the future of its group has no limit
    [0, 1, 1, 1, 0],
    [0, 0, 1, 1, 0],  # the past has
    [0, 0, 0, 1, 1],
  ]
  assert seen(visible, 5, window=2) == [sliding]


def test_groups_do_not_leave_their_segment():
  visible = Visibility(
    jnp.arange(4),
    segment_ids=jnp.array([[1, 1, 2, 2]]),
    groups=jnp.array([[0, 7, 7, 7]]),
  )
  assert seen(visible, 4) == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]]


def test_groups_are_found_in_the_slots_of_a_cache():
  # Three tokens at slots 1 to 3 of six, the last two an image.
  visible = Visibility(jnp.arange(1, 4), groups=jnp.array([[0, 1, 1]]))
  want = [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]
  assert seen(visible, 6) == [want]
  # A mask that closes the padding at slot 0 and the future keeps its say elsewhere.
  mask = jnp.tril(jnp.ones((1, 6, 6), bool))[:, 1:4].at[:, :, 0].set(False)
  masked = dataclasses.replace(visible, mask=mask)
  assert seen(masked, 6) == [[[0, *row[1:]] for row in want]]


def test_segments_with_a_cache_are_refused():
  visible = Visibility(jnp.arange(2), segment_ids=jnp.array([[1, 1]]))
  with pytest.raises(ValueError, match="segment_ids of 2 tokens with 5 keys"):
    visible.dense(5)


@pytest.mark.parametrize("window", [1, 3, 50])
def test_masks_are_those_of_transformers(window):
  torch = pytest.importorskip("torch")
  theirs = pytest.importorskip("transformers.masking_utils")
  groups = np.array([[0, 1, 1, 1, 0, 2, 2, 0, 0]])
  blocks = theirs.blockwise_overlay(torch.tensor(groups - 1))
  causal, near = theirs.causal_mask_function, theirs.sliding_window_overlay(window)
  index = torch.arange(9)

  def assert_same(groups, window, function):
    visible = Visibility(jnp.arange(9), groups=groups)
    got = np.array([[bool(function(0, 0, q, k)) for k in index] for q in index])
    np.testing.assert_array_equal(visible.dense(9, window)[0], got)

  assert_same(None, window, theirs.sliding_window_causal_mask_function(window))
  # As Gemma 3 composes them for its full and its sliding layers.
  full = theirs.or_masks(causal, blocks)
  assert_same(groups, None, full)
  assert_same(groups, window, theirs.and_masks(full, near))


# The function


def test_softcap_and_scale_by_hand():
  # One key scores 3 * 2 = 6 and one 0; capped at 2: 2 tanh(3) and 0.
  query = jnp.array([[[[2.0, 0.0]]]])
  key = jnp.array([[[[1.0, 0.0]], [[0.0, 1.0]]]])
  value = jnp.array([[[[1.0, 0.0]], [[0.0, 1.0]]]])
  out = attend(query, key, value, jnp.ones((1, 1, 2), bool), scale=3.0, softcap=2.0)
  weight = np.exp(2 * np.tanh(3.0))
  np.testing.assert_allclose(out[0, 0, 0, 0], weight / (weight + 1), rtol=1e-6)


@pytest.mark.parametrize("path", ["plain", "blockwise"])
def test_named_paths_agree(path):
  case = cases.case("segments groups", 4, length=24, window=6, softcap=3.0)
  run = functools.partial(attend, implementation=path)
  cases.assert_equal(cases.value_and_grads(case, run), cases.plain(case))


def test_plain_path_of_a_blind_row_is_finite():
  case = cases.case("mask", 3, length=12, softcap=2.0)
  case.visible.mask[:, 3:5] = False
  run = functools.partial(attend, implementation="plain", **case.options)

  def loss(*arrays):
    return jnp.sum(run(*arrays, case.visible) * case.weights)

  grads = jax.jit(jax.grad(loss, (0, 1, 2)))(case.query, case.key, case.value)
  assert all(np.all(np.isfinite(g)) for g in grads)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"window": 0}, "window 0 must be at least 1"),
    ({"softcap": 0.0}, "softcap 0.0 must be positive"),
    ({"implementation": "flash"}, "'flash' is unknown: use 'auto' or one of"),
    ({"implementation": "splash"}, "cannot do platform cpu .it runs on tpu"),
  ],
)
def test_nonsense_is_refused(change, message):
  case = cases.case("causal", 0, length=4)
  arrays = case.query, case.key, case.value
  with pytest.raises(ValueError, match=message):
    attend(*arrays, case.visible, **{**case.options, **change})


def test_contradictions_are_refused():
  ones = lambda length, heads: jnp.ones((1, length, heads, 2))
  visible = Visibility(jnp.arange(3), aligned=True)
  with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
    attend(ones(3, 3), ones(3, 2), ones(3, 2), visible)
  with pytest.raises(ValueError, match="3 queries are not the 5 keys"):
    attend(ones(3, 2), ones(5, 2), ones(5, 2), visible)
  mask = jnp.ones((1, 3, 5), bool)
  with pytest.raises(
    ValueError, match=r"mask has shape .* does not give the queries' slots"
  ):
    attend(ones(3, 2), ones(5, 2), ones(5, 2), mask, window=2)


# The choice

NOTHING = Call(
  platform="cpu",
  dtype="bfloat16",
  head_dim=128,
  scores=4096 * 4096,
)


def call_of(**changes):
  """A call with the features whose value is True."""
  features = frozenset(x for x in changes if x in FEATURES and changes[x])
  fields = {name: changes[name] for name in changes if name not in FEATURES}
  return dataclasses.replace(NOTHING, features=features, **fields)


@pytest.mark.parametrize(
  "platform, changes, want",
  [
    ("cpu", {"scores": 256 * 256}, "plain"),
    ("cpu", {"scores": 512 * 512}, "blockwise"),
    ("tpu", {"scores": 512 * 512}, "plain"),
    ("tpu", {}, "splash"),
    ("tpu", {"softcap": True, "window": True, "segments": True}, "splash"),
    ("tpu", {"mask": True}, "blockwise"),
    ("tpu", {"groups": True}, "blockwise"),
    ("tpu", {"cache": True}, "blockwise"),
    ("tpu", {"shared": True}, "blockwise"),
    ("gpu", {"shared": True}, "blockwise"),
    ("gpu", {}, "cudnn"),
    ("gpu", {"scores": 512 * 512}, "cudnn"),
    ("gpu", {"scores": 256 * 256}, "plain"),
    ("gpu", {"window": True}, "cudnn"),
    ("gpu", {"softcap": True}, "blockwise"),
    ("gpu", {"segments": True}, "blockwise"),
    ("gpu", {"dtype": "float32"}, "blockwise"),
    ("gpu", {"head_dim": 256}, "blockwise"),
    ("gpu", {"head_dim": 100}, "blockwise"),
  ],
)
def test_auto(platform, changes, want):
  assert choose(call_of(platform=platform, **changes)) == want


def test_what_was_not_measured_must_be_named():
  assert choose(call_of(platform="gpu", segments=True), "cudnn") == "cudnn"


def test_a_named_path_says_what_it_cannot_do_and_who_can():
  call = call_of(platform="gpu", softcap=True, mask=True, dtype="float32", head_dim=300)
  with pytest.raises(ValueError) as error:
    choose(call, "cudnn")
  for part in ("soft cap", "a mask", "dtype float32", "multiple of 8", "at most"):
    assert part in str(error.value)
  assert "['plain', 'blockwise']" in str(error.value)


def test_auto_never_takes_a_path_that_refuses():
  flags = ("softcap", "window", "segments", "mask", "groups", "cache", "shared")
  for platform in ("cpu", "gpu", "tpu"):
    for values in itertools.product((False, True), repeat=len(flags)):
      call = call_of(platform=platform, **dict(zip(flags, values)))
      assert not attention_paths.PATHS[choose(call)].refusals(call)


# The layer

DIM, HEADS, HEAD_DIM = 16, 4, 4


def layer(**options):
  rngs = nnx.Rngs(0)
  linear = lambda i, o: Linear(i, o, spec=(None, None), rngs=rngs)
  wide, narrow = HEADS * HEAD_DIM, HEADS * HEAD_DIM // 2
  made = Attention(
    linear(DIM, wide),
    linear(DIM, narrow),
    linear(DIM, narrow),
    linear(wide, DIM),
    head_dim=HEAD_DIM,
    **options,
  )
  for name in ("q_proj", "k_proj", "v_proj", "o_proj"):  # so that scores differ
    kernel = getattr(made, name).kernel
    kernel.set_value(30 * kernel[...])
  return made


def angles(positions):
  return rope.angles(positions, HEAD_DIM, RopeConfig())


class OneLayer:
  """A model of one attention layer with decode.py's calling convention; its cache is
  (keys, values, index)."""

  def __init__(self, attn):
    self.attn = attn
    self.table = jax.random.normal(jax.random.key(1), (50, DIM))

  def init_cache(self, rows, slots):
    empty = jnp.zeros((rows, HEADS // 2, slots, HEAD_DIM))
    return empty, empty, jnp.zeros((), jnp.int32)

  def __call__(self, tokens, positions, cache=None, mask=None):
    index = jnp.arange(tokens.shape[1])
    if cache is None:
      visible = Visibility(index, mask)
      return self.attn(self.table[tokens], angles(positions), visible)[0], None
    visible = Visibility(index + cache[2], mask)
    out, pair = self.attn(self.table[tokens], angles(positions), visible, cache[:2])
    return out, (*pair, cache[2] + tokens.shape[1])


@pytest.mark.parametrize("path", ["plain", "blockwise"])
def test_a_window_through_the_decode_cache(path):
  # Row 1 has two slots of padding; windows of 3, a prompt of 5 slots, 4 tokens more.
  model = OneLayer(layer(windows=(3,), softcap=4.0, implementation=path))
  tokens = np.random.default_rng(0).integers(0, 50, (2, 9)).astype(np.int32)
  valid = np.arange(5) >= np.array([[0], [2]])
  out, memory = cached.prefill(model, jnp.array(tokens[:, :5]), jnp.array(valid), 12)
  rows = [tokens[:1], tokens[1:, 2:]]
  full = [model(jnp.array(r), jnp.arange(r.shape[1])[None])[0][0] for r in rows]
  for slot in range(4, 9):
    want = jnp.stack([full[0][slot], full[1][slot - 2]])
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
    if slot < 8:
      out, memory = cached.step(model, jnp.array(tokens[:, slot + 1]), memory)
  # The window matters: without it the last token's output is another.
  free = OneLayer(layer(softcap=4.0))
  other = free(jnp.array(rows[0]), jnp.arange(9)[None])[0][0]
  assert float(jnp.abs(other[8] - full[0][8]).max()) > 1e-2


def test_wide_norm_is_over_all_heads():
  norm = lambda dim: RMSNorm(dim, 1e-6, spec=(None,))
  heads = layer(q_norm=norm(HEAD_DIM), k_norm=norm(HEAD_DIM))
  wide = layer(q_norm=norm(16), k_norm=norm(8), wide_norm=True)
  x = jax.random.normal(jax.random.key(0), (1, 3, DIM))
  rms = lambda y: y / np.sqrt(np.mean(np.square(y), -1, keepdims=True))
  query, _, key, _ = wide._project(x)
  np.testing.assert_allclose(query, rms(wide.q_proj(x)).reshape(1, 3, 4, 4), rtol=1e-4)
  np.testing.assert_allclose(key, rms(wide.k_proj(x)).reshape(1, 3, 2, 4), rtol=1e-4)
  by_head, *_ = heads._project(x)
  want = rms(np.asarray(heads.q_proj(x)).reshape(1, 3, 4, 4))
  np.testing.assert_allclose(by_head, want, rtol=1e-4)


def test_the_layer_knows_when_there_is_no_cache():
  model = layer(implementation="splash")
  x, index = jnp.zeros((1, 3, DIM)), jnp.arange(3)
  empty = jnp.zeros((1, HEADS // 2, 3, HEAD_DIM))
  with pytest.raises(ValueError, match="cannot do platform cpu"):
    model(x, angles(index[None]), Visibility(index))
  with pytest.raises(ValueError, match="cannot do a cache"):
    model(x, angles(index[None]), Visibility(index), (empty, empty))


def test_long_rows_go_through_blocks_by_themselves():
  x = jax.random.normal(jax.random.key(0), (1, 300, DIM))
  index = jnp.arange(300)
  run = lambda attn: attn(x, angles(index[None]), Visibility(index))[0]
  assert "while" in jax.jit(lambda: run(layer())).lower().as_text()
  np.testing.assert_allclose(
    run(layer()), run(layer(implementation="plain")), rtol=1e-3, atol=1e-3
  )
