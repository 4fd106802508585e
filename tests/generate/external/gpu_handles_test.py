"""Weights of vLLM in a GPU's memory: torch and the GPUs are imitations."""

import base64
import pickle
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests import toys
from tests.generate import vllm_sampler_test as vllm
from tunix.generate.external import gpu_handles
from tunix.models import families, lora, safetensors_saver
from tunix.models.files.tensor_files import NewTensor

PATHS = (
  *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
  *("/finish_weight_update", "/reset_prefix_cache"),
)


class Tensor:
  """A tensor of the imitation, with the GPU that it is on."""

  def __init__(self, array, dtype=None, device="cpu"):
    self.array, self.dtype, self.device = array, dtype or array.dtype.name, device

  def view(self, dtype):
    return Tensor(self.array, dtype, self.device)

  def to(self, device):
    return Tensor(self.array, self.dtype, device)


def fake_torch(gpus=2) -> Any:
  def opened_by(tensor):
    return None, (tensor.array, tensor.dtype, tensor.device)

  cuda = types.SimpleNamespace(
    is_available=lambda: gpus > 0,
    device_count=lambda: gpus,
    get_device_properties=lambda n: types.SimpleNamespace(uuid=f"GPU-{n}"),
    synchronize=lambda: None,
    ipc_collect=lambda: None,
  )
  reductions = types.SimpleNamespace(reduce_tensor=opened_by)
  return types.SimpleNamespace(
    cuda=cuda,
    bfloat16="bfloat16",
    from_numpy=Tensor,
    multiprocessing=types.SimpleNamespace(reductions=reductions),
  )


def handles(update):
  return pickle.loads(base64.b64decode(update["ipc_handles_pickled"]))


def test_parts_are_bounded_and_name_every_gpu():
  rng, drawn = np.random.default_rng(0), {}
  for name, size, dtype in (("a", 8, "float32"), ("b", 90, "bfloat16"), ("c", 4, None)):
    drawn[name] = rng.standard_normal(size).astype(jnp.dtype(dtype or "float32"))
  tensors = [
    NewTensor(name, x.dtype, x.shape, lambda x=x: x) for name, x in drawn.items()
  ]
  updates = list(gpu_handles.parts(tensors, fake_torch(), part_bytes=64))
  assert [update["names"] for update in updates] == [["a"], ["b"], ["c"]]
  assert updates[1]["dtype_names"] == ["bfloat16"] and updates[1]["shapes"] == [[90]]
  [by_gpu] = handles(updates[1])
  assert set(by_gpu) == {"GPU-0", "GPU-1"}
  array, dtype, device = by_gpu["GPU-1"]
  assert (dtype, device) == ("bfloat16", "cuda:1")
  np.testing.assert_array_equal(array.view(jnp.bfloat16), drawn["b"])
  whole = list(gpu_handles.parts(tensors, fake_torch(1), part_bytes=10**6))
  assert [update["names"] for update in whole] == [["a", "b", "c"]]


def test_a_server_gets_the_merged_weights_in_memory(monkeypatch):
  monkeypatch.setattr(gpu_handles.optional, "require", lambda *_: fake_torch(1))
  model = lora.apply(toys.model(), lora.LoraConfig(rank=2))
  answers: dict[str, Any] = {path: {} for path in PATHS}
  with vllm.engine(vllm.choice([1]), **answers) as server:
    sampler = vllm.sampler_of(server, weights="ipc")
    sampler.update_weights(model)
    assert [path for path, _ in server.asked if path in PATHS] == [*PATHS]
    [body] = server.bodies("/update_weights")
  update = body["update_info"]
  family = families.of_config(model.config)
  want = list(safetensors_saver.new_tensors(model, family, None, []))
  assert update["names"] == [tensor.name for tensor in want]
  for tensor, by_gpu in zip(want, handles(update), strict=True):
    np.testing.assert_array_equal(by_gpu["GPU-0"][0], tensor.read())


def test_what_is_refused(monkeypatch):
  with vllm.engine() as server, pytest.raises(ValueError, match="weights is 'usb'"):
    vllm.sampler_of(server, weights="usb")
  monkeypatch.setattr(gpu_handles.optional, "require", lambda *_: fake_torch(0))
  with vllm.engine() as server, pytest.raises(ValueError, match="torch sees no GPU"):
    vllm.sampler_of(server, weights="ipc")
  monkeypatch.setattr(gpu_handles.optional, "require", lambda *_: fake_torch(1))
  with vllm.engine() as server:
    sampler = vllm.sampler_of(server, weights="ipc")
    with pytest.raises(ValueError, match=r"no /init_weight.*weight-transfer-config"):
      sampler.update_weights(toys.model())
