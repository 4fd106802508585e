"""The processors against the installed transformers, on pictures the golden lacks.

Runs where torch, torchvision and transformers are installed; processors_test.py runs
everywhere.
"""

import numpy as np
import pytest

from tests.models.images import theirs, toys
from tunix.models.images.folder import read_processor
from tunix.models.images.squares import Gemma3

pytest.importorskip("torchvision")
pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")


def pictures():
  rng = np.random.default_rng(7)
  sizes = [*rng.integers(1, 120, (8, 2)).tolist(), [640, 480]]
  return [toys.picture(*size) for size in sizes]


@pytest.mark.parametrize("config", toys.CONFIGS)
def test_equals_their_pil_backend(config, tmp_path):
  files = toys.CONFIGS[config]
  processor = read_processor(toys.write(tmp_path, files))
  for image in pictures():
    want = theirs.process(files, image)
    if want is None:
      with pytest.raises(ValueError):
        processor(image)
      continue
    found = processor(image)
    (grid,) = found.grid.tolist()
    np.testing.assert_allclose(found.values, want[0], atol=1e-5)
    crops = isinstance(processor, Gemma3)
    assert ([grid[0] * grid[1]] if crops else grid) == list(want[1])
    assert (found.num_tokens, processor.text(grid)) == want[2:]


def test_files_that_they_save_are_read(tmp_path):
  for files in toys.CONFIGS.values():
    _, processor = theirs.image_processor(files, "pil")
    folder = toys.write(tmp_path, files)
    before = read_processor(folder)
    processor.save_pretrained(folder)
    assert read_processor(folder) == before
