"""Our processors against those of transformers, whose results are committed.

The golden was made with Pillow 13. Older Pillows resize some pictures along the other
axis first, and then a quarter of the levels differ by one.
"""

import itertools
import json
import pathlib
import zlib

import numpy as np
import pytest

from tests.models.images import toys
from tunix.models.images import pillow
from tunix.models.images.folder import read_processor
from tunix.models.images.patches import Gemma4, Pixtral, Qwen3VL
from tunix.models.images.squares import Gemma3, SmolVLM

GOLDEN = pathlib.Path(__file__).parent.parent.parent / "golden" / "images.json"
ALL = (Gemma3, SmolVLM, Gemma4, Qwen3VL, Pixtral)
SOFT = "<image_soft_token>", "<image>", "<|image|>", "<|image_pad|>", "[IMG]"


def levels(processor, values):
  mean, std = np.array(processor.mean), np.array(processor.std)
  return np.round((values.reshape(-1, 3) * std + mean) / processor.scale)


@pytest.mark.parametrize("config", [*toys.CONFIGS, *toys.PUBLISHED])
def test_equals_transformers(config, tmp_path):
  golden = json.loads(GOLDEN.read_text())
  seen = 0
  for name, files, image in toys.cases(config):
    processor = read_processor(toys.write(tmp_path, files))
    want = golden[name]
    seen += 1
    if want is None:
      with pytest.raises(ValueError, match="pixels"):
        processor(image)
      continue
    found = processor(image)
    places = np.linspace(0, found.values.size - 1, 16).astype(int)
    assert list(found.values.shape) == want["shape"], name
    np.testing.assert_allclose(
      found.values.reshape(-1)[places], want["values"], atol=1e-6, err_msg=name
    )
    exact = levels(processor, found.values).astype(np.uint8)
    assert zlib.crc32(exact.tobytes()) == want["levels"], name
    assert found.grid.dtype == np.int32 and found.values.dtype == np.float32
    (grid,) = found.grid.tolist()
    crops = isinstance(processor, Gemma3)
    assert ([grid[0] * grid[1]] if crops else grid) == want["grid"], name
    assert found.num_tokens == want["tokens"], name
    assert zlib.crc32(processor.text(grid).encode()) == want["text"], name
  assert seen in (3, 20)


@pytest.mark.parametrize("family, soft", [*zip(ALL, SOFT, strict=True)])
def test_tokens_and_values_follow_from_the_size(family, soft):
  """Counts need no pixels, and several images are concatenated."""
  processor = family()
  for height, width in itertools.product((1, 30, 250), (20, 190)):
    grid = processor.grid(height, width)
    assert processor.text(grid).count(soft) == processor.num_tokens(grid)
  small = [processor(np.zeros((n, 40, 3), np.uint8)) for n in (20, 60)]
  values = np.concatenate([x.values for x in small])
  grids = np.concatenate([x.grid for x in small])
  assert len(values) == sum(len(x.values) for x in small) and len(grids) == 2


def test_layouts_by_hand():
  assert Gemma3(tokens_per_square=2).text((0, 0)) == (
    "\n\n<start_of_image><image_soft_token><image_soft_token><end_of_image>\n\n"
  )
  assert SmolVLM(tokens_per_square=1).text((1, 2)) == (
    "<fake_token_around_image><row_1_col_1><image>"
    "<fake_token_around_image><row_1_col_2><image>\n\n"
    "<fake_token_around_image><global-img><image><fake_token_around_image>"
  )
  assert Gemma4().text((3, 6)) == "<|image><|image|><|image|><image|>"
  assert Qwen3VL().text((1, 2, 4)) == "<|image_pad|><|image_pad|>"
  assert Pixtral().text((4, 4)) == "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]"


def test_patches_by_hand():
  """A 4 x 4 picture whose levels count the pixels, in patches of 1 x 1 and 2 x 2."""
  image = np.repeat(np.arange(16, dtype=np.uint8).reshape(4, 4, 1), 3, axis=-1)
  options = {"mean": (0, 0, 0), "std": (1, 1, 1), "scale": 1.0}
  qwen = Qwen3VL(patch_size=1, merge_size=2, min_pixels=16, max_pixels=16, **options)
  order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
  assert qwen(image).values[:, 0].tolist() == order
  pixtral = Pixtral(patch_size=2, merge_size=1, longest_edge=4, **options)
  second = [2, 2, 2, 3, 3, 3, 6, 6, 6, 7, 7, 7]
  assert pixtral(image).values[1].tolist() == second


def test_resizing_a_row_by_hand():
  row = lambda *levels: np.repeat(np.array([levels], np.uint8)[..., None], 3, -1)
  # New centers at 0.25, 0.75, 1.25, 1.75 of old pixels centered at 0.5 and 1.5; beyond
  # the border the only pixel in reach counts alone.
  doubled = pillow.resize(row(0, 100), 1, 4, pillow.BILINEAR)
  assert doubled[0, :, 0].tolist() == [0, 25, 75, 100]
  # Triangles two old pixels wide to each side, centered at 1 and 3:
  # distances 0.5, 0.5, 1.5 -> weights 3, 3, 1 sevenths
  halved = pillow.resize(row(0, 80, 160, 240), 1, 2, pillow.BILINEAR)
  assert halved[0, :, 0].tolist() == [round(400 / 7), round((80 + 3 * 400) / 7)]


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: Gemma3(size=0), "size"),
    (lambda: Qwen3VL(patch_size=1.5), "patch_size"),
    (lambda: Pixtral(std=(1.0, 0.0, 1.0)), "std"),
    (lambda: Gemma4(mean=(0.0, 0.0)), "3 channels"),
    (lambda: SmolVLM(resample=9), "resample is 9"),
    (lambda: SmolVLM(longest_edge=4097), "longest_edge is 4097"),
  ],
)
def test_refused_numbers(make, message):
  with pytest.raises((ValueError, TypeError), match=message):
    make()


@pytest.mark.parametrize(
  "family, shape, message",
  [
    (Qwen3VL, (1, 201), "at most 200"),
    (Pixtral, (4000, 1), "too narrow"),
  ],
)
def test_refused_shapes(family, shape, message):
  with pytest.raises(ValueError, match=message):
    family()(np.zeros((*shape, 3), np.uint8))
