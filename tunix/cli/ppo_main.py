"""`python -m tunix.cli.ppo_main ...` runs `tunix train --job=ppo ...`."""

import functools
import sys

from tunix.cli.main import train_job

main = functools.partial(train_job, "ppo")

if __name__ == "__main__":
  sys.exit(main())
