import json

import numpy as np
import pytest

from tests import drills, optimizers, toys, toys_text
from tests.sft.dpo import preferences
from tunix.models import lora
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.preference_config import PreferenceConfig
from tunix.sft.dpo.preference_trainer import PreferenceTrainer


def trainer(model, logps, ref=None):
  config = PreferenceConfig(pbar_description=None)
  return PreferenceTrainer(
    model, ref, optimizers.sgd(0.1), config, reference_logps=logps
  )


def test_they_are_those_of_the_reference_in_any_order_and_padding(tmp_path):
  batch = preferences.pairs(rows=4)
  logps = PrecomputedLogps.write(
    tmp_path, preferences.model(1), preferences.cut(batch, 2)
  )
  assert len(logps) == 8
  turned = {k: x[::-1] for k, x in batch.items()}
  turned = {
    k: np.pad(x, ((0, 1), (2, 0) if "prompt" in k else (0, 2)))
    for k, x in turned.items()
  }
  want = drills.gradients(preferences.trainer(ref=preferences.model(1)), [turned])
  got = trainer(
    preferences.model(), PrecomputedLogps(tmp_path), ref=preferences.model(1)
  )
  assert got._reference is None
  drills.assert_same_gradients(drills.gradients(got, [turned]), want)


def test_answers_that_differ_in_what_is_not_scored_are_two(tmp_path):
  """A tool's words between two turns of the assistant: seen, not scored."""
  batch = preferences.pairs(rows=2)
  batch = {name: np.repeat(x[:1], 2, axis=0) for name, x in batch.items()}
  batch["chosen_ids"][:] = [[4, 5, 6, 7, 0], [4, 5, 16, 7, 0]]
  batch["chosen_mask"][:] = [1, 1, 0, 1, 0]
  logps = PrecomputedLogps.write(tmp_path, preferences.model(1), [batch])
  (one, same), (other, again) = logps.logps(batch, np.ones(2))
  assert len(logps) == 3 and one != other and same == again
  all_scored = {**batch, "chosen_mask": batch["chosen_mask"].copy()}
  all_scored["chosen_mask"][:, 2] = 1
  with pytest.raises(ValueError, match="is not in"):
    logps.logps(all_scored, np.ones(2))


def test_files_of_an_older_format_are_refused(tmp_path):
  keys, logps = np.zeros((1, 16), np.uint8), np.zeros(1, np.float32)
  about = '{"model": "a stamp"}'
  np.savez(tmp_path / "reference_logps.npz", about=about, keys=keys, logps=logps)
  with pytest.raises(ValueError, match=r"has format 1; .*write it again"):
    PrecomputedLogps(tmp_path)


def test_a_folder_of_the_format_before_is_read_and_added_to(tmp_path):
  """One file for all, with keys of bytes: what the version before wrote."""
  batch, model = preferences.pairs(0), preferences.model()
  new = PrecomputedLogps.write(tmp_path / "new", model, [batch])
  want, (path,) = new.logps(batch, np.ones(4)), new._rows._files
  file = np.load(path)
  old = tmp_path / "old"
  old.mkdir()
  np.savez(
    old / "reference_logps.npz",
    about=json.dumps({"format": 2, "model": new.model_stamp}),
    keys=np.asarray(
      [list(bytes.fromhex(key.decode())) for key in file["key"]], np.uint8
    ),
    logps=np.asarray(file["logps"]),
  )
  again = PrecomputedLogps(old)
  np.testing.assert_array_equal(again.logps(batch, np.ones(4)), want)
  assert len(again) == 8
  more = PrecomputedLogps.write(old, model, [batch, preferences.pairs(1)])
  assert len(more) == 16 and len(list(old.glob("rows-*.npy"))) == 1
  np.testing.assert_array_equal(more.logps(batch, np.ones(4)), want)


def test_a_writer_that_was_killed_goes_on_where_it_was(tmp_path):
  def dying():
    yield preferences.pairs(0)
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    PrecomputedLogps.write(tmp_path, preferences.model(), dying())
  with pytest.raises(FileNotFoundError, match="not all of them"):
    PrecomputedLogps(tmp_path)
  [first] = tmp_path.glob("rows-*.npy")
  with pytest.raises(ValueError, match="log-probabilities of the model"):
    PrecomputedLogps.write(tmp_path, preferences.model(1), [preferences.pairs(0)])
  both = [preferences.pairs(0), preferences.pairs(1)]
  assert len(PrecomputedLogps.write(tmp_path, preferences.model(), both)) == 16
  assert first.exists() and len(list(tmp_path.glob("rows-*.npy"))) == 2


def test_they_belong_to_one_model(tmp_path):
  logps = PrecomputedLogps.write(tmp_path, preferences.model(), [preferences.pairs()])
  trainer(preferences.model(), logps)  # the policy starts from the reference
  trainer(lora.apply(preferences.model(), toys.default_lora()), logps)
  trainer(preferences.model(1), logps, ref=preferences.model())
  for model, ref in (
    (preferences.model(1), None),
    (preferences.model(), preferences.model(1)),
  ):
    with pytest.raises(ValueError, match="log-probabilities of the model"):
      trainer(model, logps, ref)
  with pytest.raises(ValueError, match="log-probabilities of the model"):
    PrecomputedLogps.write(tmp_path, preferences.model(1), [preferences.pairs()])


def test_writing_again_adds(tmp_path):
  first, second = preferences.pairs(0), preferences.pairs(1)
  assert len(PrecomputedLogps.write(tmp_path, preferences.model(), [first])) == 8
  # Of an adapted model, what lies below its adapters.
  assert (
    len(PrecomputedLogps.write(tmp_path, preferences.model(lora_rank=2), [second]))
    == 16
  )
  assert len(PrecomputedLogps(tmp_path)) == 16


def test_unknown_pairs_and_broken_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="not all of them"):
    PrecomputedLogps(tmp_path)
  logps = PrecomputedLogps.write(tmp_path, preferences.model(), [preferences.pairs(0)])
  t = trainer(preferences.model(), logps)
  with pytest.raises(
    ValueError, match="chosen completion of row 0 of the batch is not in"
  ):
    t.train_step(preferences.pairs(1))
  [path] = logps.folder.glob("rows-*.npy")
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(ValueError, match="is damaged"):
    PrecomputedLogps(tmp_path)


def test_text(tmp_path):
  tokenizer = toys_text.chat_tokenizer(None)
  model = preferences.model(vocab_size=tokenizer.vocab_size)
  config = PreferenceConfig(
    max_prompt_length=8, max_response_length=8, bad_rows="skip", pbar_description=None
  )
  data = [{"prompt": ["a", "b"], "chosen": [" x", ""], "rejected": [" y", " z"]}]
  logps = PrecomputedLogps.write(tmp_path, model, data, config, tokenizer)
  assert len(logps) == 2  # the row without weight is left out
  t = PreferenceTrainer(
    model, None, optimizers.sgd(0.1), config, tokenizer, reference_logps=logps
  )
  assert t.eval_step(data[0])["rewards/margin"] == pytest.approx(0.0, abs=1e-5)
