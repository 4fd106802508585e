# %% [markdown]
# # Data-parallel training
# From a sum of two arrays to a trainer, on eight devices, with exercises. There are two
# ways to write it. With `jax.jit` and sharded arrays, you write the program for one
# device and XLA inserts the communication. With `jax.shard_map` you write the program
# of each device for its shard, with explicit communication. Both replace `jax.pmap`. A
# machine with only a CPU simulates eight devices. This notebook needs `pip install
# 'tunix[notebooks]'`.
#
# Most cells quote `examples/data_parallel.py`.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before the first array

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## A sum on every device

# %% quote data_parallel: new_mesh add parallel_add

# %%
mesh = new_mesh()
x = np.arange(2 * mesh.size * 5, dtype=np.float32).reshape(2 * mesh.size, 5)
total = parallel_add(mesh, x, np.ones_like(x))
print(
  f"x + 1: {total.shape}, of which a device has {total.sharding.shard_shape(x.shape)}"
)
jax.debug.visualize_array_sharding(total)

# %% [markdown]
# The number of rows may be any multiple of the number of devices. The arrays have no
# dimension for the devices, which `jax.pmap` needs.
#
# ## A training step, in two ways
# The model is `y = x w + b`, replicated on every device; the rows of a batch are split.

# %% quote data_parallel: RATE new_params squared_error batches

# %% [markdown]
# The step of one device. With sharded rows it runs on eight devices:

# %% quote data_parallel: step by_jit

# %% [markdown]
# The step of each device, which averages the gradients explicitly:

# %% quote data_parallel: step_of_each_device by_shard_map

# %% [markdown]
# ## The same with the trainer
# The trainer has the step, and checkpoints, metrics and resume.

# %% quote data_parallel: train Linear by_trainer

# %%
STEPS = 50
losses = {
  "one device": train(jax.jit(step), STEPS),
  "jit": train(by_jit(mesh), STEPS),
  "shard_map": train(by_shard_map(mesh), STEPS),
  "PeftTrainer": by_trainer(mesh, STEPS),
}
for name, curve in losses.items():
  off = np.max(np.abs(np.subtract(curve, losses["one device"])))
  print(f"{name:12} loss {curve[0]:.5f} -> {curve[-1]:.5f}, at most {off:.0e} apart")

# %% quote notebooks/start: plot

# %%
plot("loss", **losses)

# %% [markdown]
# ## Exercise 1: means of rows
# Compute `x.mean(-1)` with rows split over the devices, for any number of rows, such as
# three. Try it before you read on.

# %% quote data_parallel: row_means

# %%
three = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
print(row_means(mesh, three))

# %% [markdown]
# ## Exercise 2: the mean of everything
# The devices need not divide the number of rows. Why is the mean of the devices' means
# wrong?

# %% quote data_parallel: mean_of_all

# %%
print(mean_of_all(mesh, three), three.mean())

# %% [markdown]
# ## Exercise 3: which rows does each device have?

# %% quote data_parallel: show_rows

# %%
shown = show_rows(mesh, x)
jax.effects_barrier()

# %% [markdown]
# ## Code that no longer works
# Older tutorials have lines that fail today, or that do not do what they seem to do.
#
# - `create_device_mesh` returns an array of devices without axis names, and no Mesh.
# - `jax.pmap` needs a dimension for the devices in every argument, also in parameters.
#   `print` in it prints once, during tracing; `jax.debug.print` prints on each device.
# - Both ways refuse rows that the devices do not divide: pad, as in exercise 1.
# - In a `jax.shard_map`, gradients of replicated parameters are already summed over the
#   devices. `pmean` of them is the sum, eight times too large. Call `pcast` first, as
#   in `step_of_each_device`.

# %% quote notebooks/minigpt: attempt


# %%
def gradient_of_each_device(params, x, y):
  return jax.lax.pmean(jax.grad(squared_error)(params, x, y), "data")


def ratio():
  batch = next(batches(1))
  sharded = jax.shard_map(
    gradient_of_each_device,
    mesh=mesh,
    in_specs=(P(), P("data"), P("data")),
    out_specs=P(),
  )
  wrong = jax.jit(sharded)(new_params(), batch["x"], batch["y"])
  right = jax.grad(squared_error)(new_params(), batch["x"], batch["y"])
  return (
    f"{np.linalg.norm(wrong['w']) / np.linalg.norm(right['w']):.2f} of the gradient"
  )


devices = mesh_utils.create_device_mesh((8,))
one_batch = next(batches(1))
attempt("create_device_mesh", lambda: NamedSharding(devices, P()))
attempt("pmap", lambda: jax.pmap(step)(new_params(), one_batch["x"], one_batch["y"]))
attempt("3 rows on 8", lambda: jax.device_put(three, NamedSharding(mesh, P("data"))))
attempt("pmean alone", ratio)
