"""Weights for a vLLM server on the same GPUs, handed over in their memory.

The form is that of vLLM 0.32's weight transfer `ipc` in its mode `packed`: names,
dtypes, shapes and sizes as JSON, and a pickle of the arguments with which torch opens
the buffer of another process, for each GPU by its UUID. The server unpickles data of
this process. This process unpickles nothing.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tunix.models.files.tensor_files import NewTensor
from tunix.utils import optional

BUFFER_BYTES = 256 * 2**20


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
  tensors: Iterable[NewTensor],
  torch: Any,
  gpus: Sequence[int],
  buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[dict[str, Any]]:
  """Yields the contents of updates, whose tensors are one after the other in a buffer.

  There is one buffer on each GPU. The next update overwrites it: the server must have
  copied its content by then, which it does in the mode `packed`.

  Args:
    tensors: the model's tensors, read one after the other.
    torch: the module.
    gpus: numbers of the GPUs, as torch counts them.
    buffer_bytes: bytes of a buffer; more if a tensor is larger.
  """
  tensors = list(tensors)
  size = max([buffer_bytes, *(tensor.nbytes for tensor in tensors)])
  buffers = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{n}") for n in gpus]
  handles = dict(_handle(torch, *pair) for pair in zip(gpus, buffers))
  part: list[NewTensor] = []
  for tensor in tensors:
    used = sum(one.nbytes for one in part)
    if part and used + tensor.nbytes > size:
      yield _update(part, handles, torch)
      part, used = [], 0
    array = np.ascontiguousarray(tensor.read()).reshape(-1)
    content = torch.from_numpy(array.view(np.uint8))
    for buffer in buffers:
      buffer[used : used + tensor.nbytes].copy_(content)
    part.append(tensor)
  if part:
    yield _update(part, handles, torch)


def _handle(torch: Any, gpu: int, buffer: Any) -> tuple[str, Any]:
  """Returns the UUID of a GPU, and what opens its buffer in another process."""
  uuid = torch.cuda.get_device_properties(gpu).uuid
  return str(uuid), torch.multiprocessing.reductions.reduce_tensor(buffer)[1]


def _update(part: list[NewTensor], handles: dict[str, Any], torch: Any) -> Any:
  torch.cuda.synchronize()  # the copies are complete before another process reads them
  return {
    "names": [tensor.name for tensor in part],
    "dtype_names": [tensor.dtype.name for tensor in part],
    "shapes": [list(tensor.shape) for tensor in part],
    "tensor_sizes": [tensor.nbytes for tensor in part],
    "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
  }
