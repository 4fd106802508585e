"""Requests to a vLLM server that do not wait: each gives a future.

The server batches what is under way; this keeps it supplied from one thread a request
that is under way, and no more.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tunix.generate.base_sampler import Prompt, SamplerOutput
from tunix.generate.vllm_sampler import VllmSampler
from tunix.utils import checks


class VllmAsyncDriver:
  """Submits prompts one by one to a VllmSampler's server.

  Args:
    sampler: speaks with the server.
    max_inflight: requests under way at once; the others wait their turn here.

  Raises:
    ValueError: `max_inflight` below 1.
  """

  def __init__(self, sampler: VllmSampler, *, max_inflight: int = 64):
    checks.number("max_inflight", max_inflight, checks.COUNT, whole=True)
    self.sampler = sampler
    self._pool = ThreadPoolExecutor(max_inflight, thread_name_prefix="tunix-vllm")

  def submit(
    self, prompt: Prompt, max_generation_steps: int, **options: Any
  ) -> Future[SamplerOutput]:
    """A future of the completion of one prompt.

    Args:
      prompt: text, or token ids.
      max_generation_steps, options: of `VllmSampler.__call__`.

    Returns: a future; its `cancel()` takes back a request that has not begun, its
      `result()` raises what the call raised.

    Raises:
      RuntimeError: the driver is shut down.
    """
    return self._pool.submit(self.sampler, [prompt], max_generation_steps, **options)

  def shutdown(self, *, cancel: bool = False) -> None:
    """Waits for what is under way; `cancel`: what has not begun is taken back."""
    self._pool.shutdown(cancel_futures=cancel)

  def __enter__(self) -> VllmAsyncDriver:
    return self

  def __exit__(self, *_: object) -> None:
    self.shutdown()
