"""Programs of a trainer, lowered from shapes without data or weights."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.models.transformer.experts import moe
from tunix.perf import flops, programs
from tunix.perf.programs import ProgramRecord
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.steps.module_state import Skeleton
from tunix.sft.steps.step_metrics import matmul_params
from tunix.sft.steps.train_step import examples_in

STEP = "train step"


def of_trainer(trainer: PeftTrainer, batch: object) -> dict[str, ProgramRecord]:
  """Returns {name: program} of a trainer.

  The programs are the train step, programs that run before it on the same batch (such
  as scoring by a reference model), and the evaluation of one micro-batch.

  Args:
    trainer: a trainer on the mesh that the programs are for. Its model may be shapes
      (`automodel.of_shapes`).
    batch: a global batch of NumPy arrays, as the trainer's data source gives it.
  """
  with programs.recording() as records:
    trainer.lower_train_step(batch)
  with programs.recording() as evaluation:
    first = examples_in(batch) // trainer.training_config.micro_batches
    part = jax.tree.map(lambda x: x[:first] if np.ndim(x) else x, batch)
    trainer.lower_eval_step(part)
  return {
    STEP: records.pop(STEP),
    **records,
    "evaluation": evaluation["evaluation"],
  }


def parameters(model: nnx.Module) -> nnx.State:
  """Returns all parameters of a model, trained or not."""
  return nnx.state(model, nnx.Param)


def model_flops(trainer: PeftTrainer, sizes: Any, rows: int, length: int) -> float:
  """Returns the FLOPs of a step by formula, on all devices together.

  See `tunix.perf.flops` for the formula.

  Args:
    trainer: the trainer with the model.
    sizes: TransformerConfig of the model.
    rows: number of sequences of a step, each of full length.
    length: tokens of a sequence.
  """
  skeleton, model = Skeleton(trainer.model), trainer.model
  params, frozen, _ = skeleton.split(model)
  every, trained = matmul_params(params, frozen, moe.active_share(model))
  attention = sum(
    flops.attention_flops(
      [length] * rows,
      num_layers=1,
      num_heads=sizes.num_heads,
      head_dim=sizes.kinds[kind].head_dim,
      window=sizes.kinds[kind].window,
    )
    for kind in sizes.layer_kinds
  )
  return flops.train_flops(
    every, rows * length, attention=attention, trained_matmul_params=trained
  )
