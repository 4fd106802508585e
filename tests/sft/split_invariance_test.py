"""One global batch gives one gradient, however it is cut and wherever it runs."""

import numpy as np
import pytest

from tests import drills, optimizers, toys
from tests.sft import trainers


@pytest.mark.parametrize(
  ("lora_rank", "layers", "meshes", "cuts"),
  [
    pytest.param(0, 1, ("mesh_fsdp8", "mesh_fsdp4_tp2"), (1, 2, 4), id="full"),
    # As users compile it, which takes three times as long: so fewer cuts.
    pytest.param(2, 2, ("mesh_fsdp4_tp2",), (2,), id="lora", marks=pytest.mark.shipped),
  ],
)
def test_split_invariance(lora_rank, layers, meshes, cuts, request):
  drills.check_split_invariance(
    lambda parts: trainers.trainer(
      toys.model(lora_rank=lora_rank, num_layers=layers),
      gradient_accumulation_steps=parts,
    ),
    whole := toys.batch(0, rows=32),
    toys.cut,
    packed=toys.packed(whole),
    meshes=[request.getfixturevalue(mesh) for mesh in meshes],
    cuts=cuts,
  )


def test_micro_batches_of_different_weights():
  """A mean of means would be wrong here: the second half has few trained tokens."""
  whole = toys.batch(0, rows=8)
  whole["input_mask"][4:, 3:] = 0
  whole["input_mask"][4:, 1] = 1
  makes = [
    trainers.trainer(toys.model(num_layers=1), gradient_accumulation_steps=n)
    for n in (1, 2)
  ]
  got = [drills.gradients(t, toys.cut(whole, n)) for t, n in zip(makes, (1, 2))]
  drills.assert_same_gradients(got[1], got[0])
  halves = [drills.gradients(makes[0], [part]) for part in toys.cut(whole, 2)]
  means = {k: (halves[0][k] + halves[1][k]) / 2 for k in halves[0]}
  with pytest.raises(AssertionError):
    drills.assert_same_gradients(means, got[0], tolerance=1e-2)


def test_the_accumulated_update_is_the_update_of_the_whole():
  whole = toys.batch(0)
  weights = []
  for parts in (1, 4):
    model = toys.model(num_layers=1)
    t = trainers.trainer(model, optimizers.sgd(0.5), gradient_accumulation_steps=parts)
    t.train(toys.cut(whole, parts))
    assert (t.train_steps, t.iter_steps) == (1, parts)
    weights.append(trainers.leaves(model))
  for name, value in weights[0].items():
    np.testing.assert_allclose(weights[1][name], value, atol=1e-6)
