import importlib.util

import jax
import pytest

from tunix.perf import chips
from tunix.plan import topology


def test_this_machines_devices_as_a_mesh():
  where = topology.find("cpu:8")
  assert where.devices == jax.devices()[:8]
  assert where.chip is None and where.memory_bytes is None
  mesh = where.mesh({"fsdp": -1, "tp": 2})
  assert dict(mesh.shape) == {"fsdp": 4, "tp": 2}


@pytest.mark.parametrize(
  ("name", "error", "match"),
  [
    ("v5e:four", ValueError, "topology is 'v5e:four'; .* v5e:4x4"),
    ("tpu", ValueError, "topology is 'tpu'"),
    ("cpu:0", ValueError, "at least one device"),
    ("cpu:999", RuntimeError, "has 8 CPU devices .*device_count=999"),
    ("v5e:4x4", ImportError, r"pip install 'tunix\[tpu\]'"),
  ],
)
def test_what_cannot_be_compiled_for_is_refused(name, error, match, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(error, match=match):
    topology.find(name)


def test_a_mesh_that_does_not_multiply_out():
  with pytest.raises(ValueError, match="needs 6 devices"):
    topology.find("cpu:8").mesh({"fsdp": 3, "tp": 2})
  with pytest.raises(ValueError, match="needs 6 devices"):
    topology.find("cpu:8").mesh({"fsdp": -1, "tp": 3})


def test_a_mesh_that_cannot_be_laid_over_a_slice(monkeypatch):
  where = topology.find("cpu:8")

  def make_mesh(*args, **options):  # as JAX for fsdp 32 x tp 2 on v5p:4x4x4
    raise NotImplementedError("Failed to find assignment for logical_axis_index 1")

  monkeypatch.setattr(jax, "make_mesh", make_mesh)
  with pytest.raises(ValueError, match="cannot lay over cpu:8"):
    where.mesh({"fsdp": 4, "tp": 2})


def test_every_tpu_says_what_a_plan_asks_for():
  for chip in chips.CHIPS:
    if chip.kind.startswith("TPU"):
      assert chip.memory_bytes and chip.memory_rate and chip.link_rate
