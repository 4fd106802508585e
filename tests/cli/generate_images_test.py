"""`tunix generate --image` and `tunix parity --image`."""

import json

import numpy as np
import pytest

from tests import toys_images
from tests.cli import runs
from tunix.data.images import ImageReader
from tunix.generate.sampler import Sampler


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return toys_images.folder("smolvlm", tmp_path_factory.mktemp("x") / "smolvlm")


def test_images_stand_before_the_text(folder, tmp_path, capsys):
  picture = toys_images.draw(tmp_path / "a.png", 1)
  words = ["--model", folder, "--chat", "--prompt", "what is it?", "--json"]
  words += ["--max_new_tokens", 4]
  assert runs.tunix("generate", *words, "--image", picture) == 0
  record = json.loads(capsys.readouterr().out)
  model, tokenizer = toys_images.load(folder), toys_images.tokenizer("smolvlm")
  reader = ImageReader(folder, model.config)
  pictures = reader.open([picture], None, "a test")
  text = reader.expand_text(
    pictures, "<|im_start|>user: <image>what is it?<end_of_utterance>\nassistant: "
  )
  prompt = np.asarray(tokenizer.encode(text), np.int32)
  out = Sampler(model, tokenizer)([prompt], 4, images=[reader.prompt(pictures)])
  assert record["prompt"] == "what is it?" and [record["completion"]] == out.text


def test_decoding_and_scoring_see_the_same_images(folder, tmp_path, capsys):
  picture = toys_images.draw(tmp_path / "a.png", 1)
  words = ["parity", folder, "--tokens=4", "--image", picture, "--threshold=1e-5"]
  assert runs.tunix(*words, "--prompt", "what is it?", "and now?") == 0
  assert "8 sampled tokens" in capsys.readouterr().out
  assert runs.tunix(*words) == 2
  assert "--image is given without --prompt" in capsys.readouterr().err


def test_what_is_refused(folder, tmp_path, capsys):
  words = [
    "generate",
    "--model",
    folder,
    "--prompt",
    "a",
    "--image",
    tmp_path / "no.png",
  ]
  assert runs.tunix(*words) == 2
  assert "--image is given without --chat" in capsys.readouterr().err
  assert runs.tunix(*words, "--chat") == 2
  assert "--image: image 1: there is no file" in capsys.readouterr().err
  (tmp_path / "text").mkdir()
  file = folder / "config.json"
  config = {**json.loads(file.read_text()), "model_type": "llama"}
  (tmp_path / "text" / "config.json").write_text(json.dumps(config))
  toys_images.tokenizer("smolvlm").save(tmp_path / "text")
  words[2] = tmp_path / "text"
  assert runs.tunix(*words, "--chat") == 2
  assert (
    "which has no vision tower; expected a model that reads images"
    in capsys.readouterr().err
  )
