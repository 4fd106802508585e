# %% [markdown]
# # 9. One training on many devices
# Ten minutes. What you will learn:
#
# - how the models of tunix are split over a mesh;
# - how many bytes each device needs for a training step, predicted and measured;
# - which collectives each mesh needs;
# - to move a model to another mesh.
#
# The same model, data and trainer run on several meshes; only the mesh changes. A
# machine with only a CPU simulates eight devices. Notebooks 7 and 8 explain data
# parallelism and tensor parallelism.

# %% include install

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before the first array

# %% include start

# %% [markdown]
# ## Sharding of weights
# Matrices are split along `fsdp` and `tp` if a mesh has these axes, rows of a batch
# along all axes but `tp`. A model is created on the mesh, so no device ever holds all
# of it.

# %%
import collections
import re

import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

COUNT = jax.device_count()
MESHES = {
  "dp": {"dp": COUNT},
  "fsdp": {"fsdp": COUNT},
  "fsdp x tp": {"fsdp": COUNT // 2, "tp": 2} if COUNT > 1 else {"fsdp": 1, "tp": 1},
}


def held(model):
  """Returns the bytes of the weights on one device."""
  leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
  return sum(x.addressable_shards[0].data.nbytes for x in leaves)


for name, axes in MESHES.items():
  with jax.set_mesh(create_mesh(axes)):
    model = small_model() if TINY else load()
  kernel = model.layers.mlp.up_proj.kernel[...]
  print(f"{name:10} {kernel.sharding.spec!s:28} {held(model):14,} bytes a device")

# %% [markdown]
# `dp` splits no weight, so every device holds the whole model. The other two split the
# matrices over all devices; only the scales of the norms stay whole.
#
# A matrix of one layer on the last of these meshes:

# %%
layout = NamedSharding(kernel.sharding.mesh, P(*kernel.sharding.spec[1:]))
jax.debug.visualize_sharding(kernel.shape[1:], layout)

# %% [markdown]
# ## The same losses, other collectives
# The step can be compiled without running it. The text of the program has the
# collectives, and its memory plan has the bytes that a device needs: for arguments
# (weights, the two moments of Adam, the batch) and for temporary arrays (gradients,
# activations, gathered weights).
#
# Arithmetic predicts the arguments: Adam in float32 takes 12 bytes for each parameter,
# and `fsdp` and `tp` divide them by the number of devices.

# %%
STEPS = 10
curves = {}
print(f"{'bytes a device':14} {'arguments':>11} {'predicted':>11} {'temporary':>11}")
for name, axes in MESHES.items():
  mesh = create_mesh(axes)
  rows = tuple(axis for axis in axes if axis != "tp")
  data = pipeline.build_dataset(
    records(LEARNT), tokenizer, batch_size=ROWS, max_length=LENGTH, num_epochs=None
  )
  with jax.set_mesh(mesh):
    logger = MetricsLogger()
    config = TrainingConfig(
      max_steps=STEPS, data_sharding_axis=rows, pbar_description=name
    )
    trainer = PeftTrainer(
      small_model() if TINY else load(), optax.adam(1e-3), config, logger
    )
    step = trainer.lower_train_step(next(iter(data))).compile()
    trainer.train(data)
    trainer.close()
  curves[name] = logger.get_metric_history("", "loss", Mode.TRAIN)
  kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
  found = collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", step.as_text()))
  memory, model = step.memory_analysis(), trainer.model
  count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
  predicted = 12 * count // (1 if name == "dp" else COUNT)
  print(
    f"{name:14} {memory.argument_size_in_bytes:11,} {predicted:11,} "
    f"{memory.temp_size_in_bytes:11,}  {dict(sorted(found.items()))}"
  )
off = max(np.abs(curve / curves["dp"] - 1).max() for curve in curves.values())
print(f"largest relative difference of the losses: {off:.0e}")
_, axes = plt.subplots(figsize=(5, 2.4), dpi=80)
for index, (name, curve) in enumerate(curves.items()):
  axes.plot(curve + 0.2 * index, "os^"[index] + "-", label=name)
axes.set(title="each moved up by 0.2", xlabel="step", ylabel="loss")
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The three curves have the same shape, and the printed difference is that of rounding.
# The table shows the price of each mesh, and the prediction is right up to the batch
# and the whole scales of the norms. `dp` needs the most memory and sums all gradients.
# `fsdp` needs an eighth for its arguments, and gathers weights before each use. With
# `tp`, fewer devices take part in each gather, and activations are summed.
#
# Where is the limit? An 8B model in float32 with Adam has 96 GB of such arguments. On
# eight devices, `fsdp` makes 12 GB of it, and a device of 16 GB has 4 GB left for
# temporary arrays. Notebook 7 draws this for more models and devices.

# %% [markdown]
# ## Moving to another mesh
# A model moves shard by shard, bit for bit, for example from training to sampling.

# %%
from tunix.rl.weights.reshard import reshard_model_to_mesh

before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
for count in dict.fromkeys((max(1, COUNT // 2), COUNT)):
  reshard_model_to_mesh(model, create_mesh({"fsdp": count}, jax.devices()[:count]))
  print(f"{count} devices: {held(model):,} bytes each")
after = jax.tree.leaves(nnx.state(model))
all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))

# %% [markdown]
# Half the devices hold twice the bytes each, and the weights arrive unchanged.
#
# ## Try this
# - Add `{"fsdp": COUNT // 4, "tp": 4}` to `MESHES`. Which collectives become more?
# - Give the batch a number of rows that the devices do not divide, such as
#   `batch_size=20`, and read the error.
# - Set `layers=8` in `small_model`. Which of the three columns of bytes grow, and how?
# - Ask `tunix plan` for the bytes of a real model on a TPU that you do not have: see
#   docs/guides/planning.md.
