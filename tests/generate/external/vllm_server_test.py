import os
import stat
import sys

import psutil
import pytest

from tests.generate import fake_engine
from tunix.generate.external.http import Client
from tunix.generate.external.rows import EngineError
from tunix.generate.external.vllm_server import VllmServer


@pytest.fixture
def python(tmp_path):
  """An interpreter that has a vLLM of ours."""
  script = tmp_path / "python"
  script.write_text(
    f'#!/bin/sh\necho "mode $VLLM_SERVER_DEV_MODE extra $EXTRA"\nshift 2\n'
    f'"{sys.executable}" "{fake_engine.__file__}" "$@"\n'
  )
  script.chmod(script.stat().st_mode | stat.S_IEXEC)
  return str(script)


def test_it_is_there_until_it_is_closed(tmp_path, python):
  server = VllmServer(
    "model",
    tmp_path / "log",
    python=python,
    arguments=["--dtype", "float32"],
    environment={"EXTRA": "5"},
  )
  with server:
    assert Client(server.url, 30.0).ask("GET", "/health") == {}
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert family
  _, alive = psutil.wait_procs(family, timeout=60)
  assert not alive
  with pytest.raises(EngineError):
    Client(server.url, 5.0).ask("GET", "/health")
  log = server.log.read_text()
  assert "mode 1 extra 5" in log
  assert "'--model', 'model'" in log and "'--dtype', 'float32'" in log
  assert "EXTRA" not in os.environ


def test_a_server_that_does_not_start_says_why(tmp_path, python):
  with pytest.raises(EngineError, match=r"exit code 1 while.*\n[^$]*no such model"):
    VllmServer("broken", tmp_path / "log", python=python)


def test_a_server_that_is_never_ready_is_ended(tmp_path, python):
  before = {p.pid for p in psutil.Process().children(recursive=True)}
  with pytest.raises(
    EngineError, match=r"not ready after 2 s.*\n[^$]*'--model', 'slow'"
  ):
    VllmServer("slow", tmp_path / "log", python=python, start_timeout_s=2.0)
  after = psutil.Process().children(recursive=True)
  assert not [p for p in after if p.pid not in before and p.is_running()]
