"""RANK PORT: process 1 never comes back from its data, the other waits for it."""

import sys
import time

from tunix.sft import launch
from tunix.utils import coordination


def main(rank: int, port: str) -> None:
  launch.initialize(f"localhost:{port}", 2, rank, heartbeat_s=10, stall_s=2)
  if rank == 1:
    with coordination.alone("its data"):
      time.sleep(100)
  coordination.gather("what never comes", None)


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2])
