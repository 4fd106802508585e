"""Teacher outputs on disk: written once, found by content, checked by stamp."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import drills, optimizers, toys
from tests.distillation import trainers
from tests.sft import trainers as sft
from tunix.data.reading import store
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
  with pytest.raises(ValueError, match="the top 6 tokens"):
    TeacherCache(filled, top_k=6)
  with pytest.raises(ValueError, match=r"at temperature 2\.0"):
    trainers.trainer(LogitStrategy(), known=TeacherCache(filled))
  with pytest.raises(ValueError, match="there is no teacher cache"):
    TeacherCache(tmp_path / "other")


def test_an_unfinished_file_is_not_there(filled, known):
  """Killed before the file had its name: the rows are asked for again."""
  last = max(filled.glob("rows-*.npy"))
  last.rename(last.with_name(f"{last.name}.x1"))
  cache = TeacherCache(filled, known)
  assert len(cache) == 8
  assert cache.fill([toys.batch(0), toys.batch(1)]) == 8


@pytest.mark.parametrize("interleaved", [False, True])
def test_two_writers_of_a_folder_keep_each_others_rows(
  tmp_path, monkeypatch, interleaved
):
  known, batches = trainers.teacher(), [toys.batch(seed, rows=2) for seed in (0, 1)]
  want = [
    TeacherCache(tmp_path / f"alone{n}", known, top_k=K).look_up(batch)
    for n, batch in enumerate(batches)
  ]
  folder = tmp_path / "shared"
  one, other = (TeacherCache(folder, known, top_k=K) for _ in range(2))
  if interleaved:  # the other one writes while the first is at it
    write, turns = store.write_atomic, [lambda: other.fill(batches[1:])]

    def writes(path, data):
      write(path, data)
      if turns:
        turns.pop()()

    monkeypatch.setattr(store, "write_atomic", writes)
  one.fill(batches[:1])
  other.fill(batches[1:])
  later = TeacherCache(folder)
  assert len(later) == 4
  for batch, right in zip(batches, want):
    np.testing.assert_array_equal(later.look_up(batch).ids, right.ids)
    np.testing.assert_array_equal(later.look_up(batch).logps, right.logps)


def test_rows_stay_on_disk(filled):
  rows = TeacherCache(filled)._rows
  assert rows._files and all(isinstance(rows._rows(f), np.memmap) for f in rows._files)


def test_rows_are_told_apart_by_all_that_the_teacher_sees(tmp_path):
  """Its own fields too; a reader without the teacher knows them from the folder."""

  class Toned(nnx.Module):
    def __init__(self):
      self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, tokens, attention_mask=None, tone=None):
      shift = jnp.zeros(tokens.shape)
      if attention_mask is not None:
        shift += jnp.sum(attention_mask, -1)
      if tone is not None:
        shift += tone[:, None]
      return self.scale * jnp.sin(tokens[..., None] + shift[..., None] * jnp.arange(9))

  tokens = np.arange(6).reshape(2, 3)
  base = {
    "input_tokens": tokens,
    "attention_mask": np.tril(np.ones((2, 3, 3), bool)),
    "tone": np.asarray([0.1, 0.2]),
  }
  others = [
    {**base, "attention_mask": np.ones((2, 3, 3), bool)},
    {**base, "tone": np.asarray([0.3, 0.4])},
  ]
  cache = TeacherCache(tmp_path, Toned(), top_k=2)
  assert cache.fill([base, *others]) == 6
  assert cache.fill([{**base, "unseen": tokens}]) == 0
  alone = TeacherCache(tmp_path)
  for other in others:
    assert np.any(alone.look_up(other).logps != alone.look_up(base).logps)


def test_too_many_words_leave_no_folder(tmp_path, known):
  folder = tmp_path / "new"
  with pytest.raises(ValueError, match="top_k is 97"):
    TeacherCache(folder, known, top_k=97)
  TeacherCache(folder, known, top_k=K)


def test_another_vocabulary_is_refused(filled):
  with pytest.raises(ValueError, match=r"student has 90 .*teacher 96"):
    DistillationTrainer(
      trainers.fresh_student(vocab_size=90),
      TeacherCache(filled),
      strategy(),
      optimizers.sgd(0.1),
    )


def test_keys_tell_rows_apart():
  fields = ("input_tokens", "positions", "segment_ids")
  batch = toys.batch(0)
  keys = row_keys(batch, fields)
  assert len(set(keys)) == 8
  other = {**batch, "segment_ids": batch["segment_ids"] + 1}
  assert not set(keys) & set(row_keys(other, fields))
  assert keys == row_keys({**batch, "input_mask": batch["input_mask"] * 0}, fields)
  with pytest.raises(ValueError, match="expected input_tokens"):
    row_keys({"words": batch["input_tokens"]}, fields)


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
      trainers.fresh_student(),
      TeacherCache(filled),
      strategy(),
      optimizers.adam(1e-2),
      config,
    )
    t.train([toys.batch(0), toys.batch(1)][:steps])
    t.close()
    assert sft.history(t, "loss")
