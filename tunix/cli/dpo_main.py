"""`python -m tunix.cli.dpo_main ...` runs `tunix train --job=dpo ...`."""

import functools
import sys

from tunix.cli.main import train_job

main = functools.partial(train_job, "dpo")

if __name__ == "__main__":
  sys.exit(main())
