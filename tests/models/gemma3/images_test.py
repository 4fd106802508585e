import numpy as np
import pytest

from tunix.models.gemma3 import images


def test_one_colour_stays_and_is_scaled():
  picture = np.full((5, 9, 3), 255, np.uint8)
  picture[..., 1] = 0
  picture[..., 2] = 51
  (out,) = images.preprocess([picture], 4)
  assert out.dtype == np.float32 and out.shape == (4, 4, 3)
  np.testing.assert_allclose(out[..., 0], 1.0)
  np.testing.assert_allclose(out[..., 1], -1.0)
  np.testing.assert_allclose(out[..., 2], -0.6, rtol=1e-6)


def test_same_size_keeps_every_level():
  picture = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
  np.testing.assert_array_equal(images.resize(picture, 4, 4), picture)


def test_doubling_a_row_by_hand():
  picture = np.array([[[0] * 3, [100] * 3]], np.uint8)
  # New centres at 0.25, 0.75, 1.25, 1.75 of old pixels centered at 0.5 and 1.5; beyond
  # the border the only pixel in reach counts alone.
  want = [0, 25, 75, 100]
  assert images.resize(picture, 1, 4)[0, :, 0].tolist() == want
  assert images.resize(picture.swapaxes(0, 1), 4, 1)[:, 0, 2].tolist() == want


def test_halving_a_row_by_hand():
  picture = np.repeat(np.array([[0, 80, 160, 240]], np.uint8)[..., None], 3, -1)
  # Triangles two old pixels wide to each side, centered at 1 and 3:
  # distances 0.5, 0.5, 1.5 -> weights 3, 3, 1 sevenths
  want = [(3 * 0 + 3 * 80 + 160) / 7, (80 + 3 * 160 + 3 * 240) / 7]
  assert images.resize(picture, 1, 2)[0, :, 0].tolist() == [round(x) for x in want]


@pytest.mark.parametrize("shape", [(9, 7), (30, 21), (21, 40), (41, 19), (25, 24)])
def test_equals_pillow(shape):
  pillow = pytest.importorskip("PIL.Image")
  picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
  want = np.asarray(
    pillow.fromarray(picture).resize((24, 24), pillow.Resampling.BILINEAR)
  )
  # Pillow before 13 may take the axes in the other order.
  apart = np.abs(images.resize(picture, 24, 24).astype(int) - want)
  assert apart.max() <= 1
  if int(pytest.importorskip("PIL").__version__.split(".")[0]) >= 13:
    assert not apart.any()


def test_pillow_images_of_any_mode():
  pillow = pytest.importorskip("PIL.Image")
  grey = np.random.default_rng(0).integers(0, 256, (6, 5), dtype=np.uint8)
  want = images.preprocess([np.repeat(grey[..., None], 3, -1)], 8)
  np.testing.assert_array_equal(images.preprocess([pillow.fromarray(grey)], 8), want)


@pytest.mark.parametrize(
  "picture, kind, message",
  [
    (np.zeros((4, 4), np.uint8), ValueError, r"image 0 has shape \(4, 4\)"),
    (np.zeros((3, 4, 4), np.uint8), ValueError, "channels last"),
    (np.zeros((0, 4, 3), np.uint8), ValueError, r"\(0, 4, 3\)"),
    (np.zeros((4, 4, 3)), TypeError, "float64, expected uint8"),
  ],
)
def test_refused(picture, kind, message):
  with pytest.raises(kind, match=message):
    images.preprocess([picture])


def test_no_images():
  assert images.preprocess([]).shape == (0, 896, 896, 3)
