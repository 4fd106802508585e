"""Models that are not ours: dropout, four arguments, qwix."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.sft import trainers
from tests.sft.trainers import smalls, trainer
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.config import CheckpointOptions

EVERY = CheckpointOptions(save_every_n_steps=1, asynchronous=False)


def dropping():
  return trainers.tokens_only(rate=0.5)


def test_dropout_advances_is_saved_and_is_off_in_evaluation(tmp_path):
  model = dropping()
  t = trainer(
    model, checkpoint_root_directory=str(tmp_path), checkpointing_options=EVERY
  )
  assert t.eval_step(trainers.small(0)) == t.eval_step(trainers.small(0))
  t.train(smalls(2), smalls(1))
  assert int(model.dropout.rngs.count[...]) == 2
  t.close()
  other = dropping()
  t = trainer(
    other, checkpoint_root_directory=str(tmp_path), checkpointing_options=EVERY
  )
  assert int(other.dropout.rngs.count[...]) == 2
  t.train(smalls(4), smalls(1))
  t.close()
  whole = dropping()
  trainer(whole).train(smalls(4), smalls(1))
  assert trainers.equal(trainers.leaves(other), trainers.leaves(whole))
  assert not model.dropout.deterministic


def test_four_arguments_train_packed_as_padded():
  padded = toys.batch(0, rows=4, length=8)
  losses = []
  for batch in (padded, toys.packed(padded)):
    t = trainer(toys.FourArguments(nnx.Rngs(0)))
    losses.append(float(t.train_step(batch)))
  np.testing.assert_allclose(*losses, rtol=1e-5)


class ThreeArguments(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(np.ones(3))

  def __call__(self, tokens, types, lengths):
    return tokens


def test_another_form_of_call_is_an_error_with_the_remedy():
  t = trainer(ThreeArguments())
  with pytest.raises(
    TypeError, match=r"takes \(tokens, types, lengths\).*with_loss_fn"
  ):
    t.train_step(trainers.small(0))
  t.with_loss_fn(lambda model, **batch: (model.w[...] ** 2).sum())
  assert float(t.train_step(trainers.small(0))) == 3


class Scores(nnx.Module):
  """A user's model whose matrices qwix can find."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(toys.VOCAB, 16, rngs=rngs)
    self.hidden = nnx.Linear(16, 16, rngs=rngs)
    self.out = nnx.Linear(16, toys.VOCAB, rngs=rngs)

  def __call__(self, tokens):
    return self.out(jax.nn.tanh(self.hidden(self.embed(tokens))))


def adapted():
  qwix = pytest.importorskip("qwix")
  provider = qwix.LoraProvider(module_path=".*hidden|.*out", rank=2, alpha=4.0)
  base = Scores(nnx.Rngs(0))
  tokens = np.zeros((1, 4), np.int32)
  return base, qwix.apply_lora_to_model(base, provider, tokens, rngs=nnx.Rngs(1))


@pytest.mark.filterwarnings("ignore")
def test_models_adapted_by_qwix_train_save_and_resume(tmp_path):
  base, model = adapted()
  lora = trainers.leaves(model, nnx.LoRAParam)
  frozen = trainers.leaves(base)
  assert len(lora) == 4
  folder = {"checkpoint_root_directory": str(tmp_path / "run")}
  t = trainer(model, tx=optimizers.adam(0.1), checkpointing_options=EVERY, **folder)
  with trainers.compilations() as names:
    t.train([trainers.small(0)] * 3)
  assert names.count("jit(step)") == 1
  assert trainers.history(t, "loss")[-1] < trainers.history(t, "loss")[0]
  t.close()
  trained = trainers.leaves(model, nnx.LoRAParam)
  assert all((trained[k] != lora[k]).any() for k in lora)
  assert trainers.equal(frozen, trainers.leaves(base))

  _, fresh = adapted()
  t = trainer(fresh, tx=optimizers.adam(0.1), checkpointing_options=EVERY, **folder)
  assert t.train_steps == 3
  assert trainers.equal(trained, trainers.leaves(fresh, nnx.LoRAParam))
  t.train([trainers.small(0)] * 4)
  t.close()
  _, whole = adapted()
  trainer(whole, tx=optimizers.adam(0.1)).train([trainers.small(0)] * 4)
  assert trainers.equal(trainers.leaves(fresh), trainers.leaves(whole))

  manager = CheckpointManager(tmp_path / "lora")
  assert manager.save(1, fresh, save_only_lora_params=True)
  manager.close()
  arrays = CheckpointManager(tmp_path / "lora")
  _, last = adapted()
  assert arrays.restore(last, restore_only_lora_params=True)[0] == 1
  assert trainers.equal(
    trainers.leaves(fresh, nnx.LoRAParam), trainers.leaves(last, nnx.LoRAParam)
  )
