"""Which tests `make check` leaves to CI: those that take long on two cores.

  python -m pytest -q -n 2 --dist loadfile -m "not slow and not engine" \
    --durations=0 > log
  python -m tests.long_tests log
"""

import collections
import pathlib
import re
import sys

SECONDS = 2.0
FILE = pathlib.Path(__file__).with_name("long_tests.txt")
_LINE = re.compile(r"([0-9.]+)s (?:call|setup|teardown) +(.+)")


def listed() -> set[str]:
  """Ids of the long tests."""
  return set(FILE.read_text().splitlines())


def long_ones(log: str) -> list[str]:
  """Ids of the tests that take at least SECONDS, by pytest's report of durations."""
  spent = collections.defaultdict(float)
  for line in log.splitlines():
    if found := _LINE.fullmatch(line.strip()):
      spent[found[2]] += float(found[1])
  return sorted(name for name, seconds in spent.items() if seconds >= SECONDS)


def main() -> None:
  names = long_ones(pathlib.Path(sys.argv[1]).read_text())
  FILE.write_text("".join(f"{name}\n" for name in names))
  print(f"{len(names)} tests of {SECONDS} s or more: {FILE}")


if __name__ == "__main__":
  main()
