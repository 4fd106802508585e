"""LoRA dropout in the trainer: on in training only, resumed to the byte, and the same
masks however a global batch is cut."""

import numpy as np
import pytest

from tests import drills, optimizers, toys
from tests.models.lora_test import widen
from tests.sft import trainers
from tests.sft.resume_test import run, same
from tunix.models import lora
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig


def model(dropout=0.3, **changes):
  config = lora.LoraConfig(rank=4, alpha=1.0, dropout=dropout)
  return widen(lora.apply(toys.model(**changes), config))


def trainer(parts=1, **options):
  return PeftTrainer(
    model(**options),
    optimizers.adam(1e-3),
    TrainingConfig(max_steps=4, gradient_accumulation_steps=parts),
  )


def test_evaluation_is_deterministic_and_training_is_not():
  batch = toys.batch(0)
  one = trainer()
  before = [one.eval_step(batch)["loss"] for _ in range(2)]
  assert before[0] == before[1]
  assert before[0] == pytest.approx(trainer(dropout=0.0).eval_step(batch)["loss"])
  # No update, so that only the masks differ.
  still = PeftTrainer(model(), optimizers.sgd(0.0), TrainingConfig())
  losses = [float(still.train_step(batch)) for _ in range(2)]
  assert abs(losses[0] - losses[1]) > 1e-5 and abs(losses[0] - before[0]) > 1e-5
  assert still.eval_step(batch)["loss"] == before[0]


def test_exact_resume(tmp_path):
  data = toys.batches(7, rows=4)
  whole = run(tmp_path / "whole", data, data[:2], model=model())
  run(tmp_path / "cut", data, data[:2], model=model(), max_steps=3)
  cut = run(tmp_path / "cut", data, data[:2], model=model())
  assert cut[0] == 3 and same(cut, whole)
  plain = run(tmp_path / "plain", data, data[:2], model=model(dropout=0.0))
  assert not trainers.equal(plain[1], whole[1])


@pytest.mark.parametrize("remat", ["none", "block"])
def test_split_invariance(remat):
  drills.check_split_invariance(
    lambda parts: trainer(parts, remat=remat, scan_layers=True), toys.batch(0), toys.cut
  )


def test_layers_of_one_micro_batch_and_micro_batches_differ():
  """Two equal micro-batches give other gradients than one of them twice."""
  half = toys.batch(0, rows=4)
  twice = {k: np.concatenate([v, v]) for k, v in half.items()}
  one = drills.gradients(trainer(), [half])
  both = drills.gradients(trainer(2), toys.cut(twice, 2))
  name = "layers.attn.q_proj.lora_a"
  assert np.abs(one[name] - both[name]).max() > 1e-6 * np.abs(one[name]).max()
