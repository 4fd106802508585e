import logging
import math

import numpy as np
import pytest

from tests import optimizers, toys_text
from tests.sft import trainers
from tests.sft.dpo import preferences
from tunix.sft.dpo.kto_trainer import KTOConfig, KTODataInput, KTOTrainer


def trainer(model=None, ref=None, **options):
  return preferences.trainer(model, ref, kind=KTOTrainer, **options)


def shifted(batch):
  """Every prompt with the answer of the row before."""
  moved = {
    k: np.roll(batch[k], 1, axis=0) for k in ("completion_ids", "completion_mask")
  }
  return {**batch, **moved}


def by_hand(model, ref, batch, beta, good=1.0, bad=1.0):
  ratio = lambda b: (
    preferences.logps(model, b, "completion") - preferences.logps(ref, b, "completion")
  )
  own, z0 = ratio(batch), max(0.0, ratio(shifted(batch)).mean())
  sigmoid = lambda x: 1 / (1 + math.exp(-x))
  losses = [
    good * (1 - sigmoid(beta * (r - z0))) if d else bad * (1 - sigmoid(beta * (z0 - r)))
    for r, d in zip(own, batch["labels"])
  ]
  return np.mean(losses), own, z0


def case():
  """Two models and a batch whose z0 is not 0."""
  model, ref, batch = (
    preferences.model(0),
    preferences.model(1),
    preferences.labelled(3, rows=5),
  )
  batch["labels"] = np.array([True, False, True, True, False])
  if by_hand(model, ref, batch, 1.0)[2] == 0:
    model, ref = ref, model
  return model, ref, batch


def test_loss_and_metrics_by_hand():
  model, ref, batch = case()
  loss, own, z0 = by_hand(model, ref, batch, 0.4, good=1.5, bad=0.5)
  assert z0 > 0
  t = trainer(model, ref, beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
  got = t.eval_step(batch)
  np.testing.assert_allclose(got["loss"], loss, rtol=1e-4)
  np.testing.assert_allclose(got["kl"], z0, rtol=1e-3)
  labels = batch["labels"]
  np.testing.assert_allclose(got["rewards/chosen"], 0.4 * own[labels].mean(), rtol=1e-3)
  bad = 0.4 * own[~labels].mean()
  np.testing.assert_allclose(got["rewards/rejected"], bad, rtol=1e-3)
  assert "chosen_share" not in got
  np.testing.assert_allclose(t.train_step(batch), loss, rtol=1e-4)


def test_padding_counts_nowhere():
  model, ref, batch = case()
  want = trainer(model, ref).eval_step(batch)
  got = trainer(model, ref).eval_step(preferences.with_padding(batch, 8))
  assert got == pytest.approx(want, rel=1e-5)


def test_z0_is_of_the_whole_global_batch():
  model, ref, batch = case()
  batch = {k: x[:4] for k, x in batch.items()}
  _, _, z0 = by_hand(model, ref, batch, 0.1)
  t = trainer(model, ref, gradient_accumulation_steps=2)
  t.train(preferences.cut(batch, 2))
  np.testing.assert_allclose(trainers.history(t, "kl"), [z0], rtol=1e-3)


def test_a_row_alone_has_no_other_to_compare_with():
  batch = {k: x[:1] for k, x in preferences.labelled().items()}
  assert trainer(ref=preferences.model(1)).eval_step(batch)["kl"] == 0.0


def test_one_kind_of_label_is_counted_and_warned_of(caplog):
  batch = preferences.labelled()
  batch["labels"][:] = True
  t = trainer(preferences.model(lora_rank=2))
  with caplog.at_level(logging.WARNING):
    for _ in range(3):
      t.train_step(batch)
  said = [
    r.getMessage() for r in caplog.records if "completions of one kind" in r.message
  ]
  assert len(said) == 1 and "so far: 1 (all desirable: shuffle" in said[0]
  t._reporter.flush()
  assert trainers.history(t, "rewards/rejected") == [0.0] * 3


def test_text():
  tokenizer = toys_text.chat_tokenizer("chatml")
  model = preferences.model(vocab_size=tokenizer.vocab_size, lora_rank=2)
  config = KTOConfig(max_prompt_length=16, max_response_length=8, pbar_description=None)
  t = KTOTrainer(model, None, optimizers.sgd(0.1), config, tokenizer)
  ask = [{"role": "user", "content": "hello"}]
  t.train([KTODataInput([ask, "hi"], ["yes", " b"], [True, False])])
  assert t.train_steps == 1


def test_a_reference_is_needed():
  with pytest.raises(ValueError, match=r"ref_model is None.*'kto'"):
    trainer()
  with pytest.raises(ValueError, match="both must be >= 0"):
    KTOConfig(desirable_weight=-1.0)


def test_with_loss_fn_is_a_loss_of_completions():
  def clone(logps, ref_logps, labels, weights, *, kl):
    del ref_logps, weights, kl
    return -logps * labels, {"share": labels.astype(logps.dtype)}

  model, ref, batch = case()
  t = trainer(model, ref).with_loss_fn(clone, has_aux=True)
  got = t.eval_step(batch)
  want = -preferences.logps(model, batch, "completion") * batch["labels"]
  np.testing.assert_allclose(got["loss"], want.mean(), rtol=1e-4)
  assert got["share"] == pytest.approx(batch["labels"].mean())
