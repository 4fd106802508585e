"""`python -m tunix.cli.distill_main ...` runs `tunix train --job=distill ...`."""

import functools
import sys

from tunix.cli.main import train_job

main = functools.partial(train_job, "distill")

if __name__ == "__main__":
  sys.exit(main())
