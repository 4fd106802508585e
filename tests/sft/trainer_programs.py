"""What trainer_processes_test runs in each of two processes.

python trainer_programs.py RANK PORT FOLDER
"""

import os
import pathlib
import resource
import signal
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from tests import toys
from tests.sft import resume_test, trainers
from tunix.sft.loop import interrupts
from tunix.utils import coordination, tree
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


class Stopping:
  """A hook that sends SIGTERM to one process, after its second step."""

  def on_train_step_end(self, trainer, step, loss):
    if step == 2 and jax.process_index() == 1:
      os.kill(os.getpid(), signal.SIGTERM)


def a_signal_at_one_process_stops_all_after_the_same_step(folder, rank):
  data = [part(toys.batch(i), rank) for i in range(12)]
  whole = resume_test.make(folder / "whole12", toys.model(), max_steps=12)
  whole.train(data)
  t = resume_test.make(folder / "stopped", toys.model(), max_steps=12)
  try:
    t.with_training_hooks(Stopping()).train(data)
  except interrupts.Stopped as stopped:
    assert stopped.signum == signal.SIGTERM and t.train_steps == 6, t.train_steps
  else:
    raise AssertionError("it was not stopped")
  t.close()
  again = resume_test.make(folder / "stopped", toys.model(), max_steps=12)
  assert again.train_steps == 6
  again.train(data)
  assert trainers.equal(weights(whole), weights(again))
  whole.close()
  again.close()
  if rank == 0:
    names = ("whole12", "stopped")
    files = [(folder / name / "metrics.jsonl").read_bytes() for name in names]
    assert files[0] == files[1]


def a_save_of_one_process_is_named(folder, rank):
  options = resume_test.CheckpointOptions(save_every_n_steps=100, timeout_secs=1)
  t = resume_test.make(
    folder / "lonely", toys.model(), max_steps=2, checkpointing_options=options
  )
  t.train_step(part(toys.batch(0), rank))
  if rank == 0:
    try:
      t.save_checkpoint()
    except coordination.AbsentError as error:
      assert "checkpoint of step 1: process 1 of 2" in str(error), error
    else:
      raise AssertionError("one process has saved")
  # Nothing is lost: together they can.
  coordination.gather("the lonely save is over", None, 60)
  t.train_step(part(toys.batch(1), rank))
  assert t.save_checkpoint()
  t.close()


def a_full_disk_of_one_is_named(folder, rank):
  """The other is told at once: `timeout_secs` is 10 minutes."""
  make = lambda: resume_test.make(folder / "full", toys.model(), max_steps=3)
  t = make()
  t.train_step(part(toys.batch(0), rank))
  t.close()  # waits until the first checkpoint is complete
  t = make()
  t.train_step(part(toys.batch(1), rank))
  kind = resource.RLIMIT_FSIZE
  before = resource.getrlimit(kind)
  if rank == 1:
    resource.setrlimit(kind, (1024, before[1]))
  begun = time.monotonic()
  try:
    t.save_checkpoint()
    t.close()
  except (OSError, coordination.AbsentError) as error:
    expected = "File too large. Earlier" if rank else "process 1 of 2 failed: File too"
    assert expected in str(error), error
  else:
    raise AssertionError("it was saved")
  assert time.monotonic() - begun < 300
  resource.setrlimit(kind, before)
  coordination.gather("both have failed", None, 60)
  coordination.forget_failure()
  coordination.gather("there is room again", None, 60)
  t = make()
  assert t.train_steps == 1
  t.train_step(part(toys.batch(1), rank))
  t.close()


def main() -> None:
  rank, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
  with jax.set_mesh(create_mesh({"fsdp": 8})):
    whole = run(folder / "whole", rank, 4, 0)
    run(folder / "cut", rank, 2, 0)
    cut = run(folder / "cut", rank, 4, 2)
    assert trainers.equal(whole, cut)
    if rank == 0:
      np.savez(folder / "weights.npz", **whole)
    a_signal_at_one_process_stops_all_after_the_same_step(folder, rank)
    a_full_disk_of_one_is_named(folder, rank)
    # Last: one process saves step 1 alone. A later save of step 1 in this program would
    # read that call of it as its partner.
    a_save_of_one_process_is_named(folder, rank)
  print("done")


if __name__ == "__main__":
  main()
