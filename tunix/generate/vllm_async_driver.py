"""Asynchronous requests to a vLLM server: each request returns a future.

The server batches its running requests. The driver has one thread for each request that
runs, and starts the next request when one ends.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tunix.generate.base_sampler import Prompt, SamplerOutput
from tunix.generate.vllm_sampler import VllmSampler
from tunix.utils import checks


class VllmAsyncDriver:
  """Submits prompts one by one to the server of a VllmSampler.

  Args:
    sampler: sampler of the server.
    max_inflight: largest number of requests that run at once; others wait in this
      process.

  Raises:
    ValueError: `max_inflight` is below 1.
  """

  def __init__(self, sampler: VllmSampler, *, max_inflight: int = 64):
    checks.number("max_inflight", max_inflight, checks.COUNT, whole=True)
    self.sampler = sampler
    self._pool = ThreadPoolExecutor(max_inflight, thread_name_prefix="tunix-vllm")

  def submit(
    self, prompt: Prompt, max_generation_steps: int, **options: Any
  ) -> Future[SamplerOutput]:
    """Submits one prompt and returns the future of its completion.

    Args:
      prompt: text, or token ids.
      max_generation_steps: most tokens to generate.
      **options: options of `VllmSampler.__call__`.

    Returns:
      A future. Its `cancel()` withdraws a request that has not begun; its `result()`
      raises the errors of the call.

    Raises:
      RuntimeError: the driver is shut down.
    """
    return self._pool.submit(self.sampler, [prompt], max_generation_steps, **options)

  def shutdown(self, *, cancel: bool = False) -> None:
    """Waits for the running requests.

    Args:
      cancel: withdraw the requests that have not begun.
    """
    self._pool.shutdown(cancel_futures=cancel)

  def __enter__(self) -> VllmAsyncDriver:
    return self

  def __exit__(self, *_: object) -> None:
    self.shutdown()
