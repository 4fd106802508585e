"""The committed golden folders, and copies of them to break."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors import numpy as st

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
NAMES = tuple(sorted(path.parent.name for path in GOLDEN.glob("*/adapter")))


def some_as_shipped(*shipped):
  """All names; `shipped` ones run with the programs of users, see tests/world.py."""
  return [
    pytest.param(n, marks=pytest.mark.shipped) if n in shipped else n for n in NAMES
  ]


def expected(name):
  """tokens, mask, logits and adapted logits, see golden/make_models.py."""
  with np.load(GOLDEN / name / "expected.npz") as arrays:
    return dict(arrays)


def copy(name, folder):
  """A golden folder that may be changed."""
  shutil.copytree(GOLDEN / name, folder)
  return folder


def change_config(folder, **fields):
  """Sets fields of config.json; None removes one."""
  path = folder / "config.json"
  hf = json.loads(path.read_text()) | fields
  path.write_text(json.dumps({k: v for k, v in hf.items() if v is not None}))


def tensors(folder):
  """All tensors, read by the safetensors package."""
  files = sorted(folder.glob("*.safetensors"))
  return {k: v for file in files for k, v in st.load_file(file).items()}


def fuse_experts(values):
  """The tensors with those of all experts of a layer as one, as the hub's files are."""
  holders = {key.split(".experts.")[0] for key in values if ".experts." in key}
  out = {key: value for key, value in values.items() if ".experts." not in key}
  for holder in holders:
    gate, up, down = (
      [values[f"{holder}.experts.{e}.{part}_proj.weight"] for e in range(4)]
      for part in ("gate", "up", "down")
    )
    both = [np.concatenate(pair) for pair in zip(gate, up)]
    out[f"{holder}.experts.gate_up_proj"] = np.stack(both)
    out[f"{holder}.experts.down_proj"] = np.stack(down)
  return out


def rewrite(folder, values):
  """Replaces the weights by one file, written by the safetensors package."""
  for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
    file.unlink()
  st.save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def visible(mask):
  """bool [B, T, T]: causal, without padding."""
  length = mask.shape[1]
  return np.tril(np.ones((length, length), bool))[None] & mask[:, None, :].astype(bool)


def relative(got, want):
  """Norm of the difference over the norm."""
  got, want = np.asarray(got), np.asarray(want)  # by NumPy, which compiles nothing
  return float(np.linalg.norm(got - want) / np.linalg.norm(want))
