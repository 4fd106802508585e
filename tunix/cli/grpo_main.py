"""`python -m tunix.cli.grpo_main ...` runs `tunix train --job=grpo ...`."""

import functools
import sys

from tunix.cli.main import train_job

main = functools.partial(train_job, "grpo")

if __name__ == "__main__":
  sys.exit(main())
