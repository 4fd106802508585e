"""Teacher outputs on disk: written once, found by content, checked by stamp."""

import numpy as np
import optax
import pytest

from tests import drills, toys
from tests.distillation import trainers
from tests.sft import trainers as sft
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.strategies import LogitStrategy
from tunix.distillation.teacher_cache import TeacherCache, row_keys

K, WARMTH = 5, 1.5


@pytest.fixture(scope="module")
def known():
  return trainers.teacher()


@pytest.fixture
def filled(tmp_path, known):
  cache = TeacherCache(tmp_path, known, top_k=K, temperature=WARMTH)
  assert cache.fill([toys.batch(0), toys.batch(1)]) == 16
  return tmp_path


def strategy(k: int = K):
  return LogitStrategy(temperature=WARMTH, distill_top_k=k)


@pytest.mark.parametrize("k", [K, 0])
def test_training_from_the_cache_is_training_with_the_teacher(filled, known, k):
  alone = TeacherCache(filled)  # no teacher in memory
  batch = toys.batch(1)
  got = drills.gradients(trainers.trainer(strategy(k), known=alone), [batch])
  want = drills.gradients(trainers.trainer(strategy(), known=known), [batch])
  drills.assert_same_gradients(got, want)


def test_rows_are_found_in_any_batch(filled):
  cache = TeacherCache(filled)
  mixed = {
    k: np.concatenate([a[3:4], b[1:2]])
    for (k, a), b in zip(toys.batch(0).items(), toys.batch(1).values())
  }
  got = cache.look_up(mixed)
  np.testing.assert_array_equal(got.ids[0], cache.look_up(toys.batch(0)).ids[3])
  np.testing.assert_array_equal(got.logps[1], cache.look_up(toys.batch(1)).logps[1])


def test_a_second_fill_asks_nothing(filled, known):
  files = sorted(p.name for p in filled.iterdir())
  assert TeacherCache(filled, known).fill([toys.batch(1), toys.batch(0)]) == 0
  assert sorted(p.name for p in filled.iterdir()) == files


def test_no_logits_are_built(filled):
  t = trainers.trainer(strategy(), known=TeacherCache(filled))
  text = t.lower_train_step(toys.batch(0)).as_text()
  assert f"8x16x{toys.VOCAB}x" not in text


def test_rows_that_are_missing(filled, known):
  with pytest.raises(ValueError, match="8 of 8 rows are not in the cache"):
    TeacherCache(filled).look_up(toys.batch(2))
  with_teacher = TeacherCache(filled, known)
  with_teacher.look_up(toys.batch(2))  # is asked, and kept
  assert len(TeacherCache(filled)) == 24


def test_other_weights_are_refused(filled):
  with pytest.raises(ValueError, match="filled by a model with other weights"):
    TeacherCache(filled, trainers.teacher(seed=2))


def test_other_settings_are_refused(filled, tmp_path):
  with pytest.raises(ValueError, match="wants the top 6 words"):
    TeacherCache(filled, top_k=6)
  with pytest.raises(ValueError, match=r"at temperature 2\.0"):
    trainers.trainer(LogitStrategy(), known=TeacherCache(filled))
  with pytest.raises(ValueError, match="there is no teacher cache"):
    TeacherCache(tmp_path / "other")


def test_an_unfinished_file_is_not_there(filled, known):
  """Killed before the keys were written: the rows are asked for again."""
  (filled / "rows-000001.json").unlink()
  cache = TeacherCache(filled, known)
  assert len(cache) == 8
  assert cache.fill([toys.batch(1)]) == 8


def test_another_vocabulary_is_refused(filled):
  with pytest.raises(ValueError, match="90 words and the teacher 96"):
    DistillationTrainer(
      toys.model(vocab_size=90), TeacherCache(filled), strategy(), optax.sgd(0.1)
    )


def test_keys_tell_rows_apart():
  batch = toys.batch(0)
  keys = row_keys(batch)
  assert len(set(keys)) == 8
  other = {**batch, "segment_ids": batch["segment_ids"] + 1}
  assert not set(keys) & set(row_keys(other))
  assert keys == row_keys({**batch, "input_mask": batch["input_mask"] * 0})
  with pytest.raises(ValueError, match="without input_tokens"):
    row_keys({"words": batch["input_tokens"]})


def test_features_do_not_come_from_a_cache(filled):
  from tunix.distillation.strategies import FeaturePoolingStrategy
  from tunix.models.transformer.decoder_layer import DecoderLayer

  with pytest.raises(TypeError, match="features need a model"):
    trainers.trainer(
      FeaturePoolingStrategy(feature_layer=DecoderLayer), known=TeacherCache(filled)
    )


def test_resuming_needs_no_teacher(filled, tmp_path):
  config = TrainingConfig(
    pbar_description=None, checkpoint_root_directory=str(tmp_path / "run")
  )
  for steps in (1, 2):
    t = DistillationTrainer(
      toys.model(), TeacherCache(filled), strategy(), optax.adam(1e-2), config
    )
    t.train([toys.batch(0), toys.batch(1)][:steps])
    t.close()
    assert sft.history(t, "loss")
