"""Processes that call a function. Their faults: tests/rl/reward/pool_test.py."""

import threading
import time

import pytest

from tunix.sandbox.child import ChildError, Children


def test_a_wait_ends_if_another_thread_kills_the_process():
  children = Children(time.sleep, timeout_s=3600)
  child = children.start()
  assert child.wait(100) == {"ok": None}
  child.send("x")
  assert child.wait(200)["error"].startswith("TypeError")
  child.send(3600)
  threading.Timer(0.1, children.close).start()
  with pytest.raises(ChildError, match="ended by SIGKILL"):
    child.wait(100)
  assert not children.running
  with pytest.raises(ChildError, match="its process has ended"):
    child.send(0)
