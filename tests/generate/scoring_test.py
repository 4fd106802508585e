import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import scored
from tests.generate.scored import P, R
from tests.models import checkpoints
from tunix.generate import scoring
from tunix.models import heads
from tunix.utils import mesh as mesh_lib, tree


def by_hand(logits_of, pairs, temperature=1.0):
  """log softmax of the logits before every completion token, row by row."""
  logps, entropy = np.zeros((len(pairs), R)), np.zeros((len(pairs), R))
  for row, (prompt, completion) in enumerate(pairs):
    tokens = np.array([[*prompt, *completion]], np.int32)
    logits = np.asarray(logits_of(tokens), np.float64)[0] / temperature
    every = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    for j, token in enumerate(completion):
      at = every[len(prompt) - 1 + j]
      logps[row, j] = at[token]
      entropy[row, j] = -np.sum(np.exp(at) * at)
  return logps, entropy


@pytest.mark.parametrize("group_size", [1, 2])
def test_scores_are_those_of_each_row_alone(group_size):
  model, pairs = scored.model("dense"), scored.sequences(4, copies=2)
  rows = scored.batch(pairs, fill=7)  # padding ids mean nothing
  out = scored.scores(model, rows, group_size=group_size, temperature=0.5, entropy=True)
  logps, entropy = by_hand(lambda tokens: toys.logits(model, tokens), pairs, 0.5)
  np.testing.assert_allclose(out.logps, logps, atol=2e-5)
  np.testing.assert_allclose(out.entropy, entropy, atol=2e-5)
  assert scored.scores(model, rows).entropy is None


@pytest.mark.parametrize("options", [{}, {"tile_rows": 3}], ids=str)
@pytest.mark.parametrize("make", [toys.TokensOnly, toys.FourArguments])
def test_models_of_users(make, options):
  model, pairs = make(nnx.Rngs(0)), scored.sequences(4)

  def logits(tokens):
    if make is toys.TokensOnly:
      return model(tokens)
    length = tokens.shape[1]
    mask = np.tril(np.ones((1, length, length), bool))
    return model(tokens, np.arange(length)[None], None, mask)[0]

  out = scored.scores(model, scored.batch(pairs), entropy=True, **options)
  want = by_hand(logits, pairs)
  np.testing.assert_allclose(out.logps, want[0], atol=1e-5)
  np.testing.assert_allclose(out.entropy, want[1], atol=1e-5)
  with pytest.raises(
    ValueError, match=f"group_size is 2; expected 1 for {make.__name__}"
  ):
    scored.scores(model, scored.batch(pairs), group_size=2)


# The other kinds of model take their turn with the slow tests.
QUICK = ("moe", "tied_scan_remat")


@pytest.mark.parametrize(
  "name",
  [
    name
    if name in QUICK
    else pytest.param(name, marks=(pytest.mark.slow, pytest.mark.ci))
    for name in scored.MODELS
  ],
)
def test_a_shared_prompt_changes_no_value_and_no_gradient(name):
  model, copies = scored.model(name), 3
  rows = scored.batch(scored.sequences(6, copies=copies))
  old = scored.scores(model, rows).logps + 0.05
  want, want_grads = scored.policy_gradient(model, rows, old)
  got, grads = scored.policy_gradient(model, rows, old, group_size=copies)
  np.testing.assert_allclose(got.logps, want.logps, atol=5e-6)
  np.testing.assert_allclose(got.entropy, want.entropy, atol=5e-6)
  want_grads = tree.flatten(want_grads)
  for path, gradient in tree.flatten(grads).items():
    assert checkpoints.relative(gradient, want_grads[path]) <= 1e-6, path


def test_a_shared_prompt_in_blocks_and_on_a_mesh(mesh_fsdp4_tp2):
  rows = scored.batch(scored.sequences(8, copies=2))
  want = scored.scores(scored.model("windowed"), rows).logps
  blocks = scored.model("windowed", attention="blockwise")
  got = scored.scores(blocks, rows, group_size=2).logps
  np.testing.assert_allclose(got, want, atol=5e-6)
  with mesh_lib.use_mesh(mesh_fsdp4_tp2):
    got = scored.scores(scored.model("windowed"), rows, group_size=2).logps
  np.testing.assert_allclose(got, want, atol=5e-6)


def test_rows_that_share_no_prompt_become_nan():
  pairs = scored.sequences(4, copies=2)
  pairs[3] = ([5, *pairs[3][0]], pairs[3][1])
  rows = scored.batch(pairs)
  logps = scored.scores(scored.model("dense"), rows, group_size=2).logps
  bad = np.isnan(np.asarray(logps))
  assert bad[3, 0] and not bad[:3].any()


def test_a_mask_with_holes_hides_nothing_from_later_tokens():
  model, pairs = scored.model("dense"), [(np.array([3, 4]), np.array([5, 6, 7, 8]))]
  rows = scored.batch(pairs)
  whole = scored.scores(model, rows).logps
  holes = rows[3] & np.array([[1, 0, 0, 1, 0, 0]], bool)
  got = scored.scores(model, (*rows[:3], holes)).logps
  np.testing.assert_array_equal(got, np.where(holes, whole, 0.0))


def test_logits_only_where_they_are_scored():
  model = scored.model("dense")
  rows = scored.batch(scored.sequences(4))
  graph, state = nnx.split(model)

  def text(**options):
    fn = lambda s: scoring.score_completions(nnx.merge(graph, s), *rows, **options)
    return jax.jit(fn).lower(state).as_text()

  assert f"tensor<{4 * R}x{toys.VOCAB}xf32>" in text()
  assert f"tensor<{4 * (P + R)}x{toys.VOCAB}xf32>" not in text()


def test_values_and_rewards():
  critic = heads.with_scores(scored.model("dense"), seed=1)
  pairs = scored.sequences(4, copies=2)
  rows = scored.batch(pairs)
  values = jax.jit(lambda: scoring.score_values(critic, *rows))()
  shared = scoring.score_values(critic, *rows, group_size=2)
  rewards = scoring.score_sequences(critic, *rows)
  for row, (prompt, completion) in enumerate(pairs):
    every = toys.logits(critic, np.array([[*prompt, *completion]], np.int32))[0, :, 0]
    want = every[len(prompt) - 1 : -1]
    for got in (values, shared):
      np.testing.assert_allclose(got[row, : len(completion)], want, atol=1e-6)
      np.testing.assert_array_equal(got[row, len(completion) :], 0.0)
    np.testing.assert_allclose(rewards[row], every[-1], atol=1e-6)
  # Without a completion it is the prompt's last token that speaks.
  empty = np.zeros_like(rows[3])
  every = toys.logits(critic, np.array([pairs[0][0]], np.int32))[0, :, 0]
  got = scoring.score_sequences(critic, *rows[:3], empty)
  np.testing.assert_allclose(got[0], every[-1], atol=1e-6)


def test_hidden_states_make_the_scores():
  model, rows = scored.model("dense"), scored.batch(scored.sequences(4, copies=2))
  hidden = scoring.completion_hidden(model, *rows, group_size=2)
  assert hidden.shape == (4, R, 32)
  every = jax.nn.log_softmax(model.logits(hidden))
  got = np.take_along_axis(np.asarray(every), rows[2][..., None], -1)[..., 0]
  want = scored.scores(model, rows).logps
  np.testing.assert_allclose(got * rows[3], want, atol=1e-5)
  with pytest.raises(ValueError, match="TokensOnly does not offer its hidden states"):
    scoring.completion_hidden(toys.TokensOnly(nnx.Rngs(0)), *rows)


@pytest.mark.parametrize(
  "options, message",
  [
    ({"group_size": 3}, "group_size is 3, expected at least 1 and a divisor of the 4"),
    ({"group_size": 2, "tile_rows": 2}, "tile_rows is 2 and group_size is 2"),
    ({"tile_rows": 0}, "tile_rows is 0"),
    ({"tile_tokens": 64}, "tile_rows is None"),
    ({"tile_rows": 2, "tile_tokens": 9}, "tile_tokens is 9; expected at least 14"),
    ({"temperature": 0.0}, "temperature is 0.0"),
  ],
)
def test_options_that_contradict_each_other(options, message):
  rows = scored.batch(scored.sequences(4))
  with pytest.raises(ValueError, match=message):
    scoring.score_completions(scored.model("dense"), *rows, **options)


def test_models_and_shapes_that_do_not_fit():
  rows = scored.batch(scored.sequences(4))
  model = scored.model("dense")
  with pytest.raises(ValueError, match=r"completions \(3, 6\)"):
    scoring.score_completions(model, *rows[:2], rows[2][:3], rows[3][:3])
  with pytest.raises(ValueError, match="returns 96 numbers per position"):
    scoring.score_values(model, *rows)
  with pytest.raises(ValueError, match="instead of logits over the vocabulary"):
    scoring.score_completions(heads.with_scores(model), *rows)
