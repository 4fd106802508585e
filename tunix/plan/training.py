"""The programs of a trainer, from shapes alone."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.models.transformer import moe
from tunix.perf import flops, programs
from tunix.perf.programs import Noted
from tunix.sft.module_state import Skeleton
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.step_metrics import matmul_params
from tunix.sft.train_step import examples_in

STEP = "train step"


def of_trainer(trainer: PeftTrainer, batch: Any) -> dict[str, Noted]:
  """{name: program} of a trainer whose model may be shapes (`automodel.of_shapes`): the
  step, the evaluation of one of its micro-batches, and what runs before the step on its
  batch (a reference that scores it).

  Args:
    trainer: on the mesh that the programs are for.
    batch: a global batch as its data gives one; NumPy arrays.
  """
  with programs.noted() as noted:
    trainer.lower_train_step(batch)
  with programs.noted() as held_out:
    first = examples_in(batch) // trainer.training_config.micro_batches
    part = jax.tree.map(lambda x: x[:first] if np.ndim(x) else x, batch)
    trainer.lower_eval_step(part)
  return {
    STEP: noted.pop(STEP),
    **noted,
    "evaluation": held_out["evaluation"],
  }


def parameters(model: nnx.Module) -> nnx.State:
  """All parameters, trained or not."""
  return nnx.state(model, nnx.Param)


def model_flops(trainer: PeftTrainer, sizes: Any, rows: int, length: int) -> float:
  """FLOPs of a step by formula (see `tunix.perf.flops`), on all devices together.

  Args:
    trainer: with the model.
    sizes: its TransformerConfig.
    rows: sequences of a step, each counted whole.
    length: their tokens.
  """
  skeleton, model = Skeleton(trainer.model), trainer.model
  params, frozen, _ = skeleton.split(model)
  every, trained = matmul_params(params, frozen, moe.active_share(model))
  attention = sum(
    flops.attention_flops(
      [length] * rows,
      num_layers=1,
      num_heads=sizes.num_heads,
      head_dim=sizes.head_dim,
      window=sizes.kinds[kind].window,
    )
    for kind in sizes.layer_kinds
  )
  return flops.train_flops(
    every, rows * length, attention=attention, trained_matmul_params=trained
  )
