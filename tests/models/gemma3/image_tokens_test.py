import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.models.gemma3 import image_tokens
from tunix.models.gemma3.image_tokens import ImageTokens

# 11, 12, 13 are one, two and three newlines.
IDS = ImageTokens(start=1, soft=2, end=3, per_image=2, newlines=(11, 12, 13))
IMAGE = [1, 2, 2, 3]


@pytest.mark.parametrize(
  "prompt, want",
  [
    ([], []),
    ([5, 11, 6], [5, 11, 6]),
    ([5, 1, 6], [5, 12, *IMAGE, 12, 6]),
    ([1], [12, *IMAGE, 12]),
    ([5, 11, 1, 6], [5, 13, *IMAGE, 12, 6]),
    ([5, 1, 11, 6], [5, 12, *IMAGE, 13, 6]),
    ([1, 5, 1], [12, *IMAGE, 12, 5, 12, *IMAGE, 12]),
    # four and five newlines between two images
    ([1, 1], [12, *IMAGE, 13, 11, *IMAGE, 12]),
    ([1, 11, 1], [12, *IMAGE, 13, 12, *IMAGE, 12]),
    # runs away from images are left as they are
    ([11, 11, 5, 1], [11, 11, 5, 12, *IMAGE, 12]),
  ],
)
def test_expansion(prompt, want):
  assert image_tokens.expand_images(prompt, IDS) == want


def test_gemma3_chat_turn():
  # <bos><start_of_turn>user\n<start_of_image>: three newlines, one, 256, one, two
  ids = image_tokens.expand_images([2, 105, 2364, 107, 255_999, 9], ImageTokens())
  assert ids[:5] == [2, 105, 2364, 109, 255_999]
  assert ids[5:261] == [262_144] * 256
  assert ids[261:] == [256_000, 108, 9]


def test_expanded_prompts_are_refused():
  once = image_tokens.expand_images([1], IDS)
  with pytest.raises(ValueError, match="3 tokens of expanded images"):
    image_tokens.expand_images(once, IDS)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"start": 1, "end": 1}, "must differ"),
    ({"newlines": (11,)}, r"newlines are \(11,\)"),
    ({"per_image": 0}, "per_image is 0"),
  ],
)
def test_ids_refuse(changes, message):
  with pytest.raises(ValueError, match=message):
    ImageTokens(**changes)


TOKENS = np.array([[2, 2, 5, 2, 2, 2], [5, 5, 5, 5, 5, 5], [5, 2, 5, 5, 2, 5]])


def test_groups():
  groups = image_tokens.image_groups(jnp.asarray(TOKENS), 2)
  assert groups.dtype == jnp.int32
  assert groups.tolist() == [[1, 1, 0, 2, 2, 2], [0] * 6, [0, 1, 0, 0, 2, 0]]


def scatter_by_loop(embeddings, tokens, features, soft):
  out, flat = np.array(embeddings), iter(features.reshape(-1, features.shape[-1]))
  for row in range(tokens.shape[0]):
    for t in range(tokens.shape[1]):
      if tokens[row, t] == soft:
        out[row, t] = next(flat)
  return out


def arrays(images):
  rng = np.random.default_rng(0)
  embeddings = rng.normal(size=(*TOKENS.shape, 3)).astype(np.float32)
  return embeddings, rng.normal(size=(images, 7, 3)).astype(np.float32)


@pytest.mark.parametrize("images", [1, 2])
def test_scatter(images):
  embeddings, features = arrays(images)
  got = jax.jit(image_tokens.scatter_images, static_argnums=3)(
    embeddings, TOKENS, features, 2
  )
  np.testing.assert_array_equal(got, scatter_by_loop(embeddings, TOKENS, features, 2))


def test_gradients_go_to_the_feature_that_was_used():
  embeddings, features = arrays(2)
  weights = np.random.default_rng(1).normal(size=embeddings.shape).astype(np.float32)
  loss = lambda e, f: jnp.sum(image_tokens.scatter_images(e, TOKENS, f, 2) * weights)
  of_text, of_images = jax.jit(jax.grad(loss, argnums=(0, 1)))(embeddings, features)
  places = TOKENS == 2
  np.testing.assert_array_equal(of_text, np.where(places[..., None], 0, weights))
  flat = of_images.reshape(-1, 3)
  np.testing.assert_array_equal(flat[:7], weights[places])
  assert not flat[7:].any()


def test_too_few_features_are_not_silent():
  embeddings, features = arrays(1)
  got = np.asarray(
    image_tokens.scatter_images(embeddings, jnp.asarray(TOKENS), features[:, :6], 2)
  )
  assert np.isnan(got[TOKENS == 2]).all()
  np.testing.assert_array_equal(got[TOKENS != 2], embeddings[TOKENS != 2])
  none = image_tokens.scatter_images(embeddings, jnp.asarray(TOKENS), features[:0], 2)
  assert np.isnan(np.asarray(none)[TOKENS == 2]).all()


def test_text_needs_no_images():
  embeddings, features = arrays(1)
  text = jnp.full(TOKENS.shape, 5)
  for given in (features, features[:0]):
    got = image_tokens.scatter_images(embeddings, text, given, 2)
    np.testing.assert_array_equal(got, embeddings)


def test_images_by_row():
  embeddings, features = arrays(6)
  # 5, 0 and 2 soft tokens against 2 images of 3 vectors for each row
  by_row = features[:, :3].reshape(3, 2, 3, 3)
  got = image_tokens.scatter_images(embeddings, jnp.asarray(TOKENS), by_row, 2)
  for row in range(3):
    part = slice(row, row + 1)
    want = scatter_by_loop(embeddings[part], TOKENS[part], by_row[row], 2)
    np.testing.assert_array_equal(got[part], want)
  got = image_tokens.scatter_images(embeddings, jnp.asarray(TOKENS), by_row[:, :1], 2)
  assert np.isnan(np.asarray(got)[0][TOKENS[0] == 2]).all()
  assert not np.isnan(np.asarray(got)[1:]).any()
  with pytest.raises(ValueError, match=r"\(2, 2, 3, 3\), expected 3 rows"):
    image_tokens.scatter_images(embeddings, jnp.asarray(TOKENS), by_row[:2], 2)


def test_check_names_the_counts():
  rows = np.array([[2, 2, 5, 2, 2], [5, 5, 5, 5, 5]])
  image_tokens.check_images(rows, 2, 2, 2)
  image_tokens.check_images(rows, [2, 0], 2, 2)
  with pytest.raises(ValueError, match=r"\[4, 0\] .* places for \[2, 0\] .* 3 images"):
    image_tokens.check_images(rows, 3, 2, 2)
  with pytest.raises(ValueError, match=r"but \[1, 1\] images were given"):
    image_tokens.check_images(rows, [1, 1], 2, 2)
  with pytest.raises(ValueError, match=r"row 1 holds 1 image tokens.*multiple of 2"):
    image_tokens.check_images(np.array([[2, 2], [2, 5]]), 1, 2, 2)
