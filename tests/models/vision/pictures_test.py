"""From a picture to logits: processor, text, tokens, tower and text model together."""

import re

import jax
import numpy as np
import pytest

from tests.models import checkpoints
from tests.models.images import toys
from tunix.models.automodel import AutoModel
from tunix.models.images.patches import Gemma4, Pixtral, Qwen3VL
from tunix.models.images.squares import Gemma3, SmolVLM
from tunix.models.vision.soft_tokens import check_images

# Golden folder -> processor with its numbers, and the text of a soft token.
MODELS = {
  "gemma3": (Gemma3(size=56, tokens_per_square=4), "<image_soft_token>"),
  "smolvlm": (SmolVLM(tile=24, longest_edge=40, tokens_per_square=4), "<image>"),
  "ministral3": (Pixtral(patch_size=4, longest_edge=24), "[IMG]"),
  "gemma4": (Gemma4(patch_size=4, max_soft_tokens=8), "<|image|>"),
  "qwen3_vl": (
    Qwen3VL(patch_size=4, min_pixels=256, max_pixels=1024),
    "<|image_pad|>",
  ),
}


def tokenize(text, soft):
  """Returns ids of the marks, newlines and letters of a text, and the soft token's."""
  parts = re.findall(r"<[^>]+>|\[[A-Z_]+\]|.", text, re.DOTALL)
  ids = {part: i for i, part in enumerate(dict.fromkeys(parts), 3)}
  return np.array([[{**ids, **soft}[part] for part in parts]], np.int32)


def joined(pixels):
  patches = pixels.values.ndim == 2
  return (pixels.values, pixels.grid) if patches else pixels.values


@pytest.mark.parametrize("name", MODELS)
def test_a_picture_reaches_the_logits(name):
  processor, mark = MODELS[name]
  folder = checkpoints.GOLDEN / f"{name}_vision"
  model = AutoModel.from_pretrained(folder, dtype="float32", images=True)
  soft = model.config.soft_token
  first, second = (processor(toys.picture(20, 33)[::turn]) for turn in (1, -1))
  text = f"a{processor.PLACEHOLDER}b".replace(
    processor.PLACEHOLDER, processor.text(first.grid[0])
  )
  tokens = tokenize(text, {mark: soft})
  before, after = (np.flatnonzero(tokens[0] == soft)[i] for i in (0, -1))
  run = jax.jit(lambda tokens, images: model(tokens, images=images)[0])
  logits, others = (np.asarray(run(tokens, joined(x))) for x in (first, second))

  assert first.num_tokens == (tokens == soft).sum() > 3
  check_images(tokens, first.num_tokens, soft, per_image=1)
  assert np.isfinite(logits).all()
  np.testing.assert_array_equal(logits[:, :before], others[:, :before])
  assert np.abs(logits - others)[:, after + 1 :].max() > 1e-3

  # One soft token more than the picture has is refused before, and NaN within the step.
  tokens[0, 0] = soft
  with pytest.raises(ValueError, match="give one image for each place"):
    check_images(tokens, first.num_tokens, soft, per_image=1)
  assert np.isnan(run(tokens, joined(first))).all()
