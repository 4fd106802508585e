"""Data, FSDP and tensor parallelism on eight devices, and their collectives.

    python examples/tensor_parallel.py            # eight simulated devices on a CPU
    python examples/tensor_parallel.py --steps 3  # seconds

PeftTrainer trains an MLP that fits a parabola and a small transformer on five meshes.
The code of the models and the training is the same on every mesh; only the mesh axes
that split each dimension differ. The losses are equal. A table shows the bytes on a
device, the collectives of the compiled step and three numbers of its profile, which
differ. `--profile DIR` keeps the profiles, one folder for each mesh.
"""

import argparse
import collections
import dataclasses
import pathlib
import re
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from tunix.perf.hlo_text import COLLECTIVES, Program
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.profiler import ProfilerOptions
from tunix.utils.mesh import constrain, create_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """A mesh, and the mesh axes that split each kind of dimension.

  Attributes:
    axes: sizes of the mesh by axis.
    batch: axes that split the rows of a batch.
    embed: the axis that splits the width of the residual stream.
    inner: the axis that splits heads and hidden units. KV heads that it does not
      divide stay whole.
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


# The program that XLA makes of such a pair, written by hand for one device. A comment
# names the collective of a step; the other steps need no communication.


def forward_of_each_device(x, w1, w2):
  """Computes x [B, D/8], w1 [D, F/8], w2 [F/8, D] -> [B, D/8] over the axis "tp".

  Returns: the output, and x [B, D] and the hidden units [B, F/8] for the gradients.
  """
  with jax.named_scope("F1_gather_x"):  # all-gather
    whole = jax.lax.all_gather(x, "tp", axis=1, tiled=True)
  with jax.named_scope("F2_first_product"):  # columns of w1
    hidden = whole @ w1
  with jax.named_scope("F3_relu"):
    hidden = nnx.relu(hidden)
  with jax.named_scope("F4_second_product"):  # rows of w2: one term of every sum
    terms = hidden @ w2
  with jax.named_scope("F5_scatter_sums"):  # reduce-scatter: the sums of its columns
    out = jax.lax.psum_scatter(terms, "tp", scatter_dimension=1, tiled=True)
  return out, whole, hidden


def step_of_each_device(x, w1, w2, gradient):
  """Computes the forward pass, and the gradients from that of the output, [B, D/8].

  Returns: the output and the gradients of x, w1 and w2, all of them split as before.
  """
  out, whole, hidden = forward_of_each_device(x, w1, w2)
  with jax.named_scope("B1_gather_gradient"):  # all-gather
    upper = jax.lax.all_gather(gradient, "tp", axis=1, tiled=True)
  with jax.named_scope("B2_gradient_of_w2"):
    of_w2 = hidden.T @ upper
  with jax.named_scope("B3_gradient_of_hidden"):
    of_hidden = upper @ w2.T
  with jax.named_scope("B4_relu"):
    of_hidden = jnp.where(hidden > 0, of_hidden, 0)
  # B5 gathers x again. It is skipped, because F1's result was kept.
  with jax.named_scope("B6_gradient_of_w1"):
    of_w1 = whole.T @ of_hidden
  with jax.named_scope("B7_terms_of_x"):  # one term of every sum
    terms = of_hidden @ w1.T
  with jax.named_scope("B8_scatter_sums"):  # reduce-scatter
    of_x = jax.lax.psum_scatter(terms, "tp", scatter_dimension=1, tiled=True)
  return out, of_x, of_w1, of_w2


def mlp_by_hand(mesh):
  columns, rows = P(None, "tp"), P("tp", None)
  return jax.shard_map(
    lambda *arrays: forward_of_each_device(*arrays)[0],
    mesh=mesh,
    in_specs=(columns, columns, rows),
    out_specs=columns,
  )


def step_by_hand(mesh):
  columns, rows = P(None, "tp"), P("tp", None)
  return jax.shard_map(
    step_of_each_device,
    mesh=mesh,
    in_specs=(columns, columns, rows, columns),
    out_specs=(columns, columns, columns, rows),
  )


class Block(nnx.Module):
  """Causal attention and an MLP, split as in Megatron (arXiv:1909.08053).

  Attention is grouped: several query heads share a KV head.
  """

  def __init__(self, layout, *, width, heads, kv_heads, rngs):
    d, n, k, h, f = width, heads, kv_heads, width // heads, 4 * width
    self.layout = layout
    self.q = weight(rngs, (d, n, h), layout.embed, layout.inner, None)
    # Two KV heads cannot be split over four or eight devices. The trainer then leaves
    # this dimension whole, and every device computes all KV heads.
    self.kv = weight(rngs, (d, 2, k, h), layout.embed, None, layout.inner, None)
    self.out = weight(rngs, (n, h, d), layout.inner, None, layout.embed)
    self.up = weight(rngs, (d, f), layout.embed, layout.inner)
    self.down = weight(rngs, (f, d), layout.inner, layout.embed)
    self.norm1 = nnx.RMSNorm(d, rngs=rngs)
    self.norm2 = nnx.RMSNorm(d, rngs=rngs)

  def __call__(self, x):
    # Between blocks, rows are split and each row is whole. An axis can split only one
    # dimension: P("x", None, "x") would be an error.
    x = constrain(x, self.layout.batch, None, None)
    with jax.named_scope("attention"):
      inner = self.norm1(x)
      q = jnp.einsum("btd,dnh->btnh", inner, self.q[...])
      # `constrain` drops the axis of the heads if it does not divide them. The first
      # line pins KV heads, the second a copy for each query head, of which a device
      # keeps those of its query heads.
      spec = None, self.layout.batch, None, self.layout.inner, None
      kv = constrain(jnp.einsum("btd,dckh->cbtkh", inner, self.kv[...]), *spec)
      k, v = constrain(jnp.repeat(kv, q.shape[2] // kv.shape[3], axis=3), *spec)
      attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
      x = x + jnp.einsum("btnh,nhd->btd", attended, self.out[...])
    with jax.named_scope("mlp"):
      return x + jax.nn.gelu(self.norm2(x) @ self.up) @ self.down


class Transformer(nnx.Module):
  """A decoder from tokens, int32 [B, T], to logits [B, T, V], with a tied embedding."""

  def __init__(
    self, layout, *, vocab=64, width=64, heads=8, kv_heads=2, layers=2, rngs
  ):
    self.embedding = weight(rngs, (vocab, width), None, layout.embed)
    self.blocks = nnx.List(
      Block(layout, width=width, heads=heads, kv_heads=kv_heads, rngs=rngs)
      for _ in range(layers)
    )

  def __call__(self, tokens):
    with jax.named_scope("embedding"):
      x = self.embedding[...][tokens]
    for index, block in enumerate(self.blocks):
      with jax.named_scope(f"block{index}"):
        x = block(x)
    with jax.named_scope("logits"):
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


# What a compiled step sends, and how long it takes.


def collectives(hlo):
  """Counts each collective in the text of a compiled program.

  On TPUs and GPUs, XLA uses reduce-scatter. On a CPU it uses an all-reduce, and each
  device keeps its part.
  """
  names = r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
  return collections.Counter(re.findall(rf" {names}(?:-start)?\(", hlo))


def senders(hlo):
  """Returns (collective, shape, named scope) for each collective of a program."""
  program, out = Program(hlo, is_compiled=True), []
  for name, _ in program.runs():
    for one in program.computations[name].values():
      if one.is_collective and not one.opcode.endswith("-done"):
        scope = re.search(r'op_name="([^"]*)"', one.text)
        out.append((one.opcode, one.shape, scope[1] if scope else ""))
  return out


class StepProfile(NamedTuple):
  """Three numbers of a profiled step, in milliseconds; the last two on one device.

  Attributes:
    step: time from the first operation of any device to the last.
    communication: time in collectives. It includes the wait for the other devices.
    other: time in all other operations.
  """

  step: float
  communication: float
  other: float


def read_profile(folder):
  """Returns the three numbers of a profile of one step."""
  path = next(pathlib.Path(folder).rglob("*.xplane.pb"))
  spans = []  # (is a collective, device, begin, end), in nanoseconds
  for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      for event in line.events:
        stats = dict(event.stats)
        if "hlo_op" in stats:
          name, device = event.name.replace("_", "-"), stats.get("device_ordinal")
          span = (event.start_ns, event.start_ns + event.duration_ns)
          spans.append((name.startswith(COLLECTIVES), device or plane.name, *span))
  devices = len({device for _, device, *_ in spans})
  begin, end = min(span[2] for span in spans), max(span[3] for span in spans)
  communication = sum(covered([s for s in spans if s[0]]).values()) / devices
  busy = sum(covered(spans).values()) / devices
  return StepProfile(
    *(ns / 1e6 for ns in (end - begin, communication, busy - communication))
  )


def covered(spans):
  """Returns {device: nanoseconds in which at least one of its spans runs}."""
  total, until = collections.Counter(), collections.Counter()
  for _, device, begin, end in sorted(spans, key=lambda span: span[2]):
    total[device] += max(0, end - max(begin, until[device]))
    until[device] = max(end, until[device])
  return total


def bytes_on_a_device(model):
  shards = [x.addressable_shards[0].data for x in jax.tree.leaves(nnx.state(model))]
  return sum(shard.nbytes for shard in shards)


def run(task, layout, steps, folder):
  """Trains on one mesh and profiles the last step into `folder`.

  Returns: measurements, model and optimizer.
  """
  make, data, loss_fn = TASKS[task]
  model = make(layout, rngs=nnx.Rngs(0))  # on one device; the trainer shards it
  devices = jax.devices()[: np.prod(list(layout.axes.values()))]
  with jax.set_mesh(create_mesh(layout.axes, devices)):
    logger = MetricsLogger()
    config = TrainingConfig(
      max_steps=steps,
      data_sharding_axis=layout.batch,
      pbar_description=None,
      profiler_options=ProfilerOptions(folder, steps - 1, 1, python_tracer_level=0),
    )
    trainer = PeftTrainer(model, optax.adam(1e-2), config, logger)
    trainer.with_loss_fn(loss_fn)
    step = trainer.lower_train_step(next(data(1))).compile()
    trainer.train(data(steps))
    trainer.close()
  return {
    "losses": logger.get_metric_history("", "loss", Mode.TRAIN),
    "program": step.as_text(),
    "collectives": collectives(step.as_text()),
    "profile": read_profile(folder),
    "bytes": bytes_on_a_device(model),
    "model": model,
    "optimizer": trainer.optimizer,
  }


def main():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--steps", type=int, default=100)
  parser.add_argument("--profile", type=pathlib.Path, help="folder of the profiles")
  args = parser.parse_args()
  folder = args.profile or pathlib.Path(tempfile.mkdtemp())
  for task in TASKS:
    print(f"\n{task:14} {'loss':>16} {'bytes/device':>13}  ms: step, communication")
    for name, layout in LAYOUTS.items():
      out = run(task, layout, args.steps, folder / task / name)
      first, last = out["losses"][0], out["losses"][-1]
      counts = sorted(out["collectives"].items())
      found = ", ".join(f"{n} {kind}" for kind, n in counts)
      losses = f"{first:.4f} -> {last:.4f}"
      took = f"{out['profile'].step:6.1f} {out['profile'].communication:6.1f}"
      print(f"{name:14} {losses:>16} {out['bytes']:13,} {took}  {found or 'none'}")
  print("\nthe sharding of a matrix of a block's MLP on the last mesh:")
  jax.debug.visualize_array_sharding(out["model"].blocks[0].up[...])


if __name__ == "__main__":
  # Before the first array. A machine with only a CPU simulates eight devices.
  jax.config.update("jax_num_cpu_devices", 8)
  main()
