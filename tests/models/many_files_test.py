"""Folders of more files than a process may hold open are read a few at a time."""

import contextlib
import os
import resource

import numpy as np
import pytest

from tests import toys
from tunix.data.reading.store import RowStore
from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained

SPARE = 14  # more than the threads that read weights


@contextlib.contextmanager
def few_files():
  """No more than SPARE files can be opened."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = max(map(int, os.listdir("/proc/self/fd")))
  # Descriptors are given from the lowest free one on: close the gaps.
  gaps = [os.open(os.devnull, os.O_RDONLY)]
  while gaps[-1] < most:
    gaps.append(os.open(os.devnull, os.O_RDONLY))
  resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1] + 1 + SPARE, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for gap in gaps:
      os.close(gap)


pytestmark = pytest.mark.skipif(
  not os.path.isdir("/proc/self/fd"), reason="open files are counted by Linux"
)


def test_a_model_and_an_adapter_of_many_files_and_tensors(tmp_path):
  model = toys.model()
  save_pretrained(model, tmp_path / "model", max_shard_bytes=1)
  assert len(list((tmp_path / "model").glob("*.safetensors"))) > SPARE
  adapted = toys.model(lora_rank=2)
  lora.save_adapter(adapted, tmp_path / "adapter")
  tokens = np.arange(1, 5)[None]
  with few_files():
    back = AutoModel.from_pretrained(tmp_path / "model")
    back = lora.load_adapter(back, tmp_path / "adapter")
  np.testing.assert_allclose(
    toys.logits(back, tokens), toys.logits(adapted, tokens), atol=1e-5
  )


def test_a_store_of_many_files(tmp_path, monkeypatch):
  monkeypatch.setattr("tunix.data.reading.store._MAX_MAPPED", 3)
  names = [f"{i:032d}" for i in range(3 * SPARE)]
  with few_files():
    store = RowStore(tmp_path)
    for i, name in enumerate(names):
      store.add({"x": np.array([[i]])}, [name])
    for filled in (store, RowStore(tmp_path)):
      assert filled.take(names, "x")[:, 0].tolist() == list(range(len(names)))
