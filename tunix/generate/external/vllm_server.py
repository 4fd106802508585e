"""A vLLM server as a child process of this one.

vLLM and tunix cannot share an environment, because their dependencies conflict. The
server therefore runs with the Python interpreter of its own environment.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tunix.generate.external.http import Client, Refused
from tunix.generate.external.rows import EngineError
from tunix.utils import env, processes

_TAIL = 2000  # characters of the log that an error quotes


class VllmServer:
  """A vLLM process and its address; as a context manager it ends the process.

  Attributes:
    url: http://127.0.0.1:port.
    log: file with the output of the server.
    process: the running process.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    log: str | os.PathLike[str],
    *,
    python: str = sys.executable,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = 600.0,
  ):
    """Starts the server and returns when it is ready.

    Args:
      folder: Hugging Face folder of the model and its tokenizer.
      log: file for the output of the server.
      python: interpreter of the environment that has vLLM.
      arguments: further arguments of vLLM, such as ["--dtype", "float32"].
      environment: environment variables, added to those of this process, such as
        VLLM_CPU_KVCACHE_SPACE.
      start_timeout_s: longest time in seconds until the server is ready.

    Raises:
      EngineError: the server ended or was not ready in time. The message quotes the
        end of its log.
    """
    port = _free_port()
    self.url = f"http://127.0.0.1:{port}"
    self.log = pathlib.Path(log)
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    self._file: IO[Any] = open(self.log, "wb")  # noqa: SIM115 - open until close
    self.process = subprocess.Popen(
      [*command, *arguments],
      stdin=subprocess.DEVNULL,
      stdout=self._file,
      stderr=subprocess.STDOUT,
      # Only development mode has the paths that `update_weights` calls.
      env=env.inherited({"VLLM_SERVER_DEV_MODE": "1", **(environment or {})}),
      # The server starts an engine process. One process group ends both.
      start_new_session=True,
    )
    try:
      self._wait(start_timeout_s)
    except BaseException:  # also Ctrl-C: the server must end if the start fails
      self.close()
      raise

  def close(self) -> None:
    """Ends the server and its processes."""
    processes.kill_group(self.process)
    self._file.close()

  def __enter__(self) -> VllmServer:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _wait(self, seconds: float) -> None:
    client = Client(self.url, timeout_s=5.0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
      if processes.has_ended(self.process):
        code = processes.kill_group(self.process)
        raise EngineError(
          f"vLLM ended with exit code {code} while it started; its log {self.log} ends "
          f"with:\n{self._tail()}"
        )
      with contextlib.suppress(EngineError, Refused):
        client.ask("GET", "/health")
        return
      time.sleep(0.2)
    raise EngineError(
      f"vLLM was not ready after {seconds:g} s; its log {self.log} ends with:\n"
      f"{self._tail()}"
    )

  def _tail(self) -> str:
    return self.log.read_text(errors="replace")[-_TAIL:]


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]
