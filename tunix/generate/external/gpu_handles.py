"""Weights for a vLLM server on the same GPUs, handed over in their memory.

The form is that of vLLM 0.32's weight transfer `ipc`: names, dtypes and shapes as JSON,
and a pickle of the arguments with which torch opens a tensor of another process, for
each GPU by its UUID. The server opens a pickle of ours, never the other way round.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tunix.models.files.tensor_files import NewTensor
from tunix.utils import optional

PART_BYTES = 256 * 2**20


def torch_on_gpus() -> Any:
  """Returns the module torch.

  Raises:
    ImportError: torch is not installed.
    ValueError: it sees no GPU.
  """
  torch = optional.require("torch", "weights='ipc' of a vLLM server", "torch")
  if not torch.cuda.is_available():
    raise ValueError(
      "weights is 'ipc' and torch sees no GPU; expected the server's. Install a torch "
      "for CUDA, or set weights to 'disk'"
    )
  return torch


def parts(
  tensors: Iterable[NewTensor], torch: Any, part_bytes: int = PART_BYTES
) -> Iterator[dict[str, Any]]:
  """Yields the contents of updates: some tensors each, with handles of their memory.

  The memory of an update is freed when the next one is asked for. The server must have
  read it by then.

  Args:
    tensors: the model's tensors, read one after the other.
    torch: the module.
    part_bytes: bytes of an update; a larger tensor has its own.
  """
  part: list[tuple[NewTensor, list[Any]]] = []
  size = 0
  for tensor in tensors:
    if part and size + tensor.nbytes > part_bytes:
      yield _update(part, torch)
      part, size = [], 0
    part.append((tensor, _on_gpus(tensor.read(), torch)))
    size += tensor.nbytes
  if part:
    yield _update(part, torch)


def _on_gpus(array: np.ndarray, torch: Any) -> list[Any]:
  """Returns a copy of an array on each GPU, as tensors of torch."""
  if array.dtype.name == "bfloat16":  # which torch does not take from NumPy
    tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
  else:
    tensor = torch.from_numpy(array)
  return [tensor.to(f"cuda:{n}") for n in range(torch.cuda.device_count())]


def _update(part: list[tuple[NewTensor, list[Any]]], torch: Any) -> dict[str, Any]:
  def handle(number: int, tensor: Any) -> tuple[str, Any]:
    uuid = torch.cuda.get_device_properties(number).uuid
    _, arguments = torch.multiprocessing.reductions.reduce_tensor(tensor)
    return str(uuid), arguments

  torch.cuda.synchronize()  # the copies are complete before another process reads them
  handles = [dict(handle(*pair) for pair in enumerate(copies)) for _, copies in part]
  return {
    "names": [tensor.name for tensor, _ in part],
    "dtype_names": [tensor.dtype.name for tensor, _ in part],
    "shapes": [list(tensor.shape) for tensor, _ in part],
    "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
  }
