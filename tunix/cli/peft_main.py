"""`python -m tunix.cli.peft_main ...`: `tunix train --job=sft ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tunix.cli import main as command


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the job; returns the exit code, as `tunix.cli.main.main`.

  Args:
    argv: arguments of `tunix train`; None: those of the process.
  """
  words = sys.argv[1:] if argv is None else argv
  return command.main(["train", "--job=sft", *words])


if __name__ == "__main__":
  sys.exit(main())
