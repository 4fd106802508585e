"""CI runs every test once: the three suites divide the tests by their marks."""

import itertools
import pathlib
import re
import tomllib

from _pytest.mark.expression import Expression

from tests import timings

ROOT = pathlib.Path(__file__).parent.parent
MARKS = ("long", "slow", "ci", "shipped", "engine")


def expressions():
  """The mark expressions of `make test`, `make long` and `make shipped`."""
  options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
  makefile = (ROOT / "Makefile").read_text()
  quick = re.search(r"-m '([^']+)'", options["ini_options"]["addopts"])[1]
  rest = re.search(r"^REST = (.+)$", makefile, re.M)[1]
  shipped = re.search(r'TUNIX_TEST_SETTINGS=.*\\\n.*-m "([^"]+)"', makefile)[1]
  return [Expression.compile(text) for text in (quick, rest, shipped)]


def test_each_test_of_ci_is_in_one_suite():
  for given in itertools.product([False, True], repeat=len(MARKS)):
    marks = dict(zip(MARKS, given))
    chosen = sum(x.evaluate(marks.__getitem__) for x in expressions())
    is_in_ci = not marks["engine"] and (not marks["slow"] or marks["ci"])
    assert chosen == is_in_ci, marks


def test_the_costliest_case_makes_a_function_long():
  lines = ["0.4 a_test.py::test_x[1]", "0.6 a_test.py::test_x[2]", "0.1 b_test.py::y"]
  found = timings.summed(lines)
  assert found["a_test.py::test_x"] == timings.Timing(most=0.6, total=1.0)
  assert timings.by_file(found) == {"a_test.py": 1.0, "b_test.py": 0.1}


def test_who_shares_a_costly_fixture_is_long():
  recorded = {
    "a_test.py::run": timings.Timing(timings.SHARED, timings.SHARED),
    "a_test.py::test_y": timings.Timing(timings.LONG, timings.LONG),
  }
  is_long = lambda *names: timings.is_long(*names, recorded)
  assert is_long("a_test.py::test_x[1]", ("tmp_path", "run"))
  assert not is_long("a_test.py::test_x[1]", ("tmp_path",))
  assert not is_long("b_test.py::test_x[1]", ("run",))
  assert is_long("a_test.py::test_y[1]", ())
