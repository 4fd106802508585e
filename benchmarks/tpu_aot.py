"""Compiles the train step of a preset for TPU chips that are not here.

Needs the `tpu` extra (libtpu is a wheel; no TPU and no network are asked for):

  python benchmarks/tpu_aot.py --preset llama3p1_8b --topology v5e:4x4 --fsdp 8 --tp 2

Prints the compiler's memory plan of one chip and the collectives of the step, which is
the very one that PeftTrainer runs: AdamW, remat of whole layers, our chunked loss;
`--lora 16` trains adapters, `--forward` computes logits.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # libtpu is only asked to compile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tunix.models import automodel, families, lora
from tunix.models.transformer.shards import sharding as sharding_lib
from tunix.sft.losses import next_token_loss
from tunix.sft.steps.module_state import Skeleton
from tunix.sft.steps.run_state import optimizer_shardings
from tunix.sft.steps.train_step import Group, make_train_step

COLLECTIVES = (
  "all-gather",
  "reduce-scatter",
  "all-reduce",
  "all-to-all",
  "collective-permute",
)


def abstract_model(preset: str, mesh: Mesh, lora_rank: int = 0) -> nnx.Module:
  """A preset in bfloat16 whose arrays are shapes laid out on the mesh."""
  family, make_config = families.preset(preset)
  config = automodel.with_options(
    make_config(),
    dtype="bfloat16",
    param_dtype="bfloat16",
    remat="block",
    scan_layers=True,
  )

  def build() -> nnx.Module:
    model = family.model_class(config, rngs=nnx.Rngs(0))
    return lora.apply(model, lora.LoraConfig(rank=lora_rank)) if lora_rank else model

  graph, state = sharding_lib.abstract(build)
  shardings = sharding_lib.named_shardings(state, mesh)
  return nnx.merge(graph, jax.tree.map(sharded, state, shardings))


def sharded(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def row_tokens(mesh: Mesh, rows: int, length: int) -> jax.ShapeDtypeStruct:
  row = NamedSharding(mesh, P(("fsdp", "ep")))
  return jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=row)


def lower_forward(
  preset: str, mesh: Mesh, rows: int, length: int
) -> jax.stages.Lowered:
  """Logits of rows of tokens, traced on shapes."""
  graph, state = nnx.split(abstract_model(preset, mesh))

  def forward(state, tokens):
    return nnx.merge(graph, state)(tokens)[0]

  with jax.set_mesh(mesh):
    return jax.jit(forward).lower(state, row_tokens(mesh, rows, length))


def lower(
  preset: str, mesh: Mesh, rows: int, length: int, lora_rank: int = 0
) -> jax.stages.Lowered:
  """The train step, traced on shapes."""
  model = abstract_model(preset, mesh, lora_rank)
  skeleton = Skeleton(model)
  params, frozen, rest = skeleton.split(model)
  tx = optax.adamw(1e-4, mu_dtype=jnp.float32)
  opt_state = jax.eval_shape(tx.init, params)
  layout = optimizer_shardings(opt_state, params, mesh)
  opt_state = jax.tree.map(sharded, opt_state, layout)
  tokens = row_tokens(mesh, rows, length)
  batch = {"input_tokens": tokens, "input_mask": tokens}
  step = make_train_step(skeleton, lambda m, b: next_token_loss(m, **b), tx)
  group = Group((batch,), jax.ShapeDtypeStruct((1,), jnp.float32))
  with jax.set_mesh(mesh):
    return jax.jit(step, donate_argnums=(0, 1)).lower(
      params, opt_state, rest, frozen, (group,)
    )


def tpu_mesh(topology: str, fsdp: int, ep: int, tp: int) -> Mesh:
  """A mesh of chips that are not here."""
  found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  return Mesh(np.array(found.devices).reshape(fsdp, ep, tp), ("fsdp", "ep", "tp"))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--preset", default="llama3p1_8b")
  parser.add_argument("--topology", default="v5e:4x4")
  parser.add_argument("--fsdp", type=int, default=8)
  parser.add_argument("--ep", type=int, default=1)
  parser.add_argument("--tp", type=int, default=2)
  parser.add_argument("--rows", type=int, default=8)
  parser.add_argument("--length", type=int, default=4096)
  parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights")
  parser.add_argument("--forward", action="store_true", help="logits, no training")
  args = parser.parse_args()
  mesh = tpu_mesh(args.topology, args.fsdp, args.ep, args.tp)
  start = time.perf_counter()
  job = (args.preset, mesh, args.rows, args.length)
  lowered = lower_forward(*job) if args.forward else lower(*job, args.lora)
  traced = time.perf_counter()
  compiled = lowered.compile()
  done = time.perf_counter()
  plan, gib = compiled.memory_analysis(), 2.0**30
  text = compiled.as_text()
  counts = {
    name: len(re.findall(rf"= \S+ {name}(?:-start)?\(", text)) for name in COLLECTIVES
  }
  what = "forward" if args.forward else f"LoRA {args.lora}" if args.lora else "AdamW"
  print(
    f"{args.preset}, {what}, on {args.topology}, fsdp {args.fsdp} x ep {args.ep} x "
    f"tp {args.tp}, {args.rows} x {args.length} tokens: lowered in "
    f"{traced - start:.0f} s, compiled in {done - traced:.0f} s"
  )
  print(
    f"a chip: arguments {plan.argument_size_in_bytes / gib:.2f} GiB, temporary "
    f"{plan.temp_size_in_bytes / gib:.2f} GiB, peak "
    f"{plan.peak_memory_in_bytes / gib:.2f} GiB; {dict(collections.Counter(counts))}"
  )


if __name__ == "__main__":
  main()
