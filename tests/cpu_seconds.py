"""A pytest plugin that writes what each test costs, for `tests.timings`.

  CPU_SECONDS=FILE python -m pytest -p tests.cpu_seconds ...

A line is a number of seconds of processor time, with that of ended child processes and
of ended forks (tests/forks.py), and the test's id. Other work on the machine changes
them less than it changes durations. A fixture that the tests of a file share has a line
of its own, FILE::FIXTURE, because the test that happens to be the first would have its
seconds otherwise.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests import forks


def _now() -> float:
  spent = os.times()
  # Of this process and of its children, in user and system mode.
  return sum(spent[:4]) + forks.spent()


_shared = 0.0  # seconds of the shared fixtures that the current test has set up


def _write(seconds: float, name: str) -> None:
  with pathlib.Path(os.environ["CPU_SECONDS"]).open("a") as file:
    file.write(f"{seconds:.2f} {name}\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
  global _shared
  began, _shared = _now(), 0.0
  yield
  _write(_now() - began - _shared, item.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(
  fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[None]:
  global _shared
  began, before = _now(), _shared
  yield
  if fixturedef.scope == "module":
    spent = _now() - began
    _shared = before + spent
    _write(spent, f"{request.node.nodeid}::{fixturedef.argname}")
