import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests import optimizers
from tests.sft.dpo import preferences
from tunix.generate import scoring
from tunix.models import heads, safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.rl import inference_worker
from tunix.rl.config import Role
from tunix.sft.dpo.reward_trainer import RewardConfig, RewardTrainer


def scored(seed=0, **options):
  return heads.with_scores(preferences.model(seed, **options))


def trainer(model=None, **options):
  model = scored() if model is None else model
  return preferences.trainer(model, kind=RewardTrainer, **options)


def rewards(model, batch):
  """The last score of every row."""
  last = lambda name: [x[-1, 0] for x, _ in preferences.outputs(model, batch, name)]
  return np.asarray([last("chosen"), last("rejected")])


def test_loss_and_metrics_by_hand():
  batch, model = preferences.pairs(rows=2), scored()
  batch["margins"] = np.asarray([0.5, 1.0], np.float32)
  chosen, rejected = rewards(model, batch)
  losses = [
    math.log1p(math.exp(-(c - r - m))) + 0.3 * (c + r) ** 2
    for c, r, m in zip(chosen, rejected, batch["margins"])
  ]
  got = trainer(model, centering=0.3).eval_step(batch)
  np.testing.assert_allclose(got["loss"], np.mean(losses), rtol=1e-4)
  np.testing.assert_allclose(got["rewards/chosen"], chosen.mean(), rtol=1e-4)
  np.testing.assert_allclose(
    got["rewards/margin"], (chosen - rejected).mean(), rtol=1e-3
  )
  assert got["rewards/accuracy"] == (chosen > rejected).mean()


def test_margins_and_centering_change_the_loss():
  batch = preferences.pairs()
  plain = trainer().eval_step(batch)["loss"]
  assert trainer(centering=0.3).eval_step(batch)["loss"] > plain
  assert trainer().eval_step({**batch, "margins": np.ones(4)})["loss"] > plain


def test_padding_changes_nothing():
  batch = preferences.pairs(rows=3)
  want = trainer(centering=0.1).eval_step(batch)
  got = trainer(centering=0.1).eval_step(preferences.with_padding(batch, 5))
  assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_it_learns_and_serves_as_the_reward_role(lora_rank, tmp_path):
  """One pair is learned by heart; then the model scores it, saved and loaded too."""
  model, batch = scored(lora_rank=lora_rank), preferences.pairs(rows=2)
  config = RewardConfig(pbar_description=None)
  t = RewardTrainer(model, optimizers.adam(1e-2), config)
  t.train([batch] * 15)
  rows = {
    "prompt_ids": batch["prompt_ids"],
    "prompt_mask": batch["prompt_mask"],
    "completion_ids": batch["chosen_ids"],
    "completion_mask": batch["chosen_mask"],
  }
  worse = {
    **rows,
    "completion_ids": batch["rejected_ids"],
    "completion_mask": batch["rejected_mask"],
  }
  worker = inference_worker.InferenceWorker({Role.REWARD: model})
  score = inference_worker.rewards_of
  good = worker.run(Role.REWARD, score, rows, None)
  assert (good > worker.run(Role.REWARD, score, worse, None)).all()
  if lora_rank:
    return
  safetensors_saver.save_pretrained(model, tmp_path)
  back = AutoModel.from_pretrained(tmp_path, num_scores=1)
  again = scoring.score_sequences(back, **rows)
  np.testing.assert_allclose(again, good, rtol=1e-4, atol=1e-5)


def test_a_language_model_is_refused():
  with pytest.raises(ValueError, match="has no scores a position"):
    trainer(preferences.model())
  with pytest.raises(ValueError, match="has 2 scores"):
    trainer(heads.with_scores(preferences.model(), 2))
  with pytest.raises(ValueError, match="centering is -1"):
    RewardConfig(centering=-1.0)


def test_with_loss_fn_is_a_loss_of_rewards():
  def hinge(chosen, rejected, *, margin):
    del margin
    return jnp.maximum(0, 1 - (chosen - rejected))

  batch = preferences.pairs()
  t = trainer()
  plain = t.eval_step(batch)
  got = t.with_loss_fn(hinge).eval_step(batch)
  assert got["loss"] != plain["loss"] and got["loss"] >= 0
