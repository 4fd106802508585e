"""`python -m tunix.cli.peft_main ...` runs `tunix train --job=sft ...`."""

import functools
import sys

from tunix.cli.main import train_job

main = functools.partial(train_job, "sft")

if __name__ == "__main__":
  sys.exit(main())
