import jax
import numpy as np
import pytest

from tunix.generate.sizes import batching


def test_bucket():
  sizes = [1, 2, 3, 4, 5, 16, 17, 1000]
  assert [batching.bucket(n) for n in sizes] == [1, 2, 4, 4, 8, 16, 32, 1024]
  assert [batching.bucket(n, 16) for n in sizes[:3]] == [16, 16, 16]


def test_left_padded():
  tokens, mask = batching.left_padded([np.array([5, 6]), np.array([7])], 3, 3, 9)
  assert tokens.tolist() == [[9, 5, 6], [9, 9, 7], [9, 9, 9]]
  assert mask.tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 1]]


def test_id_lists_come_in_few_lengths():
  assert [len(batching.id_list(range(n))) for n in (0, 1, 8, 9)] == [8, 8, 8, 16]
  assert batching.id_list([4, 2]).tolist() == [4, 2] + [batching.NO_TOKEN] * 6


def test_right_padded():
  rows = [np.array([1]), np.array([4, 5, 6])]
  assert batching.right_padded(rows, 3, np.int32).tolist() == [[1, 0, 0], [4, 5, 6]]
  filled = batching.right_padded(rows, 4, np.int32, fill=7)
  assert filled.tolist() == [[1, 7, 7, 7], [4, 5, 6, 7]]
  deep = batching.right_padded([np.ones((1, 2))], 2, np.float32)
  assert deep.tolist() == [[[1, 1], [0, 0]]]


def test_keys_of_ints_and_of_keys():
  data = lambda seed: jax.random.key_data(batching.random_key(seed)).tolist()
  assert data(7) == data(np.int64(7)) == data(jax.random.key(7))
  assert data(7) == data(jax.random.PRNGKey(7)) == data(jax.numpy.int32(7))
  assert data(7) != data(8)
  assert data(None) != data(None)


@pytest.mark.parametrize(
  ("seed", "error", "words"),
  [
    (-1, ValueError, "seed is -1, expected an int from 0"),
    (2**32, ValueError, "from 0 to 2"),
    (0.5, TypeError, "seed has type float"),
    (jax.random.split(jax.random.key(0)), TypeError, "seed has type"),
  ],
)
def test_bad_seeds(seed, error, words):
  with pytest.raises(error, match=words):
    batching.random_key(seed)


def test_shorter_prompts_have_one_length_for_each_set_of_programs():
  # Prompts of 16, 32 and 64; prompt and 40 tokens in slots of 64 or 128.
  assert batching.shorter_prompts(40, 40) == [16, 24, 32]
  assert batching.shorter_prompts(16, 40) == []
