"""Odd models of images and text against the installed transformers, both ways.

Runs where the `parity` extra is installed; vision_models_test.py runs everywhere.
"""

import importlib.util

import pytest

from tests.models import checkpoints
from tests.models.vision import seeing
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def make_vision_models():
  path = checkpoints.GOLDEN / "make_vision_models.py"
  spec = importlib.util.spec_from_file_location("make_vision_models", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


make = make_vision_models()


@pytest.mark.parametrize("name", make.ODD)
def test_odd_models_and_what_we_save(name, tmp_path):
  want = make.make(make.ODD[name], tmp_path / "theirs")
  model = AutoModel.from_pretrained(tmp_path / "theirs", dtype="float32", images=True)
  seeing.assert_equal(model, want)
  save_pretrained(model, tmp_path / "ours", source=tmp_path / "theirs")
  kind = getattr(make.transformers, f"{make.ODD[name][0]}ForConditionalGeneration")
  theirs, info = kind.from_pretrained(
    tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
  )
  assert not info["missing_keys"] and not info["unexpected_keys"]
  again = make.expected(theirs.eval())
  assert checkpoints.relative(again["logits"], want["logits"]) < 1e-6
