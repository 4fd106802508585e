"""The test world: CPU, as eight devices, set before anything imports jax."""

import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()


@pytest.fixture(scope="session")
def mesh_fsdp8():
  from tunix.utils import mesh

  return mesh.create_mesh({"fsdp": 8})


@pytest.fixture(scope="session")
def mesh_fsdp4_tp2():
  from tunix.utils import mesh

  return mesh.create_mesh({"fsdp": 4, "tp": 2})
