"""Data-parallel training, from a sum of two arrays to a trainer, with exercises.

    python examples/data_parallel.py            # eight simulated devices on a CPU
    python examples/data_parallel.py --steps 5  # seconds

There are two ways to write it. With `jax.jit` and sharded arrays, you write the program
for one device, and XLA inserts the communication. With `jax.shard_map` you write the
program of each device for its shard, with explicit communication (`psum`, `pmean`).
Both replace `jax.pmap`, in which every array has a dimension for the devices.
PeftTrainer uses `jax.jit`. The exercises with solutions are at the end.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

RATE = 1.0


def new_mesh():
  # A Mesh is an array of devices with named axes. `mesh_utils.create_device_mesh`
  # returns only the array, without names; NamedSharding does not take it.
  return Mesh(np.asarray(jax.devices()), ("data",))


# 1. One operation on every device.


def add(x, y):
  # Printed once, when the function is traced for all devices. jax.debug.print inside a
  # shard_map prints once for each device.
  print(f"  tracing add for {x.shape}")
  return x + y


def parallel_add(mesh, x, y):
  """Returns x + y; each device adds its rows. The devices must divide the rows."""
  x, y = jax.device_put((x, y), NamedSharding(mesh, P("data")))
  return jax.jit(add)(x, y)


# 2. A training step. The model is y = x w + b, the loss a mean over the whole batch.


def new_params():
  return {"w": jnp.zeros((10, 10)), "b": jnp.zeros(10)}


def squared_error(params, x, y):
  return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def step(params, x, y):
  """Applies one step. The program is for one device; x and y may be sharded."""
  loss, grads = jax.value_and_grad(squared_error)(params, x, y)
  return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def step_of_each_device(params, x, y):
  """Applies one step on the rows of a device.

  The mean of the devices' means is the mean of all rows, because all devices have the
  same number of rows.
  """
  # pcast marks the parameters as different on each device. Otherwise they are
  # replicated, shard_map sums their gradients itself, and pmean would average eight
  # equal sums.
  mine = jax.lax.pcast(params, "data", to="varying")
  loss, grads = jax.value_and_grad(squared_error)(mine, x, y)
  loss, grads = jax.lax.pmean((loss, grads), "data")
  return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def by_jit(mesh):
  whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  return jax.jit(step, in_shardings=(whole, rows, rows), out_shardings=whole)


def by_shard_map(mesh):
  return jax.jit(
    jax.shard_map(
      step_of_each_device,
      mesh=mesh,
      in_specs=(P(), P("data"), P("data")),
      out_specs=P(),
    )
  )


def batches(steps, rows=64):
  """Yields batches of a task that a linear model can learn."""
  rng = np.random.default_rng(0)
  right = rng.normal(size=(10, 10)) / 3
  for _ in range(steps):
    x = rng.normal(size=(rows, 10))
    yield {"x": x.astype(np.float32), "y": (x @ right + 0.5).astype(np.float32)}


def train(one_step, steps):
  """Trains with a step function; returns the losses of all steps."""
  params, losses = new_params(), []
  for batch in batches(steps):
    params, loss = one_step(params, batch["x"], batch["y"])
    losses.append(float(loss))
  return losses


# 3. The same with the trainer, which has the step, checkpoints, metrics and resume.


class Linear(nnx.Module):
  def __init__(self):
    self.w, self.b = nnx.Param(jnp.zeros((10, 10))), nnx.Param(jnp.zeros(10))

  def __call__(self, x):
    return x @ self.w + self.b


def by_trainer(mesh, steps):
  """Trains with the trainer; returns the losses of all steps."""
  logger = MetricsLogger()
  config = TrainingConfig(data_sharding_axis=("data",), pbar_description=None)
  with jax.set_mesh(mesh):
    trainer = PeftTrainer(Linear(), optax.sgd(RATE), config, logger)
    trainer.with_loss_fn(lambda model, x, y: jnp.mean((model(x) - y) ** 2))
    trainer.train(batches(steps))
    trainer.close()
  return list(logger.get_metric_history("", "loss", Mode.TRAIN))


# Exercise 1: means of rows, [N, D] -> [N], for any N, such as three rows on eight
# devices. All devices hold the same number of rows, so rows are added and removed
# again.


def row_means(mesh, x):
  padding = -len(x) % mesh.size
  padded = np.pad(x, ((0, padding), (0, 0)))
  means = jax.jit(lambda rows: jnp.mean(rows, axis=-1))
  return means(jax.device_put(padded, NamedSharding(mesh, P("data"))))[: len(x)]


# Exercise 2: the mean of all elements if the devices do not divide the rows. The mean
# of the devices' means would be wrong, because they have different numbers of rows. Sum
# over the devices, then divide once.


def mean_of_all(mesh, x):
  padding = -len(x) % mesh.size
  weights = np.pad(np.ones(len(x), np.float32), (0, padding))

  def of_a_device(rows, weights):
    total = jax.lax.psum(jnp.sum(rows * weights[:, None]), "data")
    return total / jax.lax.psum(jnp.sum(weights) * rows.shape[1], "data")

  sharded = jax.shard_map(
    of_a_device, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P()
  )
  return jax.jit(sharded)(np.pad(x, ((0, padding), (0, 0))), weights)


# Exercise 3: which rows does each device have? In a shard_map, jax.debug.print prints
# once for each device.


def show_rows(mesh, x):
  def tell(rows):
    index = jax.lax.axis_index("data")
    jax.debug.print("  device {} has rows that begin with {}", index, rows[:, 0])
    return rows

  shown = jax.shard_map(tell, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  return jax.block_until_ready(jax.jit(shown)(x))


def main():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--steps", type=int, default=50)
  args = parser.parse_args()
  mesh = new_mesh()
  print(f"{mesh.size} devices")

  x = np.arange(2 * mesh.size * 5, dtype=np.float32).reshape(2 * mesh.size, 5)
  total = parallel_add(mesh, x, np.ones_like(x))
  print(f"x + 1: {total.shape}, on each device {total.sharding.shard_shape(x.shape)}")

  runs = {
    "one device": train(jax.jit(step), args.steps),
    "jit": train(by_jit(mesh), args.steps),
    "shard_map": train(by_shard_map(mesh), args.steps),
    "PeftTrainer": by_trainer(mesh, args.steps),
  }
  for name, losses in runs.items():
    print(f"{name:12} loss {losses[0]:.5f} -> {losses[-1]:.5f}")

  three = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
  print(f"exercise 1: {row_means(mesh, three)}")
  print(f"exercise 2: {mean_of_all(mesh, three)}")
  print("exercise 3:")
  show_rows(mesh, x)


if __name__ == "__main__":
  # Before the first array. A machine with only a CPU simulates eight devices.
  jax.config.update("jax_num_cpu_devices", 8)
  main()
