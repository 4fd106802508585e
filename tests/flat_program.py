"""Trains a tiny model and prints what the process holds, as JSON: see flat_test.py.

python -m tests.flat_program sft|grpo STEPS FOLDER
"""

import ctypes
import gc
import json
import os
import pathlib
import resource
import sys
from typing import Any

from tests import toys
from tests.rl import clusters
from tests.sft import trainers
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import MetricsLoggerOptions

PAGE = resource.getpagesize()


def held() -> dict[str, int]:
  """Bytes of resident memory, open files and threads of this process."""
  # Otherwise the rhythm of the collector and of malloc decides what is resident.
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)
  statm = pathlib.Path("/proc/self/statm").read_text().split()
  files, threads = (os.listdir(f"/proc/self/{name}") for name in ("fd", "task"))
  return {"rss": int(statm[1]) * PAGE, "files": len(files), "threads": len(threads)}


class Watched:
  """Batches that repeat; `samples` has what was held at every tenth."""

  def __init__(self, batches: list[Any], count: int):
    self.batches, self.count = batches, count
    self.samples: list[dict[str, int]] = []

  def __iter__(self):
    for step in range(self.count):
      if step % max(1, self.count // 150) == 0:
        self.samples.append(held())
        # The next collection looks at newer objects only: those that may grow.
        gc.freeze()
      yield self.batches[step % len(self.batches)]


def options(folder: str, steps: int) -> dict[str, Any]:
  """Checkpoints, evaluations and files of metrics in the rhythm of a long run."""
  return {
    "eval_every_n_steps": max(1, steps // 30),
    "checkpoint_root_directory": f"{folder}/checkpoints",
    "checkpointing_options": CheckpointOptions(
      save_every_n_steps=max(1, steps // 30), max_to_keep=2
    ),
    "metrics_logging_options": MetricsLoggerOptions(f"{folder}/logs"),
  }


def main() -> None:
  job, steps, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
  if job == "sft":
    watched = Watched(toys.batches(8, rows=2, length=8), steps)
    trainer = trainers.trainer(toys.model(num_layers=1), **options(folder, steps))
    result = trainer.train(watched, toys.batches(1, rows=2, length=8))
  else:
    watched = Watched(clusters.prompts(8, size=2), steps)
    learner = clusters.grpo(**options(folder, steps))
    result = learner.train(watched, clusters.prompts(1, size=2))
  print(json.dumps({"steps": result.steps, "samples": watched.samples}))


if __name__ == "__main__":
  main()
