# %% [markdown]
# # One training on many devices
# The same model, data and trainer run on several meshes. The bytes on each device and
# the collectives differ. A machine with only a CPU simulates eight devices. This
# notebook needs `pip install 'tunix[notebooks]'`.

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
# A matrix of one layer on the last of these meshes:

# %%
layout = NamedSharding(kernel.sharding.mesh, P(*kernel.sharding.spec[1:]))
jax.debug.visualize_sharding(kernel.shape[1:], layout)

# %% [markdown]
# ## The same losses, other collectives
# The step can be compiled without running it. The text of the program has the
# collectives, and its memory plan has the bytes that a device needs.

# %%
STEPS = 10
curves = {}
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
  temporary = step.memory_analysis().temp_size_in_bytes
  print(
    f"{name:10} {temporary:12,} bytes besides the weights;", dict(sorted(found.items()))
  )
off = max(np.abs(curve / curves["dp"] - 1).max() for curve in curves.values())
print(f"largest relative difference of the losses: {off:.0e}")
plot("loss", **{name.replace(" ", "_"): curve for name, curve in curves.items()})

# %% [markdown]
# ## Moving to another mesh
# A model moves shard by shard, bit for bit, for example from training to sampling.

# %%
from tunix.rl.reshard import reshard_model_to_mesh

before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
for count in dict.fromkeys((max(1, COUNT // 2), COUNT)):
  reshard_model_to_mesh(model, create_mesh({"fsdp": count}, jax.devices()[:count]))
  print(f"{count} devices: {held(model):,} bytes each")
after = jax.tree.leaves(nnx.state(model))
all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
