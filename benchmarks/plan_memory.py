"""Compares what `tunix plan` says of a train step's memory with what the step takes.

    python benchmarks/plan_memory.py [--KEY.SUB=VALUE ...]

runs steps of a small model on eight devices of this machine's CPU (the settings can be
overridden). Taken is what JAX's arrays hold, counted exactly, and by how much the
process grows in a step beyond that: Linux tells the most it had since it was asked
last. On a GPU the allocator is asked. Prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import re
import statistics
import sys

_DEVICES = 8
_SETTINGS = (
  "--model.name=qwen3_0p6b",
  "--model.args={num_layers: 4, embed_dim: 512, hidden_dim: 1536, num_heads: 8,"
  " num_kv_heads: 4, head_dim: 64, vocab_size: 8192}",
  *("--training.global_batch_size=16", "--training.max_steps=10"),
  *("--data.max_length=512", "--mesh={fsdp: 4, tp: 2}"),
)
_STEPS = 5


def main(words: list[str]) -> None:
  """Prints planned and taken bytes, of all devices together."""
  on_gpu = os.environ.get("JAX_PLATFORMS", "cpu") != "cpu"
  if not on_gpu and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    # What is freed goes back to Linux at once; read when the process starts.
    given = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    os.environ |= {**given, "JAX_PLATFORMS": "cpu"}
    os.execv(sys.executable, [sys.executable, *sys.argv])
  topology = "gpu" if on_gpu else f"cpu:{_DEVICES}"
  planned, taken = measure(words, topology)
  print(
    json.dumps(
      {
        "topology": topology,
        "planned_bytes": planned,
        "taken_bytes": taken,
        "planned_over_taken": round(planned / taken, 4),
      }
    )
  )


def measure(words: list[str], topology: str) -> tuple[int, int]:
  """(planned, taken) bytes of all devices."""
  import jax

  from tunix.cli import config as config_lib
  from tunix.cli.commands import plan as plan_main
  from tunix.cli.jobs.job import Loaded
  from tunix.cli.jobs.table import JOBS
  from tunix.cli.make import loading, optimizer
  from tunix.generate.tokenizer_adapter import TokenizerAdapter
  from tunix.plan import rollout, topology as topology_lib
  from tunix.utils import mesh as mesh_lib

  config = config_lib.load([*_SETTINGS, *words])
  mesh = topology_lib.find(topology).mesh(config.mesh)
  plan = plan_main.plan(config, topology)
  step = next(program for program in plan.programs if program.name == "train step")
  config = plan_main.settled(config, {axis: int(n) for axis, n in mesh.shape.items()})
  with mesh_lib.use_mesh(mesh):
    rate = optimizer.build_schedule(config)
    trainer = JOBS[config.job].build(
      Loaded(
        config=config,
        model=loading.ModelLoader(config, mesh).model(),
        tokenizer=TokenizerAdapter(rollout.NoText()),
        optimizer=optimizer.build_optimizer(config, rate),
        mesh=mesh,
        output_dir=None,
        learning_rate=rate,
      )
    )
    batch = JOBS[config.job].example(config)
    trainer.train_step(batch)  # compiles
    taken = statistics.median(_taken(jax, trainer, batch) for _ in range(_STEPS))
  return step.held_bytes * mesh.size, int(taken)


def _taken(jax, trainer, batch) -> int:
  gc.collect()
  if jax.default_backend() != "cpu":
    trainer.train_step(batch)
    return sum(d.memory_stats()["peak_bytes_in_use"] for d in jax.local_devices())
  jax.block_until_ready(jax.live_arrays())
  arrays = _bytes_of_arrays(jax)
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
  before = _status("VmRSS")
  trainer.train_step(batch)
  jax.block_until_ready(jax.live_arrays())
  return arrays + _status("VmHWM") - before


def _bytes_of_arrays(jax) -> int:
  shards = {
    shard.data.unsafe_buffer_pointer(): shard.data.nbytes
    for array in jax.live_arrays()
    for shard in array.addressable_shards
  }
  return sum(shards.values())


def _status(name: str) -> int:
  text = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", text)[1])


if __name__ == "__main__":
  sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
  main(sys.argv[1:])
