"""Logits of GGUF files against those of transformers and of llama.cpp.

TRANSFORMERS_PYTHON names the Python of an environment with transformers, torch and
gguf, LLAMA_CPP_PYTHON that of one with llama-cpp-python.
"""

import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

from tests.models import checkpoints
from tests.models.gguf import ggufs
from tunix.models.automodel import AutoModel
from tunix.models.gguf import architectures

pytestmark = pytest.mark.slow

# transformers 5.24 has no reader of the other architectures. Its reader leaves out the
# scalars of Gemma 4's layers, and fails with a file of gpt-oss. It ignores the settings
# of Mistral, which has the architecture of Llama.
TRANSFORMERS = (
  *("gemma2", "gemma3", "llama3p1", "llama3p2_tied", "llama_biased", "phi3"),
  *("qwen2", "qwen3", "qwen3_moe"),
)
# llama.cpp looks GELU up in a table of float16.
GELU = 5e-3
TOLERANCE = 1e-5
# llama.cpp chooses Phi's long factors by the size of its cache, at least 256 tokens.
LONG = {
  "original_max_position_embeddings": 512,
  "max_position_embeddings": 2048,
  "rope_parameters": {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 2.0],
    "long_factor": [3.0, 5.0],
    "original_max_position_embeddings": 512,
  },
}
CASES = [
  pytest.param(
    f"{program}_PYTHON",
    name,
    marks=pytest.mark.skipif(
      f"{program}_PYTHON" not in os.environ, reason=f"{program}_PYTHON is unset"
    ),
  )
  for program, names in (("TRANSFORMERS", TRANSFORMERS), ("LLAMA_CPP", ggufs.NAMES))
  for name in names
]


def swapped(hf, arrays):
  """A model whose first two layers are swapped.

  llama.cpp lets a full layer read the keys and values of the last layer that has some.
  """
  first, second, *rest = hf["layer_types"]
  others = {"0": "1", "1": "0"}
  number = re.compile(r"(?<=layers\.)\d+")
  renamed = {
    number.sub(lambda found: others.get(found[0], found[0]), name): array
    for name, array in arrays.items()
  }
  return hf | {"layer_types": [second, first, *rest]}, renamed


@pytest.mark.parametrize(("python", "name"), CASES)
def test_logits(python, name, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  hf, arrays = ggufs.source(name, **(LONG if name == "phi3" else {}))
  if name == "gemma4":
    hf, arrays = swapped(hf, arrays)
  architecture = architectures.of_model_type(hf["model_type"]).name
  more = {f"{architecture}.vocab_size": hf["vocab_size"], "general.name": name}
  file = tmp_path / "model.gguf"
  ggufs.write(file, hf, arrays, **more, **{"tokenizer.ggml.model": "none"})
  (tmp_path / "settings.json").write_text(json.dumps(hf))
  tokens = checkpoints.expected(name)["tokens"]
  np.save(tmp_path / "tokens.npy", tokens)
  program = pathlib.Path(__file__).with_name(
    f"{python.removesuffix('_PYTHON').lower()}_logits.py"
  )
  paths = [tmp_path / x for x in ("tokens.npy", "logits.npy", "settings.json")]
  command = [os.environ[python], program, file, *paths]
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  subprocess.run(command, env=environment, check=True, capture_output=True)
  want = np.load(tmp_path / "logits.npy")
  got = AutoModel.from_pretrained(file, dtype="float32")(tokens)[0]
  rounded = python == "LLAMA_CPP_PYTHON" and name.startswith("gemma")
  assert (
    np.abs(got - want).max() < (GELU if rounded else TOLERANCE) * np.abs(want).max()
  )
