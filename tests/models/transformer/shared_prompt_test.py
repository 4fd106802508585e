import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import toys
from tunix.models.transformer.attention.paths import attend
from tunix.models.transformer.shared_prompt import SharedPrompt
from tunix.models.transformer.visibility import Visibility

SHARED = SharedPrompt(prompt=3, copies=2)  # [p p p | a a | b b]


def test_positions_go_on_from_each_prompt():
  valid = np.array([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], bool)
  want = [[0, 0, 1, 2, 3, 2, 3], [0, 1, 2, 3, 4, 3, 4]]
  assert SHARED.positions(jnp.asarray(valid)).tolist() == want


def test_rows_are_taken_apart_and_put_together():
  x = jnp.arange(14).reshape(2, 7)
  assert SHARED.prompts(x).tolist() == [[0, 1, 2], [7, 8, 9]]
  assert SHARED.completions(x).tolist() == [[3, 4], [5, 6], [10, 11], [12, 13]]
  assert SHARED.sequences(x).tolist()[1] == [0, 1, 2, 5, 6]
  again = SHARED.rows(SHARED.prompts(x), SHARED.completions(x))
  np.testing.assert_array_equal(again, x)


def test_who_sees_whom():
  # The first prompt token is padding. Completion b's second token sees the prompt's
  # tokens and its own two, in slots 0..4 of a row of its own.
  valid = jnp.array([[0, 1, 1, 1, 1, 1, 1]])
  visible = Visibility(jnp.arange(7), segment_ids=valid, shared=SHARED)
  prompt = visible.of_prompt().dense(3)[0].astype(int)
  assert prompt.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
  both = visible.of_completions().dense(5).astype(int)
  assert both[1].tolist() == both[0].tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
  near = visible.of_completions().dense(5, window=3)[1].astype(int)
  assert near.tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("implementation", ["auto", "plain", "blockwise"])
@pytest.mark.parametrize("options", [{}, {"window": 4, "softcap": 2.0}], ids=str)
def test_attention_is_that_of_each_sequence(implementation, options):
  p, r, copies = 6, 5, 3
  shared = SharedPrompt(p, copies)
  keys = jax.random.split(jax.random.key(0), 3)
  heads = (4, 2, 2)
  q, k, v = (
    jax.random.normal(key, (2, p + copies * r, n, 8)) for key, n in zip(keys, heads)
  )
  valid = jnp.ones(q.shape[:2], jnp.int32).at[0, :2].set(0)
  visible = Visibility(
    jnp.arange(q.shape[1]), segment_ids=valid, aligned=True, shared=shared
  )
  got = attend(q, k, v, visible, implementation=implementation, **options)
  whole = Visibility(
    jnp.arange(p + r), segment_ids=shared.sequences(valid), aligned=True
  )
  want = attend(*map(shared.sequences, (q, k, v)), whole, **options)
  got = shared.sequences(got)
  np.testing.assert_allclose(got[:, 2:], want[:, 2:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["splash", "cudnn"])
def test_paths_that_cannot_are_refused_by_name(name):
  x = jnp.ones((1, 7, 2, 8))
  visible = Visibility(jnp.arange(7), aligned=True, shared=SHARED)
  with pytest.raises(ValueError, match="shared prompt"):
    attend(x, x, x, visible, implementation=name)


def test_nonsense_is_refused():
  with pytest.raises(ValueError, match=r"SharedPrompt\.copies is 0"):
    SharedPrompt(3, 0)
  for length in (3, 6):
    with pytest.raises(
      ValueError, match=f"{length} tokens are not a prompt of 3 and 2"
    ):
      SHARED.completion(length)
  model, tokens = toys.model(), jnp.ones((1, 7), jnp.int32)
  mask = jnp.ones((1, 7, 7), bool)
  with pytest.raises(ValueError, match="combined with an attention_mask"):
    model(tokens, attention_mask=mask, shared_prompt=SHARED)
  with pytest.raises(ValueError, match="combined with a cache"):
    model(tokens, None, model.init_cache(1, 8), shared_prompt=SHARED)
