"""Damaged weight files, by the hundred: loaded within the file, or refused by name.

Seeded. `TUNIX_FUZZ=100000` in the environment runs that many of each kind.
"""

import os
import random

import numpy as np
import pytest

from tests.models import torch_archives
from tunix.models.files import tensor_files
from tunix.models.files.tensor_files import NewTensor

VALUES = {
  "model.embed": np.arange(12, dtype=np.float32).reshape(3, 4),
  "model.turned": np.arange(12, dtype=np.float32).reshape(3, 4).T,
  "model.norm": np.arange(5, dtype=np.float16),
}
COUNT = int(os.environ.get("TUNIX_FUZZ", "400"))
SPLICES = [
  b"",
  b"{",
  b'"',
  b",",
  b"-1",
  b"true",
  b"1e9",
  b"9" * 30,
  b"[" * 3000,
  b'{"":' * 3000,
  b"../",
  b"\\u0000",
  b"\xff\xff\xff\xff",
  b"\0" * 8,
  b"\x80",
  b"cos\nsystem\n",
  b"(lp0\n",
  b"}",
  b"R",
  b"b",
  b"0",
]


def damaged(raw, rng):
  """The bytes with one to three changes."""
  raw = bytearray(raw)
  for _ in range(rng.randint(1, 3)):
    at = rng.randrange(len(raw) + 1)
    to = min(len(raw), at + rng.choice([0, 1, 2, 8, 40]))
    kind = rng.randrange(6)
    if kind == 0 and at < len(raw):
      raw[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and at < len(raw):
      raw[at] = rng.randrange(256)
    elif kind == 2:
      del raw[at : rng.choice([to, len(raw)])]
    elif kind == 3:
      raw[at:to] = rng.choice(SPLICES)
    elif kind == 4:
      raw[at:at] = raw[to : to + rng.choice([1, 8, 60])]
    else:
      raw[at:to] = rng.randbytes(to - at)
  return bytes(raw)


def safetensors(folder):
  tensors = [NewTensor(k, v.dtype, v.shape, lambda v=v: v) for k, v in VALUES.items()]
  tensor_files.write_file(folder / "model.safetensors", tensors)
  return folder / "model.safetensors"


def index(folder):
  tensors = [NewTensor(k, v.dtype, v.shape, lambda v=v: v) for k, v in VALUES.items()]
  tensor_files.write_shards(folder, tensors, 50)
  return folder / tensor_files.INDEX


def torch(folder):
  return torch_archives.write(folder / "pytorch_model.bin", VALUES)


def torch_state(folder):
  """Only the pickle is damaged, so that the archive does not hide it."""
  return torch(folder)


def read_all(folder):
  """Bytes of every tensor; none can claim more than its file holds."""
  for tensor in tensor_files.open_folder(folder).values():
    array = tensor.map()
    assert array.nbytes <= tensor.file.stat().st_size
    assert (array.dtype, array.shape) == (tensor.dtype, tensor.shape)
    array.tobytes()


def outcome(folder):
  try:
    read_all(folder)
  except (ValueError, FileNotFoundError) as error:
    assert str(folder) in str(error) and "\n" not in str(error), error
    assert len(str(error)) < 1000
    return "refused"
  return "read"


@pytest.mark.parametrize("make", [safetensors, index, torch, torch_state])
def test_damaged_files_are_refused_by_name(tmp_path, make):
  file = make(tmp_path)
  good = file.read_bytes()
  read_all(tmp_path)
  rng = random.Random(7)
  outcomes = []
  for _ in range(COUNT):
    if make is torch_state:
      pickled, storages = parts(good)
      torch_archives.archive(file, damaged(pickled, rng), storages)
    else:
      file.write_bytes(damaged(good, rng))
    outcomes.append(outcome(tmp_path))
  # Damage to the tensors' own bytes cannot be seen; most other damage is.
  assert outcomes.count("refused") > COUNT / 3
  assert "read" in outcomes


def parts(good):
  entries, storages = {}, {}
  for i, (key, value) in enumerate(VALUES.items()):
    steps = [step // value.itemsize for step in value.strides]
    kind = torch_archives.KINDS[value.dtype]
    made = torch_archives.tensor(str(i), kind, value.size, 0, value.shape, steps)
    entries[key], storages[str(i)] = made, value.tobytes()
  return torch_archives.state(entries), storages
