"""One global batch of preferences gives one gradient, however it is cut."""

import jax
import numpy as np
import pytest

from tests import drills
from tests.sft.dpo import preferences
from tunix.models import heads
from tunix.sft.dpo.kto_trainer import KTOTrainer
from tunix.sft.dpo.reward_trainer import RewardTrainer

slow = pytest.mark.slow


def policy(lora_rank):
  return preferences.model(lora_rank=lora_rank)


def reference(lora_rank):
  return None if lora_rank else preferences.model(1)


@pytest.mark.parametrize(
  ("loss", "lora_rank"),
  [
    pytest.param("sigmoid", 0, marks=slow),
    pytest.param("sigmoid", 2, marks=slow),
    # Another reference: one that ranks the pairs alike would make DPO of aot.
    pytest.param("aot", 0, marks=slow),
    pytest.param("bco_pair", 0, marks=pytest.mark.slow),
    pytest.param("orpo", 0, marks=pytest.mark.slow),
  ],
)
def test_pairs(loss, lora_rank, mesh_fsdp8):
  drills.check_split_invariance(
    lambda parts: preferences.trainer(
      policy(lora_rank),
      reference(lora_rank),
      loss=loss,
      gradient_accumulation_steps=parts,
    ),
    preferences.pairs(rows=32),
    preferences.cut,
    meshes=(mesh_fsdp8,),
  )


@pytest.mark.parametrize(
  ("loss", "lora_rank"),
  [("sigmoid", 2), pytest.param("aot", 0, marks=slow)],
)
def test_pairs_that_share_rows(loss, lora_rank, mesh_fsdp8):
  """Their gradient is that of rows of one sequence, in every cut and on a mesh."""
  whole = preferences.pairs(rows=16)
  make = lambda parts: preferences.trainer(
    policy(lora_rank),
    reference(lora_rank),
    loss=loss,
    gradient_accumulation_steps=parts,
  )
  want = drills.gradients(make(1), [whole])
  for parts in (1, 2):
    batches = preferences.shared(whole, 8, parts)
    assert batches[0]["input_tokens"].shape[0] == 8
    drills.assert_same_gradients(drills.gradients(make(parts), batches), want)
  with jax.set_mesh(mesh_fsdp8):
    batches = preferences.shared(whole, 8, 2)
    drills.assert_same_gradients(drills.gradients(make(2), batches), want)


@pytest.mark.parametrize(
  "lora_rank",
  [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=slow)],
)
def test_labelled_answers(lora_rank, mesh_fsdp8):
  drills.check_split_invariance(
    lambda parts: preferences.trainer(
      policy(lora_rank),
      reference(lora_rank),
      kind=KTOTrainer,
      gradient_accumulation_steps=parts,
    ),
    preferences.labelled(rows=32),
    preferences.cut,
    meshes=(mesh_fsdp8,),
  )


@pytest.mark.slow
def test_rewards(mesh_fsdp8):
  def trainer(parts):
    return preferences.trainer(
      heads.with_scores(preferences.model()),
      kind=RewardTrainer,
      centering=0.1,
      gradient_accumulation_steps=parts,
    )

  whole = preferences.pairs(rows=32)
  whole["margins"] = np.linspace(0, 2, 32).astype(np.float32)
  drills.check_split_invariance(trainer, whole, preferences.cut, meshes=(mesh_fsdp8,))


@pytest.mark.parametrize("loss", ["sigmoid", "aot", "aot_unpaired", "bco_pair"])
def test_micro_batches_of_different_sizes(loss):
  """And what a trainer that coupled pairs within a micro-batch alone would do is
  something else."""
  whole = preferences.pairs(rows=6)
  # Of equal lengths, or these alone would rank the pairs, alike for both models.
  for name in ("chosen_mask", "rejected_mask"):
    whole[name][:] = 1
  parts = [{k: x[:2] for k, x in whole.items()}, {k: x[2:] for k, x in whole.items()}]
  make = lambda n: preferences.trainer(
    policy(0), reference(0), loss=loss, beta=5.0, gradient_accumulation_steps=n
  )
  want = drills.gradients(make(1), [whole])
  drills.assert_same_gradients(drills.gradients(make(2), parts), want)
  if loss != "sigmoid":
    alone = [drills.gradients(make(1), [part]) for part in parts]
    mixed = {k: (2 * alone[0][k] + 4 * alone[1][k]) / 6 for k in want}
    with pytest.raises(AssertionError):
      drills.assert_same_gradients(mixed, want, tolerance=1e-3)


def test_answers_of_different_widths():
  """The batches of a window need not be padded alike."""
  whole = preferences.labelled(rows=4)
  narrow = {k: x[:2] for k, x in whole.items()}
  wide = {k: x[2:] for k, x in whole.items()}
  for part in ("ids", "mask"):
    wide[f"completion_{part}"] = np.pad(wide[f"completion_{part}"], ((0, 0), (0, 3)))
  make = lambda n: preferences.trainer(
    policy(2), kind=KTOTrainer, gradient_accumulation_steps=n
  )
  want = drills.gradients(make(1), [whole])
  drills.assert_same_gradients(drills.gradients(make(2), [narrow, wide]), want)


def test_pairs_that_share_rows_are_refused_where_rows_of_one_pair_are_needed():
  (shared,) = preferences.shared(preferences.pairs(), 4)
  make = lambda **more: preferences.trainer(policy(2), **more)
  with pytest.raises(ValueError, match="share rows, which cannot be cut into 2 micro"):
    make(gradient_accumulation_steps=2).train_step(shared)
  with pytest.raises(ValueError, match="shared_prompt is set and the pairs of the bat"):
    make(shared_prompt=True).train_step(shared)
