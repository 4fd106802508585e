import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tunix.sft.loop import interrupts
from tunix.sft.loop.interrupts import DeferredSignals, Stopped


@pytest.fixture
def heard():
  """Signals that reach the handlers of before."""
  seen = []
  old = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
  for signum in old:
    signal.signal(signum, lambda number, frame: seen.append(number))
  yield seen
  for signum, handler in old.items():
    signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_and_the_second_acts(heard, signum):
  with pytest.raises(Stopped) as stopped, DeferredSignals() as signals:
    assert signals.pending is None
    os.kill(os.getpid(), signum)
    assert signals.pending == signum and not heard
    os.kill(os.getpid(), signum)
    assert heard == [signum]
    raise Stopped(signum, "answered")
  assert stopped.value.signum == signum
  assert heard == [signum], "an answered signal is not delivered again"
  os.kill(os.getpid(), signum)
  assert heard == [signum, signum], "the old handlers are back"


def test_a_signal_that_nobody_answered_is_delivered_at_the_end(heard):
  with DeferredSignals():
    os.kill(os.getpid(), signal.SIGTERM)
    assert not heard
  assert heard == [signal.SIGTERM]


def test_it_is_delivered_although_the_block_failed(heard):
  with pytest.raises(ValueError, match="unrelated"), DeferredSignals():
    os.kill(os.getpid(), signal.SIGTERM)
    raise ValueError("unrelated")
  assert heard == [signal.SIGTERM]


def test_ctrl_c_becomes_a_keyboard_interrupt_at_the_end():
  done = []
  with pytest.raises(KeyboardInterrupt) as raised, DeferredSignals():
    os.kill(os.getpid(), signal.SIGINT)
    done.append("the rest of the block")
  assert done and type(raised.value) is KeyboardInterrupt


def test_what_is_ignored_stays_ignored(heard):
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with DeferredSignals() as signals:
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.pending is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.pending == signal.SIGTERM
  assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and heard


def test_blocks_inside_each_other(heard):
  with DeferredSignals() as outer:
    with DeferredSignals() as inner:
      os.kill(os.getpid(), signal.SIGINT)
      assert (inner.pending, outer.pending) == (signal.SIGINT, None)
    assert outer.pending == signal.SIGINT and not heard
  assert heard == [signal.SIGINT]


def test_outside_the_main_thread_nothing_is_deferred(heard):
  before = signal.getsignal(signal.SIGINT)
  kept = []

  def work():
    with DeferredSignals() as signals:
      kept.append(signal.getsignal(signal.SIGINT) is before)
      kept.append(signals.pending)

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert kept == [True, None]


def test_a_line_is_written_at_once(capfd):
  with pytest.raises(Stopped), DeferredSignals() as signals:
    os.kill(os.getpid(), signal.SIGINT)
    raise Stopped(signals.pending, "answered")
  assert capfd.readouterr().err == (
    "tunix: stopping after this step; press Ctrl-C again to end now\n"
  )


def closed():
  stream = io.StringIO()
  stream.close()
  return stream


@pytest.mark.parametrize("stderr", [io.StringIO(), None, closed()])
def test_equal_signals_that_python_joins_act_as_two(heard, stderr, monkeypatch):
  monkeypatch.setattr(sys, "stderr", stderr)
  monkeypatch.setattr(interrupts, "_GRACE", 0.02)
  monkeypatch.setattr(os, "_exit", lambda code: None)  # of a machine under load
  with pytest.raises(Stopped), DeferredSignals() as signals:
    os.kill(os.getpid(), signal.SIGINT)
    # A second SIGINT without a call of the handler.
    signals._watcher._writer.send(bytes([signal.SIGINT]))
    deadline = time.monotonic() + 5
    while not heard and time.monotonic() < deadline:
      time.sleep(0.01)
    assert heard == [signal.SIGINT]
    raise Stopped(signals.pending, "answered")


BUSY = """
import hashlib, os, signal
from tunix.sft.loop import interrupts
interrupts._GRACE = 0.1
press = lambda: os.kill(os.getpid(), signal.SIGINT)
with interrupts.DeferredSignals():
  if os.fork() == 0:
    signal.signal(signal.SIGINT, lambda *_: None)
    press(), press(), os._exit(0)
  os.wait()
  print("busy", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes without Python code
"""


def test_signals_are_answered_while_no_python_code_runs():
  """The signals of a forked child are not counted."""
  # Python 3.12 warns about forks of processes with threads.
  command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BUSY]
  program = subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  try:
    assert program.stdout.readline() == "busy\n"
    with pytest.raises(subprocess.TimeoutExpired):  # the child's signals end nothing
      program.wait(0.3)
    program.send_signal(signal.SIGINT)
    assert program.stderr.readline().startswith("tunix: stopping after this step")
    program.send_signal(signal.SIGINT)
    assert program.wait(30) == 130 and not program.stderr.read()
  finally:
    program.kill()
    program.communicate()
