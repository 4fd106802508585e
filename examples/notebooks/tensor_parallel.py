# %% [markdown]
# # FSDP and tensor parallelism
# An MLP and a small transformer of one's own on eight devices. Their code, and that of
# the training, is the same on every mesh: what differs is along which axis a dimension
# is cut, what a device holds, and what the devices say to each other. Where there is
# only a CPU, it is seen as eight devices. It takes `pip install 'tunix[notebooks]'`.
#
# Most cells are quoted from `examples/tensor_parallel.py`, which prints the same
# tables.

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
# `x [B, D]`, `w1 [D, F]`, `w2 [F, D]`, all cut over the axis `tp`. Columns of the first
# matrix and rows of the second: what lies between the two never leaves its device.

# %% quote tensor_parallel: mlp_of_each_device mlp_by_hand collectives

# %%
mesh = create_mesh({"tp": 8})
keys = jax.random.split(jax.random.key(0), 3)
shapes = (16, 64), (64, 256), (256, 64)
arrays = [jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=True)]
forward = jax.jit(mlp_by_hand(mesh))
backward = jax.jit(jax.grad(lambda *a: jnp.sum(forward(*a) ** 2), argnums=(0, 1, 2)))
for name, function in {"forward": forward, "and backward": backward}.items():
  said = collectives(function.lower(*arrays).compile().as_text())
  print(f"{name:13} {dict(sorted(said.items()))}")
x, w1, w2 = arrays
print("off by", np.max(np.abs(forward(x, w1, w2) - np.maximum(x @ w1, 0) @ w2)))

# %% [markdown]
# Backwards each collective turns into the other: a gather's gradient is a scattered
# sum.
#
# ## Five meshes
# Nobody has to write that. A parameter says along which axes it is cut, and XLA finds
# out what has to be said. These are the ways to cut that are compared:

# %% quote tensor_parallel: Layout LAYOUTS

# %% [markdown]
# ## The models

# %% quote tensor_parallel: weight MLP

# %% quote tensor_parallel: Block Transformer

# %% [markdown]
# ## Two tasks
# A parabola with some noise, and tokens that count up. A batch may be any tree of
# arrays when the loss says how to read it.

# %% quote tensor_parallel: parabola squared_error counting next_token TASKS

# %% [markdown]
# ## The training
# `lower_train_step` gives the compiled step without running it: its text has the
# collectives.

# %% quote tensor_parallel: bytes_on_a_device run

# %%
STEPS = 100
runs = {}
for task in TASKS:
  print(f"{task:14} {'loss':>16} {'bytes/device':>13}  collectives of a step")
  for name, layout in LAYOUTS.items():
    out = runs[task, name] = run(task, layout, STEPS)
    said = ", ".join(f"{n} {kind}" for kind, n in sorted(out["collectives"].items()))
    losses = f"{out['losses'][0]:.4f} -> {out['losses'][-1]:.4f}"
    print(f"{name:14} {losses:>16} {out['bytes']:13,}  {said or 'none'}")
  print()

# %% [markdown]
# - `data`: gradients are added up, every device holds everything.
# - `fsdp`: weights are gathered where they are used. The MLP, one number in and one
#   out, has no wide stream that could be cut: nothing changes for it.
# - `tensor`: activations are added up, once behind attention and once behind the MLP of
#   each block, forwards and backwards.
# - Both: each gather and each sum goes among fewer devices.
#
# On TPUs and GPUs XLA makes a reduce-scatter of an all-reduce of which each device
# keeps its part; on a CPU it does not. What is added up in the MLP's step under
# `tensor`: the outputs `[32, 1]`, and the squares of three gradients, for their norm.

# %%
for line in runs["mlp", "tensor"]["program"].splitlines():
  if re.search(r" all-reduce(-start)?\(", line) and "transpose" not in line:
    print(line.strip()[:88])

# %% [markdown]
# ## The same losses
# Five curves each, one upon the other; beside them what a device holds.

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
  wanted = runs[task, "one"]["losses"]
  off = max(np.max(np.abs(runs[task, n]["losses"] / wanted - 1)) for n in LAYOUTS)
  print(f"{task:12} largest relative difference of the losses: {off:.0e}")

# %% [markdown]
# ## Where things lie
# A matrix of the last mesh, and its mean of gradients in Adam: the optimizer's state is
# cut as the weights are, without a word.

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
# The fit, by the MLP that lies on eight devices:

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
# ## Forms that no longer hold
# Lines that stand in older texts and fail today, or say something else than they seem
# to. The right form of each is used above.
#
# - `P("x", None, "x")`: an axis can cut one dimension only.
# - `w2 [32, 1]` cut in columns: one column does not divide. Cut in rows, it needs one
#   sum fewer besides.
# - `nnx.Optimizer.update(grads)`: it takes the model as well.
# - Layers in a plain list: `nnx.List`.
# - `.value` of a variable is deprecated: `variable[...]`, or the variable itself.
# - `create_device_mesh` gives an array of devices: `Mesh` makes a mesh of it.
# - `jax.make_mesh` makes Explicit axes, under which XLA finds out nothing by itself:
#   `tunix.utils.mesh.create_mesh`, or `axis_types=(AxisType.Auto, ...)`.
# - Attention without a mask sees the token that it is to foretell: `is_causal=True`.

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
