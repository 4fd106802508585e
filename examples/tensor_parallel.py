"""Data, FSDP and tensor parallelism on eight devices, and their collectives.

    python examples/tensor_parallel.py            # eight simulated devices on a CPU
    python examples/tensor_parallel.py --steps 3  # seconds

PeftTrainer trains an MLP that fits a parabola and a small transformer on five meshes.
The code of the models and the training is the same on every mesh; only the mesh axes
that split each dimension differ. The losses are equal. A table shows the bytes on a
device and the collectives of the compiled step, which differ.
"""

import argparse
import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.utils.mesh import constrain, create_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """A mesh, and the mesh axes that split each kind of dimension.

  Attributes:
    axes: sizes of the mesh by axis.
    batch: axes that split the rows of a batch.
    embed: the axis that splits the width of the residual stream.
    inner: the axis that splits heads and hidden units.
  """

  axes: dict[str, int]
  batch: tuple[str, ...] = ()
  embed: str | None = None
  inner: str | None = None


LAYOUTS = {
  "one": Layout(axes={"data": 1}),
  # Replicated weights, split rows: gradients are summed over all devices.
  "data": Layout(axes={"data": 8}, batch=("data",)),
  # Split weights and rows: weights are gathered before use, gradients are scattered.
  "fsdp": Layout(axes={"fsdp": 8}, batch=("fsdp",), embed="fsdp"),
  # Replicated rows, split heads and hidden units: activations are summed.
  "tensor": Layout(axes={"tp": 8}, inner="tp"),
  # Both, the usual layout of large models.
  "fsdp x tensor": Layout(
    axes={"fsdp": 2, "tp": 4}, batch=("fsdp",), embed="fsdp", inner="tp"
  ),
}


def weight(rngs, shape, *axes):
  """Returns a matrix that is split along `axes`, one for each dimension."""
  init = nnx.initializers.lecun_normal()(rngs.params(), (shape[0], np.prod(shape[1:])))
  # eager_sharding=False: the trainer shards the matrix over the current mesh.
  return nnx.Param(init.reshape(shape), out_sharding=axes, eager_sharding=False)


class MLP(nnx.Module):
  """An MLP from x [B, 1] to y [B, 1]. Its input is too narrow for FSDP to split."""

  def __init__(self, layout, *, hidden=32, rngs):
    # Columns of the first matrix and rows of the second are split, so that one sum at
    # the end is the only communication. The single column of w2 [32, 1] cannot be
    # split.
    self.w1 = weight(rngs, (1, hidden), None, layout.inner)
    self.b1 = nnx.Param(
      jnp.zeros(hidden), out_sharding=(layout.inner,), eager_sharding=False
    )
    self.w2 = weight(rngs, (hidden, 1), layout.inner, None)

  def __call__(self, x):
    return nnx.relu(x @ self.w1 + self.b1) @ self.w2


# The program that XLA makes of such a pair, written by hand for one device.


def mlp_of_each_device(x, w1, w2):
  """Computes x [B, D/8], w1 [D, F/8], w2 [F/8, D] -> [B, D/8] over the axis "tp"."""
  whole = jax.lax.all_gather(x, "tp", axis=1, tiled=True)
  hidden = nnx.relu(whole @ w1)  # columns of w1: no communication
  # Rows of w2: each device has one term of every sum, and keeps the sums of its
  # columns.
  return jax.lax.psum_scatter(hidden @ w2, "tp", scatter_dimension=1, tiled=True)


def mlp_by_hand(mesh):
  columns, rows = P(None, "tp"), P("tp", None)
  return jax.shard_map(
    mlp_of_each_device, mesh=mesh, in_specs=(columns, columns, rows), out_specs=columns
  )


class Block(nnx.Module):
  """Causal attention and an MLP, split as in Megatron (arXiv:1909.08053)."""

  def __init__(self, layout, *, width, heads, rngs):
    d, n, h, f = width, heads, width // heads, 4 * width
    self.layout = layout
    self.qkv = weight(rngs, (d, 3, n, h), layout.embed, None, layout.inner, None)
    self.out = weight(rngs, (n, h, d), layout.inner, None, layout.embed)
    self.up = weight(rngs, (d, f), layout.embed, layout.inner)
    self.down = weight(rngs, (f, d), layout.inner, layout.embed)
    self.norm1 = nnx.RMSNorm(d, rngs=rngs)
    self.norm2 = nnx.RMSNorm(d, rngs=rngs)

  def __call__(self, x):
    # Between blocks, rows are split and each row is whole. An axis can split only one
    # dimension: P("x", None, "x") would be an error.
    x = constrain(x, self.layout.batch, None, None)
    q, k, v = jnp.einsum("btd,dknh->kbtnh", self.norm1(x), self.qkv[...])
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("btnh,nhd->btd", attended, self.out[...])
    return x + jax.nn.gelu(self.norm2(x) @ self.up) @ self.down


class Transformer(nnx.Module):
  """A decoder from tokens, int32 [B, T], to logits [B, T, V], with a tied embedding."""

  def __init__(self, layout, *, vocab=64, width=64, heads=8, layers=2, rngs):
    self.embedding = weight(rngs, (vocab, width), None, layout.embed)
    self.blocks = nnx.List(
      Block(layout, width=width, heads=heads, rngs=rngs) for _ in range(layers)
    )

  def __call__(self, tokens):
    x = self.embedding[...][tokens]
    for block in self.blocks:
      x = block(x)
    return x @ self.embedding[...].T


# Two tasks. A batch may be any pytree that the loss can read.


def parabola(steps, rows=32):
  """Yields batches of y = 0.8 x^2 + 0.1 with noise."""
  rng = np.random.default_rng(0)
  for _ in range(steps):
    x = rng.uniform(-2, 2, (rows, 1)).astype(np.float32)
    noise = rng.normal(0, 0.1, x.shape)
    yield {"x": x, "y": (0.8 * x**2 + 0.1 + noise).astype(np.float32)}


def squared_error(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def counting(steps, rows=16, length=32, vocab=64):
  """Yields batches of tokens that count up, each row with another stride."""
  rng = np.random.default_rng(0)
  for _ in range(steps):
    start, stride = rng.integers(1, vocab, (2, rows, 1))
    tokens = (start + stride * np.arange(length)) % vocab
    yield {"tokens": tokens.astype(np.int32)}


def next_token(model, tokens):
  logits = model(tokens[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


TASKS = {
  "mlp": (MLP, parabola, squared_error),
  "transformer": (Transformer, counting, next_token),
}


def collectives(hlo):
  """Counts each collective in the text of a compiled program.

  On TPUs and GPUs, XLA uses reduce-scatter. On a CPU it uses an all-reduce, and each
  device keeps its part.
  """
  names = r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
  return collections.Counter(re.findall(rf" {names}(?:-start)?\(", hlo))


def bytes_on_a_device(model):
  shards = [x.addressable_shards[0].data for x in jax.tree.leaves(nnx.state(model))]
  return sum(shard.nbytes for shard in shards)


def run(task, layout, steps):
  """Trains on one mesh; returns measurements, model and optimizer."""
  make, data, loss_fn = TASKS[task]
  devices = jax.devices()[: np.prod(list(layout.axes.values()))]
  with jax.set_mesh(create_mesh(layout.axes, devices)):
    model = make(layout, rngs=nnx.Rngs(0))
    logger = MetricsLogger()
    config = TrainingConfig(data_sharding_axis=layout.batch, pbar_description=None)
    trainer = PeftTrainer(model, optax.adam(1e-2), config, logger)
    trainer.with_loss_fn(loss_fn)
    step = trainer.lower_train_step(next(data(1))).compile()
    trainer.train(data(steps))
    trainer.close()
  return {
    "losses": logger.get_metric_history("", "loss", Mode.TRAIN),
    "program": step.as_text(),
    "collectives": collectives(step.as_text()),
    "bytes": bytes_on_a_device(model),
    "model": model,
    "optimizer": trainer.optimizer,
  }


def main():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--steps", type=int, default=100)
  args = parser.parse_args()
  for task in TASKS:
    print(f"\n{task:14} {'loss':>16} {'bytes/device':>13}  collectives of a step")
    for name, layout in LAYOUTS.items():
      out = run(task, layout, args.steps)
      first, last = out["losses"][0], out["losses"][-1]
      counts = sorted(out["collectives"].items())
      found = ", ".join(f"{n} {kind}" for kind, n in counts)
      losses = f"{first:.4f} -> {last:.4f}"
      print(f"{name:14} {losses:>16} {out['bytes']:13,}  {found or 'none'}")
  print("\nthe sharding of a matrix of a block's MLP on the last mesh:")
  jax.debug.visualize_array_sharding(out["model"].blocks[0].up[...])


if __name__ == "__main__":
  # Before the first array. A machine with only a CPU simulates eight devices.
  jax.config.update("jax_num_cpu_devices", 8)
  main()
