"""Data parallel training, from a sum of two arrays to a trainer, with exercises.

    python examples/data_parallel.py            # eight simulated devices on a CPU
    python examples/data_parallel.py --steps 5  # seconds

Two ways to write it. `jax.jit` with arrays that are split: the program is that of one
device, and XLA finds out what devices must say to each other. `jax.shard_map`: the
program is that of each device with its part, and says so itself (`psum`, `pmean`). Both
replace `jax.pmap`, whose programs have the devices as a dimension of every array.
PeftTrainer goes the first way. The exercises are at the end, with their solutions.
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
  # A Mesh is devices with names for their axes. `mesh_utils.create_device_mesh` makes
  # the array of devices alone: it has no names, and NamedSharding does not take it.
  return Mesh(np.asarray(jax.devices()), ("data",))


# 1. One operation on every device.


def add(x, y):
  # Printed once, when the function is traced for all devices together, and not once a
  # device: what each of them holds is shown by jax.debug.print inside a shard_map.
  print(f"  tracing add for {x.shape}")
  return x + y


def parallel_add(mesh, x, y):
  """x + y, each device on its rows; any number of rows that the devices divide."""
  x, y = jax.device_put((x, y), NamedSharding(mesh, P("data")))
  return jax.jit(add)(x, y)


# 2. A training step. The model is y = x w + b, the loss a mean over the whole batch.


def new_params():
  return {"w": jnp.zeros((10, 10)), "b": jnp.zeros(10)}


def squared_error(params, x, y):
  return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def step(params, x, y):
  """The step of one device. It is that of eight as well when x and y are split."""
  loss, grads = jax.value_and_grad(squared_error)(params, x, y)
  return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def step_of_each_device(params, x, y):
  """The same on a device's own rows: the mean of the devices' means is the mean of all,
  as long as they have equally many rows."""
  # Each device has parameters of its own from here on. Without that they are known to
  # be equal everywhere, and shard_map adds up their gradients by itself: pmean would
  # find the sum in place of a part.
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
  """Batches of a task that a linear model can learn."""
  rng = np.random.default_rng(0)
  right = rng.normal(size=(10, 10)) / 3
  for _ in range(steps):
    x = rng.normal(size=(rows, 10))
    yield {"x": x.astype(np.float32), "y": (x @ right + 0.5).astype(np.float32)}


def train(one_step, steps):
  """Losses of all steps."""
  params, losses = new_params(), []
  for batch in batches(steps):
    params, loss = one_step(params, batch["x"], batch["y"])
    losses.append(float(loss))
  return losses


# 3. The same by the trainer: no step to write, and checkpoints, metrics and resuming.


class Linear(nnx.Module):
  def __init__(self):
    self.w, self.b = nnx.Param(jnp.zeros((10, 10))), nnx.Param(jnp.zeros(10))

  def __call__(self, x):
    return x @ self.w + self.b


def by_trainer(mesh, steps):
  """Losses of all steps."""
  logger = MetricsLogger()
  config = TrainingConfig(data_sharding_axis=("data",), pbar_description=None)
  with jax.set_mesh(mesh):
    trainer = PeftTrainer(Linear(), optax.sgd(RATE), config, logger)
    trainer.with_loss_fn(lambda model, x, y: jnp.mean((model(x) - y) ** 2))
    trainer.train(batches(steps))
    trainer.close()
  return list(logger.get_metric_history("", "loss", Mode.TRAIN))


# Exercise 1: means of rows, [N, D] -> [N], for any N: three rows on eight devices too.
# Devices hold equally many rows, so rows are added and taken off again.


def row_means(mesh, x):
  padding = -len(x) % mesh.size
  padded = np.pad(x, ((0, padding), (0, 0)))
  means = jax.jit(lambda rows: jnp.mean(rows, axis=-1))
  return means(jax.device_put(padded, NamedSharding(mesh, P("data"))))[: len(x)]


# Exercise 2: the mean of all elements of rows that do not divide. The mean of the
# devices' means would be wrong, for they have different numbers of rows: sum, and
# divide once.


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


# Exercise 3: which rows has each device? In a shard_map, jax.debug.print speaks once a
# device.


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
  print(
    f"x + 1: {total.shape}, of which a device has {total.sharding.shard_shape(x.shape)}"
  )

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
  # Before the first array: where there is only a CPU, it is seen as eight devices.
  jax.config.update("jax_num_cpu_devices", 8)
  main()
