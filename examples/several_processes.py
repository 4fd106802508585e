"""One training in several processes, as on several hosts, by plain jax.distributed.

    python examples/several_processes.py HOST:PORT 2 0 --output out   # on one host
    python examples/several_processes.py HOST:PORT 2 1 --output out   # on the other

`auto` instead of the three arguments reads them from the environment (Slurm, Open MPI,
GKE, TPU VMs). On one machine use `localhost:PORT` and XLA_FLAGS=
--xla_force_host_platform_device_count=4. Each process reads its shard of the data. All
processes train one model and save together; the first one writes the log.
"""

import argparse
import pathlib

import jax
import optax
from grain_data import loader
from rl_loop import new_model

from tunix.sft import launch
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.utils.mesh import create_mesh

RECORDS = [{"text": f"{a}{b}=", "label": 0} for a in range(10) for b in range(10)] * 4


def gen_model_input_fn(batch):
  """Returns the arguments of the default loss, which refuses unknown columns."""
  return {name: batch[name] for name in ("input_tokens", "input_mask")}


def train(output, steps):
  """Trains; returns the losses of all steps, which are the same in every process."""
  count = jax.device_count()  # over all processes
  width = 2 if count % 2 == 0 else 1
  with jax.set_mesh(create_mesh({"fsdp": count // width, "tp": width})):
    logger = MetricsLogger(MetricsLoggerOptions(output / "logs"))
    config = TrainingConfig(
      max_steps=steps,
      data_sharding_axis=("fsdp",),
      checkpoint_root_directory=str(output / "checkpoints"),
      checkpointing_options=CheckpointOptions(save_every_n_steps=4),
      pbar_description=None,
    )
    trainer = PeftTrainer(new_model(seed=0), optax.adam(2e-3), config, logger)
    trainer.with_gen_model_input_fn(gen_model_input_fn)
    # The rows of all processes together are a batch of 16. Saving is collective: every
    # process calls it, so there is no `if process_index() == 0` and no barrier.
    trainer.train(loader(RECORDS, 16 // jax.process_count(), None))
    trainer.close()
  return logger.get_metric_history("", "loss", Mode.TRAIN)


def main():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("coordinator")
  parser.add_argument("processes", type=int, nargs="?")
  parser.add_argument("process", type=int, nargs="?")
  parser.add_argument("--output", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=8)
  args = parser.parse_args()
  coordinator = None if args.coordinator == "auto" else args.coordinator
  launch.initialize(coordinator, args.processes, args.process)  # before JAX is used
  losses = train(args.output, args.steps)
  if jax.process_index() == 0:
    devices = f"{jax.process_count()} processes, {jax.device_count()} devices"
    print(f"{devices}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
  print("done")


if __name__ == "__main__":
  main()
