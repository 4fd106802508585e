# %% [markdown]
# # 8. FSDP and tensor parallelism
# Ten minutes. What you will learn:
#
# - the five forward and eight backward steps of a tensor-parallel block;
# - to count the collectives of a compiled step, and to find their place in the model;
# - to read three numbers out of a profile;
# - what five meshes cost and save, also with fewer KV heads than devices;
# - to write an optimizer with a sharded state, and to map logical axes by rules.
#
# The code of the models and the training is the same on every mesh. A machine with only
# a CPU simulates eight devices. Most cells quote `examples/tensor_parallel.py`, which
# prints the same tables. Notebook 7 explains data parallelism.

# %% include install

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before the first array

# %%
import collections
import dataclasses
import pathlib
import re
import tempfile
from typing import NamedTuple

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tunix.perf.hlo_text import COLLECTIVES, Program
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.profiler import ProfilerOptions
from tunix.utils.mesh import constrain, create_mesh

OUTPUT = pathlib.Path(tempfile.mkdtemp())
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## One block, step by step
# The block is `relu(x @ w1) @ w2` with `x [B, D]`, `w1 [D, F]` and `w2 [F, D]`. The
# axis `tp` of n devices splits `w1` by columns and `w2` by rows. Between blocks, it
# splits the columns of `x`. Each step is local, or one collective:
#
# | step | what each device computes | result on a device | collective |
# |---|---|---|---|
# | F1 | gathers the columns of x | x [B, D] | all-gather |
# | F2 | multiplies by its columns of w1 | [B, F/n] | |
# | F3 | applies relu | hidden [B, F/n] | |
# | F4 | multiplies by its rows of w2 | one term of each sum, [B, D] | |
# | F5 | adds the terms, keeps its columns | out [B, D/n] | reduce-scatter |
# | B1 | gathers the gradient of out | dout [B, D] | all-gather |
# | B2 | hidden.T @ dout | dw2 [F/n, D] | |
# | B3 | dout @ w2.T | dhidden [B, F/n] | |
# | B4 | sets dhidden to 0 where relu did | dhidden [B, F/n] | |
# | B5 | gathers x again, unless F1's result was kept | x [B, D] | (all-gather) |
# | B6 | x.T @ dhidden | dw1 [D, F/n] | |
# | B7 | dhidden @ w1.T | one term of each sum, [B, D] | |
# | B8 | adds the terms, keeps its columns | dx [B, D/n] | reduce-scatter |
#
# The hidden units never leave their device. This is why the first matrix is split by
# columns and the second by rows: any other choice needs a collective between them.
#
# The same steps as a program for one device follow. `jax.named_scope` gives every step
# a name, which the compiled program keeps.

# %% quote tensor_parallel: forward_of_each_device step_of_each_device

# %% quote tensor_parallel: mlp_by_hand step_by_hand

# %% [markdown]
# The text of the compiled program confirms the table. `collectives` counts, and
# `senders` also reads the named scope of each collective.

# %% quote tensor_parallel: collectives senders

# %%
mesh = create_mesh({"tp": 8})
keys = jax.random.split(jax.random.key(0), 4)
shapes = (16, 64), (64, 256), (256, 64), (16, 64)
x, w1, w2, gradient = (
  jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=True)
)
forward = jax.jit(mlp_by_hand(mesh))
by_hand = jax.jit(step_by_hand(mesh))


@jax.jit
def by_jax(x, w1, w2, gradient):
  out, backward = jax.vjp(mlp_by_hand(mesh), x, w1, w2)
  return out, *backward(gradient)


programs = {}
for name, function, arguments in (
  ("F1 to F5", forward, (x, w1, w2)),
  ("F1 to B8, by hand", by_hand, (x, w1, w2, gradient)),
  ("F1 to B8, by jax.vjp", by_jax, (x, w1, w2, gradient)),
):
  programs[name] = function.lower(*arguments).compile().as_text()
  print(f"{name:21} {dict(sorted(collectives(programs[name]).items()))}")
for kind, shape, scope in senders(programs["F1 to B8, by hand"]):
  print(f"  {kind:14} {shape:18} {scope.split('/')[2]}")

# %% [markdown]
# The forward pass has one all-gather and one reduce-scatter, and the whole step two of
# each. JAX derives the same backward pass: the transpose of a gather is a scattered
# sum, and the reverse. The results are equal:

# %%
assert collectives(programs["F1 to F5"]) == {"all-gather": 1, "reduce-scatter": 1}
for name in ("F1 to B8, by hand", "F1 to B8, by jax.vjp"):
  assert collectives(programs[name]) == {"all-gather": 2, "reduce-scatter": 2}
one_device = jax.vjp(lambda x, w1, w2: nnx.relu(x @ w1) @ w2, x, w1, w2)
expected = (one_device[0], *one_device[1](gradient))
for function in (by_hand, by_jax):
  for got, want in zip(function(x, w1, w2, gradient), expected, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
print("output and three gradients are those of one device")

# %% [markdown]
# ## Five meshes
# You need not write this by hand. A parameter declares the axes that split it, and XLA
# inserts the collectives. The notebook compares these layouts:

# %% quote tensor_parallel: Layout LAYOUTS

# %% [markdown]
# ## The models
# The transformer has eight query heads and two KV heads, as most models of today have
# fewer KV heads than query heads.

# %% quote tensor_parallel: weight MLP

# %% quote tensor_parallel: Block Transformer

# %% [markdown]
# ## Two tasks
# A parabola with noise, and tokens that count up. A batch may be any pytree that the
# loss can read.

# %% quote tensor_parallel: parabola squared_error counting next_token TASKS

# %% [markdown]
# ## Training and profile
# `lower_train_step` compiles the step without running it. `ProfilerOptions` traces the
# last step of each run. `read_profile` reads three numbers out of the trace:
#
# 1. the **time of the step** on the devices,
# 2. the time that a device spends in **collectives**, which includes the wait for the
#    slowest device,
# 3. the time in all **other operations**, which is the useful work.
#
# What is left of the step is idle time: the device waits for the host.

# %% quote tensor_parallel: StepProfile read_profile covered

# %% quote tensor_parallel: bytes_on_a_device run

# %%
STEPS = 100
runs = {}
for task in TASKS:
  print(f"{task:14} {'loss':>16} {'bytes/device':>13}  collectives of a step")
  for name, layout in LAYOUTS.items():
    out = runs[task, name] = run(task, layout, STEPS, OUTPUT / task / name)
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
# only its part; on a CPU it does not.
#
# The named scopes tell which part of the model sends. `jvp` is the forward pass and
# `transpose` the backward pass:

# %%
for kind, shape, scope in senders(runs["transformer", "tensor"]["program"]):
  parts = re.findall(r"transpose|block\d|attention|mlp|logits|embedding", scope)
  part = " ".join(dict.fromkeys(parts)) or "norm of the gradients"
  print(f"{kind:11} {shape.split('{')[0].lstrip('('):18} {part}")

# %% [markdown]
# Each of the two blocks sums [16, 31, 64] twice forward and twice backward: eight
# all-reduces. The others belong to the KV heads, which the next section explains.
#
# ## The three numbers
# The traces are files that XProf, TensorBoard (`tensorboard --logdir`, plugin `xprof`)
# and ui.perfetto.dev (the `.trace.json.gz`) open.

# %%
files = sorted((OUTPUT / "transformer" / "tensor").rglob("*.*"))
for file in files:
  if file.is_file():
    print(f"{file.stat().st_size:10,} bytes  {''.join(file.suffixes)}")
print(f"\n{'transformer':14} {'step':>9} {'collectives':>12} {'other':>9} {'idle':>9}")
for name in LAYOUTS:
  profile = runs["transformer", name]["profile"]
  idle = profile.step - profile.communication - profile.other
  print(
    f"{name:14} {profile.step:6.1f} ms {profile.communication:9.1f} ms "
    f"{profile.other:6.1f} ms {idle:6.1f} ms"
  )

# %% [markdown]
# Read a profile in this order. If collectives take a large part of the step, use fewer
# devices along `tp`, or larger batches. If idle time does, the host is too slow: look
# at the data. If the other operations do, the devices work, and the layout is good.
#
# Here eight simulated devices share the cores of one processor. A device that waits in
# a collective lets another one compute, so the collectives seem to take nearly all of
# the step. Only the way to read the trace carries over to a TPU or a GPU; these times
# do not.
#
# ## Fewer KV heads than devices
# Two KV heads cannot be split over eight devices, nor over four:

# %%
for name in ("fsdp", "tensor", "fsdp x tensor"):
  block = runs["transformer", name]["model"].blocks[0]
  print(f"{name:14} q {block.q.sharding.spec!s:25} kv {block.kv.sharding.spec}")

# %% [markdown]
# The query heads are split over `tp`, and the KV heads are whole on every device. This
# costs memory and a little work, and no communication in the forward pass. In the
# backward pass, the devices add their parts of the gradient of the shared heads: one
# all-reduce and one all-gather of each block in the list above, of arrays that are
# smaller than an activation. A mesh with `tp` of at most 2 would split both.
#
# ## The same losses
# The five curves are equal, so each is drawn 0.3 above the one before. The second plot
# shows how far the loss of each mesh has been from that of one device: the largest
# relative difference so far.

# %%
figure, panels = plt.subplots(1, 3, figsize=(11, 3), dpi=80)
markers = dict(zip(LAYOUTS, "osv^D", strict=True))
one = runs["transformer", "one"]["losses"]
for index, (name, marker) in enumerate(markers.items()):
  losses = runs["transformer", name]["losses"]
  look = {"marker": marker, "markevery": (2 * index, 10), "color": f"C{index}"}
  panels[0].plot(losses + 0.3 * index, label=name, **look)
  if name != "one":
    off = np.maximum.accumulate(np.abs(losses / one - 1))
    panels[1].semilogy(np.maximum(off, 1e-8), linewidth=0.8, **look)
panels[0].set(title="loss, moved up by 0.3 each", xlabel="step")
panels[1].set(title="largest relative difference so far", xlabel="step")
panels[0].legend(frameon=False, fontsize=8)
held = [runs["transformer", name]["bytes"] / 1024 for name in LAYOUTS]
panels[2].bar(range(len(held)), held, color=[f"C{i}" for i in range(len(held))])
panels[2].set_xticks(range(len(held)), LAYOUTS, fontsize=8, rotation=30)
panels[2].set(title="KiB of weights on a device")
for axes in panels:
  axes.grid(alpha=0.3)
figure.tight_layout()
plt.show()
for task in TASKS:
  one = runs[task, "one"]["losses"]
  off = max(np.max(np.abs(runs[task, n]["losses"] / one - 1)) for n in LAYOUTS)
  print(f"{task:12} largest relative difference of the losses: {off:.0e}")

# %% [markdown]
# All five curves have the same shape. The differences begin at the rounding of float32,
# about 1e-7, because the devices add in another order, and grow slowly with the steps.
# The bars show what the layouts are for: with eight devices, `fsdp` holds an eighth of
# the weights. `tensor` holds more, because the embedding and the KV heads are whole.
#
# ## Sharding of the optimizer
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
# This also holds in an optimizer that you write. SGD with momentum keeps one array for
# each parameter, as an `nnx.Variable` with the parameter's metadata:


# %%
class Momentum(nnx.Variable):
  """The decaying sum of a parameter's gradients."""


class SGD(nnx.Module):
  """SGD with momentum; the momentum has the sharding of its parameter."""

  def __init__(self, model, rate, decay=0.9):
    self.rate, self.decay = rate, decay
    zeros = lambda p: Momentum(jnp.zeros_like(p[...]), **p.get_metadata())
    self.momentum = nnx.data(over_variables(zeros, nnx.state(model, nnx.Param)))

  def update(self, model, gradients):
    def one(parameter, momentum, gradient):
      momentum[...] = self.decay * momentum[...] + gradient[...]
      parameter[...] -= self.rate * momentum[...]

    over_variables(one, nnx.state(model, nnx.Param), self.momentum, gradients)


def over_variables(function, *states):
  return jax.tree.map(function, *states, is_leaf=lambda x: isinstance(x, nnx.Variable))


@nnx.jit  # jax.jit would discard the changes of model and optimizer
def sgd_step(model, optimizer, batch):
  loss, gradients = nnx.value_and_grad(squared_error)(model, **batch)
  optimizer.update(model, gradients)
  return loss


layout = LAYOUTS["tensor"]
with jax.set_mesh(create_mesh(layout.axes)):
  model, mine = MLP(layout, rngs=nnx.Rngs(0)), []
  shardings = nnx.get_named_sharding(nnx.state(model), jax.sharding.get_mesh())
  nnx.update(model, jax.device_put(nnx.state(model), shardings))
  optimizer = SGD(model, rate=0.005)
  for batch in parabola(5):
    mine.append(float(sgd_step(model, optimizer, batch)))

  logger, trained = MetricsLogger(), MLP(layout, rngs=nnx.Rngs(0))
  config = TrainingConfig(pbar_description=None, data_sharding_axis=())
  trainer = PeftTrainer(trained, optax.sgd(0.005, momentum=0.9), config, logger)
  trainer.with_loss_fn(squared_error)
  trainer.train(parabola(5))
  trainer.close()
for name, momentum in optimizer.momentum.items():
  shard = momentum[...].addressable_shards[0].data.shape
  print(f"momentum of {name} {momentum.shape}: {momentum.sharding.spec}, here {shard}")
theirs = logger.get_metric_history("", "loss", Mode.TRAIN)
np.testing.assert_allclose(mine, theirs, rtol=1e-5)
print("five losses, equal to those of optax.sgd in the trainer:", np.round(mine, 4))
jax.debug.visualize_array_sharding(optimizer.momentum["w1"][...])

# %% [markdown]
# ## Logical axes, and rules that map them
# `Layout` is this example's way to keep the choice of mesh axes out of the model. The
# way of `flax.nnx` is to give dimensions logical names, and to map them to mesh axes by
# rules: `nnx.logical_axis_rules(rules)`, or `sharding_rules=` of one variable. The
# models of `tunix` use a third form, `ShardingRules`. All three end in the same
# PartitionSpecs, and the trainer follows each of them.

# %%
logical = Layout(axes={}, embed="embed", inner="inner")
rules = (("embed", "fsdp"), ("inner", "tp"))
ours = Block(LAYOUTS["fsdp x tensor"], width=64, heads=8, kv_heads=2, rngs=nnx.Rngs(0))
theirs = Block(logical, width=64, heads=8, kv_heads=2, rngs=nnx.Rngs(0))
print("declared  ", theirs.up.get_metadata()["out_sharding"])
with nnx.logical_axis_rules(rules):
  specs = [nnx.get_partition_spec(nnx.state(each)) for each in (ours, theirs)]
print("by rules  ", specs[1]["up"].get_value())
assert jax.tree.leaves(specs[0]) == jax.tree.leaves(specs[1])

mesh = create_mesh(LAYOUTS["fsdp x tensor"].axes)
with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
  PeftTrainer(theirs, optax.adam(1e-2), TrainingConfig(max_steps=1)).close()
print("in trainer", theirs.up.sharding.spec, "and kv", theirs.kv.sharding.spec)

# %% [markdown]
# ## The fit
# The MLP that is split over eight devices has learned most of the parabola:

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
# The black line has the shape of the dots, but not yet their curvature: 32 relu units
# make it of straight pieces, and 100 steps have not placed all of them.

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

# %% [markdown]
# ## Try this
# - Set `kv_heads=8` in `Transformer`. Which collectives of the layout `tensor` go away,
#   and how many bytes does a device hold?
# - Add the layout `Layout(axes={"fsdp": 4, "tp": 2}, ...)`. Are the KV heads split?
# - Split `up` by rows and `down` by columns. How many collectives does a block need?
# - Wrap a part of the model in a `jax.named_scope` of yours, and find it in the list of
#   collectives and in the trace.
# - Raise `width` to 256. Which of the three numbers grows fastest?
