import asyncio
import threading
import time

import pytest

from tunix.rl.env import calls


def ended(running, count, seconds=10.0):
  """Results by id of `count` calls."""
  out, end = {}, time.monotonic() + seconds
  while len(out) < count and time.monotonic() < end:
    out |= dict(running.take(0.05))
  return out


def test_a_coroutine_that_blocks_is_named_and_later_calls_run(monkeypatch):
  monkeypatch.setattr(calls, "MOST_BLOCK_S", 0.3)
  running, wakes = calls.Calls(8, timeout_s=1.5), threading.Event()

  async def blocks():
    wakes.wait(20)

  async def sleeps():
    await asyncio.sleep(0.2)
    return "awake"

  async def answers():
    return "fine"

  try:
    running.start(("step", 1), sleeps)
    time.sleep(0.05)
    running.start(("step", 0), blocks)
    (failed,) = ended(running, 1).items()
    assert failed[0] == ("step", 0)
    assert "blocks the event loop: no await within 0.3 s" in str(failed[1])
    assert "asyncio.to_thread" in str(failed[1])
    # A later call has another loop, so it ends before the one that shares this loop.
    running.start(("step", 2), answers)
    assert ended(running, 1) == {("step", 2): "fine"}
    (other,) = ended(running, 1).values()
    assert "the async method of another environment blocks" in str(other)
  finally:
    wakes.set()


def test_a_loop_that_waits_does_not_block(monkeypatch):
  monkeypatch.setattr(calls, "MOST_BLOCK_S", 0.1)
  running = calls.Calls(8, timeout_s=5)

  async def sleeps():
    await asyncio.sleep(0.5)
    return "awake"

  running.start(("step", 0), sleeps)
  assert ended(running, 1) == {("step", 0): "awake"}


@pytest.mark.parametrize("seconds", [0.3, 0.0])
def test_a_result_that_comes_late_is_handed_over(seconds):
  running, late, done = calls.Calls(8, timeout_s=0.1), [], threading.Event()

  def discard(result):
    late.append(result)
    done.set()

  def slow():
    time.sleep(seconds)
    return "result"

  running.start(("make", 0), slow, discard=discard)
  (result,) = ended(running, 1).values()
  if seconds:
    assert "no answer within 0.1 s" in str(result)
    assert done.wait(5) and late == ["result"]
  else:
    assert result == "result" and not late
