"""The command as several_test starts it."""

import sys

from tunix.cli.main import main

if __name__ == "__main__":
  code = main(sys.argv[1:])
  if code == 0:
    print("done")
  sys.exit(code)
