"""A custom training loop from the parts that the trainers use.

    python examples/by_hand.py --output out           # again: resumes
    python examples/by_hand.py --output out --steps 8 # seconds

`PeftTrainer.train` does all of this, and resumes to the same bytes. A loop of your own
can use its parts: batches on a mesh (`shard_input`), checkpoints, metrics, a profile of
some steps, and the FLOPs and memory of a step.
"""

import time

import jax
import jax.numpy as jnp
import optax
from dpo import arguments
from flax import nnx
from rl_loop import new_model
from sft import batches

from tunix.sft import sharding_utils, utils
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions, Mode
from tunix.sft.profiler import Profiler, ProfilerOptions
from tunix.sft.system_metrics_calculator import (
  approximate_tflops_per_second,
  measure_tflops_per_step,
)
from tunix.utils.mesh import create_mesh


# nnx.jit, because jax.jit would discard the changes of model and optimizer.
@nnx.jit
def train_step(model, optimizer, batch):
  """Applies one update; returns the loss before it, over the answers' tokens."""

  def loss_fn(model):
    tokens, mask = batch["input_tokens"], batch["input_mask"][:, 1:]
    logits, _ = model(tokens[:, :-1])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(nll * mask) / jnp.sum(mask)

  loss, grads = nnx.value_and_grad(loss_fn)(model)
  optimizer.update(model, grads)
  return loss


def run(output, steps):
  """Trains on all devices; returns the step it started from, and the logger."""
  model = new_model(seed=0)  # sharded over the current mesh by its ShardingRules
  optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
  checkpoints = CheckpointManager(
    output / "checkpoints", CheckpointOptions(save_every_n_steps=4, max_to_keep=2)
  )
  first, _ = checkpoints.maybe_restore(model, optimizer)
  logger = MetricsLogger(MetricsLoggerOptions(output / "logs"))
  options = ProfilerOptions(output / "profile", skip_first_n_steps=2, profiler_steps=2)
  # The data follows from a seed, so a resumed run skips the batches of earlier steps.
  data = list(batches(steps, seed=0))[first:]
  with Profiler(first, None, options) as profiler:
    for step, batch in enumerate(data, first + 1):
      batch = sharding_utils.shard_input(batch, ("fsdp",))
      if step == first + 1:
        describe(model, optimizer, batch)
      profiler.maybe_activate(step - 1)
      loss = train_step(model, optimizer, batch)
      profiler.maybe_deactivate(step, wait_for=loss)
      logger.log("", "loss", loss, Mode.TRAIN, step)  # waits for the step
      checkpoints.save(
        step,
        model,
        optimizer,
        force=step == steps,
        custom_metadata={"loss": float(loss)},
      )
  if data:
    print_speed(model, optimizer, batch)
  checkpoints.close()
  logger.close()
  return first, logger


def describe(model, optimizer, batch):
  """Prints the FLOPs of a step and the device memory before the first step."""
  work = measure_tflops_per_step(train_step, model, optimizer, batch)
  print(f"{work * 1e6:.1f} MFLOPs a step")
  utils.show_hbm_usage("before the first step")  # prints on TPUs and GPUs


def print_speed(model, optimizer, batch):
  """Times one more step. JAX is asynchronous, so the clock waits for the result."""
  start = time.perf_counter()
  jax.block_until_ready(train_step(model, optimizer, batch))
  seconds = time.perf_counter() - start
  count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
  speed = approximate_tflops_per_second(count, batch["input_tokens"].size, seconds)
  print(f"{1e3 * seconds:.1f} ms a step, {1e3 * speed:.2f} GFLOP/s")


def main():
  args = arguments()
  with jax.set_mesh(create_mesh({"fsdp": jax.device_count()})):
    first, logger = run(args.output, args.steps)
  if first:
    print(f"resumed after step {first}")
  if first < args.steps:
    losses = logger.get_metric_history("", "loss", Mode.TRAIN)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
  # Before the first array. A machine with only a CPU simulates eight devices.
  jax.config.update("jax_num_cpu_devices", 8)
  main()
