# %% [markdown]
# # 7. Data-parallel training
# Ten minutes. What you will learn:
#
# - why a model needs several devices, and how much memory each of them needs;
# - two ways to write a program for all devices: `jax.jit` and `jax.shard_map`;
# - how the trainer does the same;
# - to solve three exercises on rows that the devices do not divide.
#
# With `jax.jit` and sharded arrays, you write the program for one device and XLA
# inserts the communication. With `jax.shard_map` you write the program of each device
# for its shard, with explicit communication. Both replace `jax.pmap`. A machine with
# only a CPU simulates eight devices. Most cells quote `examples/data_parallel.py`.

# %% include install

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

from tunix.models import automodel
from tunix.models.llama3.model import ModelConfig as Llama
from tunix.models.qwen3.model import ModelConfig as Qwen
from tunix.perf.chips import chip_of
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Why several devices: memory
# Full training with Adam in float32 holds four numbers for each parameter: the weight,
# its gradient and two moments, 16 bytes together. Activations come on top. If each
# block is computed again in the backward pass (`remat`), one input of D numbers for
# each token and block stays, and the logits of all tokens. `of_shapes` makes a model
# without weights, so the number of parameters is exact, also on a laptop:

# %%
GIB = 2**30
CONFIGS = {
  "Qwen3 0.6B": Qwen.qwen3_0p6b(),
  "Llama 3 8B": Llama.llama3_8b(),
  "Llama 3 70B": Llama.llama3_70b(),
}
one_device_mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])


def parameters(config):
  model = automodel.of_shapes(config, one_device_mesh)
  return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def memory(config, count, rows, length=2048, split=1):
  """Returns the GiB that a device needs, by kind.

  Args:
    config: sizes of the model.
    count: its number of parameters.
    rows: rows of the batch on this device.
    length: tokens of a row.
    split: number of devices that share the parameters.
  """
  tokens = rows * length
  return {
    "weights": 4 * count / split / GIB,
    "gradients": 4 * count / split / GIB,
    "moments": 8 * count / split / GIB,
    "activations": 2 * tokens * config.num_layers * config.embed_dim / GIB,
    "logits": 4 * tokens * config.vocab_size / GIB,
  }


ROWS = 8
COUNTS = {name: parameters(config) for name, config in CONFIGS.items()}
print(f"{'GiB, ' + str(ROWS) + ' rows of 2048 tokens':32} total")
for name, config in CONFIGS.items():
  needs = memory(config, COUNTS[name], ROWS)
  print(f"{name:12} {COUNTS[name]:14,} parameters {sum(needs.values()):8.1f}")
  print("   ", ", ".join(f"{kind} {size:.1f}" for kind, size in needs.items()))
for kind in ("TPU v5e", "TPU v6e", "TPU v5p"):
  print(f"{kind} has {chip_of(kind).memory_bytes / GIB:.2f} GiB")

# %% [markdown]
# The 0.6B model needs 19 GiB, half of it for its logits, and fits on one TPU v6e. The
# 8B model needs 120 GiB for its parameters alone, more than any of these chips has, and
# the 70B model more than 1,000 GiB. Which of the numbers does a second device halve?
#
# - **Data parallelism** splits the rows: activations and logits fall. Every device
#   keeps all weights, gradients and moments.
# - **FSDP** splits the rows and the parameters: everything falls. Before each block,
#   the devices gather its weights, which costs communication.

# %%
counts = 2 ** np.arange(10)


def on_each(name, devices, is_fsdp):
  """Returns the GiB that each device needs for 512 rows in all."""
  split = devices if is_fsdp else 1
  needs = memory(CONFIGS[name], COUNTS[name], 512 / devices, split=split)
  return sum(needs.values())


figure, axes = plt.subplots(figsize=(8, 3.4), dpi=80)
for index, name in enumerate(CONFIGS):
  for is_fsdp, style, way in ((False, "--", "data parallel"), (True, "-", "FSDP")):
    curve = [on_each(name, n, is_fsdp) for n in counts]
    axes.loglog(counts, curve, style, color=f"C{index}", label=f"{name}, {way}")
    fits = [n for n, size in zip(counts, curve, strict=True) if size < 80]
    answer = f"from {fits[0]} devices on" if fits else "on no number of devices"
    print(f"{name:12} {way:14} fits in 80 GiB {answer}")
for kind, size in (("TPU v5e", 15.75), ("GPU of 80 GiB", 80)):
  axes.axhline(size, color="gray", linewidth=0.8)
  axes.text(512, size * 1.1, kind, fontsize=8, color="gray", ha="right")
axes.set(xlabel="devices", ylabel="GiB on each device", title="512 rows of 2048 tokens")
axes.set_xticks(counts, counts)
axes.grid(alpha=0.3)
axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
figure.tight_layout()
plt.show()

# %% [markdown]
# The dashed lines become flat where the parameters are all that is left: beyond that,
# more devices do not help data parallelism. The solid lines go on falling. `tunix plan`
# does this computation for a run of yours from its compiled programs, and `tunix plan
# --fit` looks for settings that fit.
#
# The other reason is time: eight devices compute the gradients of eight times as many
# rows in the same time, plus the time of one sum of all gradients.
#
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
# One curve is visible, because all four lie on each other: the ways differ by less than
# the rounding of float32.

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

# %% [markdown]
# ## Try this
# - Set `length` to 8192 in `memory`. Which part grows, and which does not?
# - Adapters of rank 16 train about 1 % of the parameters, and frozen weights can be
#   bfloat16. Change the three lines of `memory`: on how many devices does 8B fit now?
# - Double `RATE`, and the number of rows in `batches`. Do all four ways still agree?
# - Write `step_of_each_device` with `psum` in place of `pmean`.
