"""What trainer_processes_test runs in each of two processes.

python trainer_programs.py RANK PORT FOLDER
"""

import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from tests import toys
from tests.sft import resume_test, trainers
from tunix.utils import tree
from tunix.utils.mesh import create_mesh


def part(batch, rank):
  """This process's rows of a batch."""
  return {k: v[4 * rank : 4 * rank + 4] for k, v in batch.items()}


def weights(trainer):
  flat = tree.flatten(trainer._module.params)
  return {k: multihost_utils.process_allgather(x, tiled=True) for k, x in flat.items()}


def run(folder, rank, steps, start):
  options = resume_test.CheckpointOptions(save_every_n_steps=None, min_interval_secs=0)
  t = resume_test.make(
    folder, toys.model(), max_steps=steps, checkpointing_options=options
  )
  assert t.train_steps == start, t.train_steps
  data = [part(toys.batch(i), rank) for i in range(4)]
  t.train(data, data[:1])
  out = weights(t)
  t.close()
  return out


def main() -> None:
  rank, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
  with jax.set_mesh(create_mesh({"fsdp": 8})):
    whole = run(folder / "whole", rank, 4, 0)
    run(folder / "cut", rank, 2, 0)
    cut = run(folder / "cut", rank, 4, 2)
  assert trainers.equal(whole, cut)
  if rank == 0:
    files = [(folder / x / "metrics.jsonl").read_bytes() for x in ("whole", "cut")]
    assert files[0] == files[1]
    np.savez(folder / "weights.npz", **whole)
  print("done")


if __name__ == "__main__":
  main()
