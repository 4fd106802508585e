# %% [markdown]
# # FSDP and tensor parallelism
# A custom MLP and a small transformer on eight devices. The code of the models and the
# training is the same on every mesh. The axes that split each dimension, the bytes on a
# device and the collectives differ. A machine with only a CPU simulates eight devices.
# This notebook needs `pip install 'tunix[notebooks]'`.
#
# Most cells quote `examples/tensor_parallel.py`, which prints the same tables.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before the first array

# %%
import collections
import dataclasses
import re

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.utils.mesh import constrain, create_mesh

print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## One MLP, by hand
# `x [B, D]`, `w1 [D, F]` and `w2 [F, D]` are split over the axis `tp`, the first matrix
# by columns and the second by rows. The activations between the two stay on their
# device.

# %% quote tensor_parallel: mlp_of_each_device mlp_by_hand collectives

# %%
mesh = create_mesh({"tp": 8})
keys = jax.random.split(jax.random.key(0), 3)
shapes = (16, 64), (64, 256), (256, 64)
arrays = [jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=True)]
forward = jax.jit(mlp_by_hand(mesh))
backward = jax.jit(jax.grad(lambda *a: jnp.sum(forward(*a) ** 2), argnums=(0, 1, 2)))
for name, function in {"forward": forward, "and backward": backward}.items():
  found = collectives(function.lower(*arrays).compile().as_text())
  print(f"{name:13} {dict(sorted(found.items()))}")
x, w1, w2 = arrays
print("off by", np.max(np.abs(forward(x, w1, w2) - np.maximum(x @ w1, 0) @ w2)))

# %% [markdown]
# In the backward pass each collective becomes the other one: the gradient of a gather
# is a scattered sum.
#
# ## Five meshes
# You need not write this by hand. A parameter declares the axes that split it, and XLA
# inserts the collectives. The notebook compares these layouts:

# %% quote tensor_parallel: Layout LAYOUTS

# %% [markdown]
# ## The models

# %% quote tensor_parallel: weight MLP

# %% quote tensor_parallel: Block Transformer

# %% [markdown]
# ## Two tasks
# A parabola with noise, and tokens that count up. A batch may be any pytree that the
# loss can read.

# %% quote tensor_parallel: parabola squared_error counting next_token TASKS

# %% [markdown]
# ## The training
# `lower_train_step` compiles the step without running it. The text of the program has
# the collectives.

# %% quote tensor_parallel: bytes_on_a_device run

# %%
STEPS = 100
runs = {}
for task in TASKS:
  print(f"{task:14} {'loss':>16} {'bytes/device':>13}  collectives of a step")
  for name, layout in LAYOUTS.items():
    out = runs[task, name] = run(task, layout, STEPS)
    found = ", ".join(f"{n} {kind}" for kind, n in sorted(out["collectives"].items()))
    losses = f"{out['losses'][0]:.4f} -> {out['losses'][-1]:.4f}"
    print(f"{name:14} {losses:>16} {out['bytes']:13,}  {found or 'none'}")
  print()

# %% [markdown]
# - `data`: gradients are summed; every device holds all weights.
# - `fsdp`: weights are gathered before use. The MLP has one input and one output, so
#   nothing of it can be split.
# - `tensor`: activations are summed, once after attention and once after the MLP of
#   each block, in the forward and the backward pass.
# - Both: each gather and each sum involves fewer devices.
#
# On TPUs and GPUs, XLA replaces an all-reduce by a reduce-scatter if each device keeps
# only its part; on a CPU it does not. The sums in the MLP's step under `tensor` are the
# outputs `[32, 1]`, and the squares of three gradients for their norm.

# %%
for line in runs["mlp", "tensor"]["program"].splitlines():
  if re.search(r" all-reduce(-start)?\(", line) and "transpose" not in line:
    print(line.strip()[:88])

# %% [markdown]
# ## The same losses
# Five curves in each plot lie on each other. The last plot shows the bytes on a device.

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 2.6), dpi=80)
for task, axes in zip(TASKS, panels):
  for name in LAYOUTS:
    axes.plot(runs[task, name]["losses"], label=name)
  axes.set(title=task, xlabel="step", ylabel="loss")
  axes.grid(alpha=0.3)
panels[0].legend(frameon=False, fontsize=8)
held = [runs["transformer", name]["bytes"] / 1024 for name in LAYOUTS]
panels[2].bar(range(len(held)), held)
panels[2].set_xticks(range(len(held)), LAYOUTS, fontsize=8, rotation=30)
panels[2].set(title="transformer", ylabel="KiB on a device")
figure.tight_layout()
plt.show()
for task in TASKS:
  one = runs[task, "one"]["losses"]
  off = max(np.max(np.abs(runs[task, n]["losses"] / one - 1)) for n in LAYOUTS)
  print(f"{task:12} largest relative difference of the losses: {off:.0e}")

# %% [markdown]
# ## Sharding
# A matrix on the last mesh, and the mean of its gradients in Adam: the state of the
# optimizer has the sharding of the weights.

# %%
out = runs["transformer", "fsdp x tensor"]
jax.debug.visualize_array_sharding(out["model"].blocks[0].up[...])
means = {
  jax.tree_util.keystr(path): leaf.sharding.spec
  for path, leaf in jax.tree.leaves_with_path(out["optimizer"].opt_state)
  if "up" in jax.tree_util.keystr(path)
}
means

# %% [markdown]
# The fit of the MLP that is split over eight devices:

# %%
_, axes = plt.subplots(figsize=(5, 2.4), dpi=80)
batch = next(parabola(1, rows=100))
line = np.linspace(-2, 2, 100, dtype=np.float32)[:, None]
axes.scatter(batch["x"], batch["y"], s=6, label="data")
axes.plot(line, runs["mlp", "tensor"]["model"](line), "black", label="model")
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Code that no longer works
# Older tutorials have lines that fail today, or that do not do what they seem to do.
# The cells above use the right form.
#
# - `P("x", None, "x")`: an axis can split only one dimension.
# - `w2 [32, 1]` split in columns: one column cannot be split. Split in rows, it also
#   needs one sum less.
# - `nnx.Optimizer.update(grads)`: `update` also takes the model.
# - Layers in a plain list: use `nnx.List`.
# - `.value` of a variable is deprecated: use `variable[...]`, or the variable.
# - `create_device_mesh` returns an array of devices: `Mesh` makes a mesh of it.
# - `jax.make_mesh` makes Explicit axes, on which XLA chooses no shardings: use
#   `tunix.utils.mesh.create_mesh`, or `axis_types=(AxisType.Auto, ...)`.
# - Attention without a mask sees the token that it predicts: use `is_causal=True`.

# %% quote notebooks/minigpt: attempt


# %%
class Plain(nnx.Module):
  def __init__(self):
    self.layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(0))]


def update():
  model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  optimizer.update(nnx.state(model, nnx.Param))


mesh = create_mesh({"x": 4, "y": 2})
columns = NamedSharding(mesh, P(None, "y"))
devices = mesh_utils.create_device_mesh((4, 2))
attempt("an axis twice", lambda: NamedSharding(mesh, P("x", None, "x")))
attempt("one column in two", lambda: jax.device_put(np.zeros((32, 1)), columns))
attempt("update(grads)", update)
attempt("a plain list", Plain)
attempt("create_device_mesh", lambda: NamedSharding(devices, P("x")))
attempt("Mesh of it", lambda: Mesh(devices, ("x", "y")).axis_names)
attempt("make_mesh", lambda: jax.make_mesh((4, 2), ("x", "y")).axis_types)
