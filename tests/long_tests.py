"""Which tests `make check` leaves to CI, and which ones CI leaves to `make slow`.

`long_tests.txt` lists tests that cost at least SECONDS of processor time, with what
they compile; so the folder of compiled programs is an empty one:

  TUNIX_TEST_CACHE=$(mktemp -d) CPU_SECONDS=seconds python -m pytest -q -n 2 \
    -m "not slow and not engine" -p tests.cpu_seconds
  python -m tests.long_tests seconds

`slow_tests.txt` is written by hand: costly tests whose kind CI tests by a cheaper one.
"""

import pathlib
import sys

SECONDS = 0.5
LONG = pathlib.Path(__file__).with_name("long_tests.txt")
SLOW = pathlib.Path(__file__).with_name("slow_tests.txt")


def listed(file: pathlib.Path) -> set[str]:
  """Ids of the tests in one of the two files."""
  return set(file.read_text().splitlines())


def long_ones(seconds: str) -> list[str]:
  """Ids of the tests that cost at least SECONDS, by the lines of `cpu_seconds`."""
  lines = [line.split(" ", 1) for line in seconds.splitlines()]
  return sorted({name for spent, name in lines if float(spent) >= SECONDS})


def main() -> None:
  slow = listed(SLOW)
  found = long_ones(pathlib.Path(sys.argv[1]).read_text())
  names = [name for name in found if name not in slow]
  LONG.write_text("".join(f"{name}\n" for name in names))
  print(f"{len(names)} tests of {SECONDS} s or more: {LONG}")


if __name__ == "__main__":
  main()
