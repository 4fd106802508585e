import jax.numpy as jnp
import numpy as np

from tunix.ops import masks


def array(*rows):
  return jnp.array(rows, jnp.int32)


def test_next_token_targets():
  np.testing.assert_array_equal(masks.next_token_targets(array([5, 6, 7])), [[6, 7, 5]])


def test_target_weights_of_one_example():
  # Tokens 1 and 3 are trained: the predictions at 0 and 2 count. Token 0 is trained
  # in the second row, but nothing stands before it.
  mask = array([0, 1, 0, 1], [1, 0, 0, 0])
  np.testing.assert_array_equal(
    masks.target_weights(mask), [[1, 0, 1, 0], [0, 0, 0, 0]]
  )


def test_target_weights_keep_fractions():
  mask = jnp.array([[0.0, 0.5, 0.25]])
  np.testing.assert_array_equal(masks.target_weights(mask), [[0.5, 0.25, 0.0]])


def test_first_token_of_a_segment_is_no_target():
  mask = array([1, 1, 1, 1, 1, 0])
  segments = array([1, 1, 2, 2, 3, 0])
  np.testing.assert_array_equal(
    masks.target_weights(mask, segments), [[1, 0, 1, 0, 0, 0]]
  )


def test_positions_from_mask():
  mask = array([1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0])
  np.testing.assert_array_equal(
    masks.positions_from_mask(mask), [[0, 1, 2, 2], [0, 0, 0, 1], [0, 0, 0, 0]]
  )


def test_positions_from_segments():
  segments = array([1, 1, 1, 2, 2, 0], [7, 8, 8, 8, 7, 7])
  np.testing.assert_array_equal(
    masks.positions_from_segments(segments), [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 1]]
  )


def test_causal_mask():
  # Two queries at slots 2 and 3 of four.
  got = masks.causal_mask(jnp.array([2, 3]), jnp.arange(4))
  np.testing.assert_array_equal(got, [[[1, 1, 1, 0], [1, 1, 1, 1]]])


def test_causal_mask_inside_segments():
  segments = array([1, 1, 2], [1, 2, 2])
  got = masks.causal_mask(jnp.arange(3), jnp.arange(3), segments, segments)
  np.testing.assert_array_equal(
    got,
    [
      [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
      [[1, 0, 0], [0, 1, 0], [0, 1, 1]],
    ],
  )
