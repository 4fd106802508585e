"""A pytest plugin that writes what each test costs, for `tests.timings`.

  CPU_SECONDS=FILE python -m pytest -p tests.cpu_seconds ...

A line is a number of seconds of processor time, with that of ended child processes and
of ended forks (tests/forks.py), and the test's id. Other work on the machine changes
them less than it changes durations.
"""

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests import forks


def _now() -> float:
  spent = os.times()
  # Of this process and of its children, in user and system mode.
  return sum(spent[:4]) + forks.spent()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
  began = _now()
  yield
  with pathlib.Path(os.environ["CPU_SECONDS"]).open("a") as file:
    file.write(f"{_now() - began:.2f} {item.nodeid}\n")
