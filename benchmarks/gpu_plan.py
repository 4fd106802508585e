"""Plans the steps that `benchmarks.gpu` measured, for a GPU that is not there.

  python -m benchmarks.gpu_plan [--topology h200:1] [NAME ...]

prints a JSON line for each step: planned memory beside the measured one, and the bound
of its time; and for sampling the kernels and branches of a round. It needs
`pip install 'tunix[plan-gpu]'`. Each plan takes about a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from tunix.plan import apart, engine as engine_plan, rollout

_PRESET = "qwen3_0p6b"
# Figures of docs/performance.md: memory in GB, milliseconds, tokens a second.
_STEPS: dict[str, dict[str, Any]] = {
  "16,384 tokens": {"gb": 53.8, "ms": 225},
  "LoRA": {"lora": 16, "gb": 38.6, "ms": 198},
  "packed": {"packed": 300, "gb": 54.1, "ms": 331},
  "packed cudnn": {"packed": 300, "attention": "cudnn"},
  "deterministic": {"flags": "--xla_gpu_deterministic_ops=true", "gb": 54.8, "ms": 241},
  "remat": {"rows": 32, "remat": "block", "gb": 16.1, "ms": 826},
  "micro-batches": {"rows": 32, "micro": 8, "gb": 58.1, "ms": 940},
  "remat micro-batches": {"rows": 32, "micro": 8, "remat": "block"},
}
_DECODES: dict[str, dict[str, Any]] = {
  "padded 64": {"engine": "padded", "batch": 64, "tokens_per_s": 23_900},
  "padded 256": {"engine": "padded", "batch": 256, "tokens_per_s": 37_900},
  "engine 64": {"engine": "auto", "batch": 64, "tokens_per_s": 13_200},
  "engine 256": {"engine": "auto", "batch": 256, "tokens_per_s": 19_500},
}
_GRPO = "grpo"
_GRPO_MS = 1630


def main() -> None:
  """Prints a line for each step."""
  names = [*_STEPS, *_DECODES, _GRPO]
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}")
  parser.add_argument("--topology", default="h200:1")
  options = parser.parse_args()
  if unknown := set(options.names) - set(names):
    parser.error(f"NAME is {sorted(unknown)}; expected some of {names}")
  for name in options.names or names:
    if name in _STEPS:
      figures = apart.call(step, options.topology, **_STEPS[name])
    elif name in _DECODES:
      figures = decode(options.topology, **_DECODES[name])
    else:
      figures = grpo(options.topology)
    print(json.dumps({"step": name, **figures}), flush=True)


def step(
  topology: str,
  *,
  gb: float | None = None,
  ms: float | None = None,
  rows: int = 8,
  length: int = 2048,
  lora: int = 0,
  packed: int = 0,
  micro: int = 0,
  remat: str = "none",
  attention: str = "auto",
  flags: str = "",
) -> dict[str, Any]:
  """Plans a train step, as `benchmarks.gpu sft` makes it."""
  import os

  os.environ["XLA_FLAGS"] += f" {flags}"
  import jax
  import numpy as np
  import optax
  from flax import nnx

  from benchmarks.adapter import LORA_TARGETS
  from tunix.models import automodel, families, lora as lora_lib
  from tunix.perf import programs
  from tunix.plan import program, topology as topology_lib, training
  from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
  from tunix.utils import mesh as mesh_lib

  where = topology_lib.find(topology)
  mesh = where.mesh({"fsdp": -1})
  sizes = families.preset(_PRESET)[1]()
  kinds = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  sizes = dataclasses.replace(sizes, **kinds, remat=remat, attention=attention)
  targets = lora_lib.LoraConfig(
    rank=lora or 1, alpha=float(lora or 1), targets=LORA_TARGETS
  )
  change = lambda model: lora_lib.apply(model, targets) if lora else model
  ids = np.ones((rows, length), np.int32)
  batch = {"input_tokens": ids, "input_mask": ids}
  if packed:
    slots = np.arange(length, dtype=np.int32)
    batch["segment_ids"] = np.broadcast_to(slots // packed + 1, ids.shape)
    batch["positions"] = np.broadcast_to(slots % packed, ids.shape)
  config = TrainingConfig(
    max_steps=8,
    pbar_description=None,
    gradient_accumulation_steps=rows // (micro or rows),
  )
  with mesh_lib.use_mesh(mesh), programs.recording() as records:
    model = automodel.of_shapes(sizes, mesh, change)
    trainer = PeftTrainer(model, optax.adamw(1e-5), config)
    trainer.lower_train_step(batch)
  plan = program.estimate(training.STEP, records[training.STEP], mesh.size, where.chip)
  # `benchmarks.gpu` still refers to the matrices that the trainer has copied.
  matrices = [x for x in jax.tree.leaves(nnx.state(model)) if x.ndim > 1]
  kept = 0 if lora else sum(x.size * x.dtype.itemsize for x in matrices)
  planned = (plan.peak_bytes + kept) / 1e9
  work = training.model_flops(trainer, sizes, rows, length)
  assert plan.seconds is not None and where.chip is not None
  return {
    "planned_gb": round(planned, 2),
    "measured_gb": gb,
    "planned_over_measured": gb and round(planned / gb, 3),
    "bound_ms": round(1e3 * plan.seconds, 1),
    "measured_ms": ms,
    "mfu_at_most": round(work / plan.seconds / where.chip.flops / mesh.size, 3),
  }


def decode(
  topology: str, *, engine: str, batch: int, tokens_per_s: float
) -> dict[str, Any]:
  """Plans sampling of `batch` completions of 256 tokens after prompts of 256."""
  samples = {"rollout.engine": "padded"} if engine == "padded" else {}
  estimate = _grpo(topology, batch, samples)
  sampled = estimate.rollouts or estimate.engine
  names = engine_plan.DECODE, rollout.LOOP
  loop = next(each for each in estimate.programs if each.name in names)
  return {
    "kernels": loop.kernels,
    "branches": loop.branches,
    "tokens_per_s_at_most": round(sampled.tokens_per_second),
    "measured_tokens_per_s": tokens_per_s,
  }


def grpo(topology: str) -> dict[str, Any]:
  """Plans a step of GRPO, as `benchmarks.gpu grpo` makes it."""
  estimate = _grpo(topology, 64, {})
  return {
    "bound_ms": round(1e3 * estimate.step_seconds),
    "measured_ms": _GRPO_MS,
    "planned_gb": round(estimate.peak_bytes / 1e9, 2),
    "mfu_at_most": round(estimate.mfu, 3),
  }


def _grpo(topology: str, batch: int, more: dict[str, str]) -> Any:
  from tunix.cli import config as config_lib
  from tunix.cli.commands import plan

  settings = {
    "job": "grpo",
    "model.name": _PRESET,
    "model.dtype": "bfloat16",
    "model.param_dtype": "bfloat16",
    "algorithm.num_generations": "8",
    "algorithm.beta": "0.04",
    "training.global_batch_size": str(batch // 8),
    "rollout.max_prompt_length": "256",
    "rollout.max_tokens_to_generate": "256",
    **more,
  }
  config = config_lib.load([f"--{key}={value}" for key, value in settings.items()])
  return plan.plan(config, topology, {"fsdp": -1})


if __name__ == "__main__":
  from benchmarks import gpu_plan  # the child finds `step` there, and not in __main__

  gpu_plan.main()
