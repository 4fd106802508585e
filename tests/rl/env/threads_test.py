"""Threads of the user's code: used again, and never those that hang."""

import asyncio
import contextvars
import threading

import pytest

from tunix.rl.env import threads


def _called(function):
  return asyncio.run(threads.result(function))


def test_a_free_thread_is_used_again():
  idents = {_called(threading.get_ident) for _ in range(20)}
  # A thread is free a moment after its result.
  assert len(idents) < 10


def test_a_thread_that_hangs_is_not_waited_for():
  release, entered = threading.Event(), threading.Event()

  def hang():
    entered.set()
    release.wait(60)

  threads.start(hang)
  assert entered.wait(60)
  assert _called(lambda: 7) == 7
  release.set()


def test_context_variables_do_not_reach_the_next_call():
  seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="none")

  def call():
    before = seen.get()
    seen.set("mine")
    return before

  assert {_called(call) for _ in range(5)} == {"none"}


@pytest.mark.parametrize(
  ("error", "expected"), [(KeyError("k"), KeyError), (StopIteration(), RuntimeError)]
)
def test_what_it_raises_is_raised(error, expected):
  def fail():
    raise error

  with pytest.raises(expected):
    _called(fail)
