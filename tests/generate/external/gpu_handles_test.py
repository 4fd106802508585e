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
  """Bytes of the imitation, on a GPU or not."""

  def __init__(self, array, device="cpu"):
    self.array, self.device = array, device

  def __getitem__(self, part):
    return Tensor(self.array[part], self.device)

  def copy_(self, other):
    self.array[:] = other.array


def fake_torch(gpus=2) -> Any:
  """Its handles are the buffers themselves; what an update had is kept in `sent`."""
  made = []

  def empty(size, dtype, device):
    assert dtype == "uint8"
    made.append(Tensor(np.zeros(size, np.uint8), device))
    return made[-1]

  cuda = types.SimpleNamespace(
    is_available=lambda: gpus > 0,
    get_device_properties=lambda n: types.SimpleNamespace(uuid=f"GPU-{n}"),
    synchronize=lambda: None,
    ipc_collect=lambda: None,
  )
  reductions = types.SimpleNamespace(
    reduce_tensor=lambda tensor: (None, (tensor.device, made.index(tensor)))
  )
  return types.SimpleNamespace(
    cuda=cuda,
    uint8="uint8",
    empty=empty,
    from_numpy=Tensor,
    multiprocessing=types.SimpleNamespace(reductions=reductions),
    buffers=made,
  )


def opened(update, torch, gpu):
  """The tensors of an update, as a server on a GPU reads them: bytes by name."""
  handles = pickle.loads(base64.b64decode(update["ipc_handles_pickled"]))
  device, number = handles[f"GPU-{gpu}"]
  assert device == f"cuda:{gpu}"
  ends = np.cumsum(update["tensor_sizes"])
  content = torch.buffers[number].array.copy()
  return dict(zip(update["names"], np.split(content, ends)))


def test_parts_are_bounded_and_reach_every_gpu():
  rng, drawn, torch = np.random.default_rng(0), {}, fake_torch()
  for name, size, dtype in (("a", 8, "float32"), ("b", 90, "bfloat16"), ("c", 4, None)):
    drawn[name] = rng.standard_normal(size).astype(jnp.dtype(dtype or "float32"))
  tensors = [
    NewTensor(name, x.dtype, x.shape, lambda x=x: x) for name, x in drawn.items()
  ]
  names = []
  for update in gpu_handles.parts(tensors, torch, (0, 1), buffer_bytes=64):
    names.append(update["names"])
    for gpu in (0, 1):
      for name, content in opened(update, torch, gpu).items():
        np.testing.assert_array_equal(content, drawn[name].view(np.uint8))
    assert update["dtype_names"] == [drawn[name].dtype.name for name in names[-1]]
    assert update["shapes"] == [list(drawn[name].shape) for name in names[-1]]
  assert names == [["a"], ["b"], ["c"]]  # the largest has 180 bytes
  assert [len(buffer.array) for buffer in torch.buffers] == [180, 180]
  whole = list(gpu_handles.parts(tensors, fake_torch(1), (0,), buffer_bytes=10**6))
  assert [update["names"] for update in whole] == [["a", "b", "c"]]


def test_a_server_gets_the_merged_weights_in_memory(monkeypatch):
  torch = fake_torch(1)
  monkeypatch.setattr(gpu_handles.optional, "require", lambda *_: torch)
  model = lora.apply(toys.model(), lora.LoraConfig(rank=2))
  answers: dict[str, Any] = {path: {} for path in PATHS}
  with vllm.engine(vllm.choice([1]), **answers) as server:
    sampler = vllm.sampler_of(server, weights="ipc")
    sampler.update_weights(model)
    assert [path for path, _ in server.asked if path in PATHS] == [*PATHS]
    [begun] = server.bodies("/init_weight_transfer_engine")
    [body] = server.bodies("/update_weights")
  assert begun == {"init_info": {"packed": True}}
  family = families.of_config(model.config)
  want = list(safetensors_saver.new_tensors(model, family, None, []))
  found = opened(body["update_info"], torch, 0)
  assert list(found) == [tensor.name for tensor in want]
  for tensor in want:
    np.testing.assert_array_equal(
      found[tensor.name].view(tensor.dtype), tensor.read().reshape(-1)
    )


def test_what_is_refused(monkeypatch):
  with vllm.engine() as server, pytest.raises(ValueError, match="weights is 'usb'"):
    vllm.sampler_of(server, weights="usb")
  monkeypatch.setattr(gpu_handles.optional, "require", lambda *_: fake_torch(0))
  with vllm.engine() as server, pytest.raises(ValueError, match="torch sees no GPU"):
    vllm.sampler_of(server, weights="ipc")
  monkeypatch.setattr(gpu_handles.optional, "require", lambda *_: fake_torch(1))
  with vllm.engine() as server:
    sampler = vllm.sampler_of(server, weights="ipc")
    with pytest.raises(ValueError, match=r"no /init_weight.*INSECURE.*transfer-config"):
      sampler.update_weights(toys.model())
    with pytest.raises(ValueError, match="Leave weights_dir out"):
      vllm.sampler_of(server, weights="ipc", weights_dir="w")
