"""What each test costs: which tests are long, and in which order files run.

`timings.txt` has a line for each test function of KEPT seconds or more: the processor
seconds of its costliest case, those of all its cases, and its id. A function whose
costliest case takes LONG seconds is marked `long`; `make check` leaves it to CI. So is
every test that uses a fixture of its file of SHARED seconds or more (FILE::FIXTURE). CI
begins with the costliest file, so that both of its processes end at the same time.

The seconds include compilation, so they are measured with an empty folder of programs:

  TUNIX_TEST_CACHE=$(mktemp -d) CPU_SECONDS=seconds \
    PYTEST_ADDOPTS="-p tests.cpu_seconds" bash .ci/run
  python -m tests.timings seconds

`slow_tests.txt` is written by hand: costly tests whose kind CI tests by a cheaper one.
"""

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Iterable

LONG = 0.5
SHARED = 4.0
KEPT = 0.1
FILE = pathlib.Path(__file__).with_name("timings.txt")
SLOW = pathlib.Path(__file__).with_name("slow_tests.txt")


@dataclasses.dataclass
class Timing:
  """Processor seconds of a test function: its costliest case, and all its cases."""

  most: float = 0.0
  total: float = 0.0


def function_of(test_id: str) -> str:
  """Returns the id of a test without its case."""
  return test_id.partition("[")[0]


def is_long(test_id: str, fixtures: Iterable[str], timings: dict[str, Timing]) -> bool:
  """Returns True if a test, or a fixture that it shares with its file, takes long."""
  file, none = test_id.partition("::")[0], Timing()
  shared = [timings.get(f"{file}::{name}", none).most for name in fixtures]
  own = timings.get(function_of(test_id), none).most
  return own >= LONG or max(shared, default=0.0) >= SHARED


def read(file: pathlib.Path = FILE) -> dict[str, Timing]:
  """Returns the timings by the id of the function."""
  lines = [line.split(" ", 2) for line in file.read_text().splitlines()]
  return {name: Timing(float(most), float(total)) for most, total, name in lines}


def by_file(timings: dict[str, Timing]) -> collections.Counter:
  """Returns the seconds of each test file."""
  seconds: collections.Counter = collections.Counter()
  for name, timing in timings.items():
    seconds[name.partition("::")[0]] += timing.total
  return seconds


def summed(lines: Iterable[str]) -> dict[str, Timing]:
  """Returns the timings of the lines that `tests.cpu_seconds` writes."""
  timings: dict[str, Timing] = collections.defaultdict(Timing)
  for line in lines:
    spent, name = line.rstrip("\n").split(" ", 1)
    timing = timings[function_of(name)]
    timing.most = max(timing.most, float(spent))
    timing.total += float(spent)
  return timings


def main() -> None:
  timings = summed(pathlib.Path(sys.argv[1]).read_text().splitlines())
  kept = {name: x for name, x in sorted(timings.items()) if x.most >= KEPT}
  FILE.write_text("".join(f"{x.most:.1f} {x.total:.1f} {n}\n" for n, x in kept.items()))
  long = sum(x.most >= LONG for x in kept.values())
  print(f"{len(kept)} functions, of which {long} are long: {FILE}")


if __name__ == "__main__":
  main()
