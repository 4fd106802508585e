"""The order of the effects of a journal's records, and journals of other runs.

Torn and damaged records: tests/utils/record_file_test.py.
"""

import pytest

from tunix.rl.schedules import journal
from tunix.rl.schedules.journal import Journal, JournalError
from tunix.utils.record_file import RecordError


def path_of(folder):
  return folder / journal.DECISIONS


def written(folder):
  """The bytes of a journal with two decisions and an ended group."""
  made = Journal(folder)
  made.check({"lag": 1})
  made.add("start", 0, "a")
  made.end(3, (0, 1), "digest", made.store({"tokens": [1, 2]}))
  made.close()
  return path_of(folder).read_bytes()


def test_a_torn_decision_is_dropped_and_a_damaged_one_is_refused(tmp_path):
  data = written(tmp_path)
  path_of(tmp_path).write_bytes(data[:-1])
  torn = Journal(tmp_path)
  assert len(torn.decisions) == 2 and not torn.ends
  torn.add("start", 5, "a")
  torn.close()
  again = Journal(tmp_path)
  assert again.decisions[2:] == [["start", 5, "a"]]
  again.close()
  path_of(tmp_path).write_bytes(data.replace(b'"lag":1', b'"lag":2'))
  with pytest.raises(RecordError, match=r"record at byte 16 of .*decisions"):
    Journal(tmp_path)


def test_ended_groups_are_read_again_and_stored_ones_that_did_not_end_are_not(tmp_path):
  written(tmp_path)
  first = Journal(tmp_path)
  first.store({"tokens": [9]})  # killed before the record of its end
  first.close()
  again = Journal(tmp_path)
  assert again.ends.keys() == {(0, 1)}
  assert again.content((0, 1)) == {"tokens": [1, 2]}
  again.end(4, (0, 0), "digest", again.store({"tokens": [3]}))
  assert again.content((0, 0)) == {"tokens": [3]}
  (tmp_path / journal.EPISODES).write_bytes(b"tunix journal 1\n")
  with pytest.raises(RecordError, match="episodes"):
    Journal(tmp_path).content((0, 1))


def test_episodes_that_are_cut_off_are_dropped_and_none_is_kept_in_memory(tmp_path):
  written(tmp_path)
  file = tmp_path / journal.EPISODES
  data = file.read_bytes()
  for cut in (1, len(data) - 20, len(data) - 16):
    file.write_bytes(data + data[16 : len(data) - cut])
    with_torn = Journal(tmp_path)
    assert with_torn.content((0, 1)) == {"tokens": [1, 2]}
    assert with_torn.store({"tokens": [3]}) == len(data)
    with_torn.close()
  file.write_bytes(data[:-1] + b"?")  # only its group cannot be read
  damaged = Journal(tmp_path)
  with pytest.raises(RecordError, match=r"record at byte 16 of .*episodes"):
    damaged.content((0, 1))


def test_a_journal_without_a_decision_is_not_replayed(tmp_path):
  Journal(tmp_path).close()
  empty = Journal(tmp_path, reads=True)
  with pytest.raises(JournalError, match="has no decision"):
    empty.check({"lag": 1})


def test_other_settings_are_refused(tmp_path):
  written(tmp_path)
  with pytest.raises(JournalError, match="lag 1, and this run has 2"):
    Journal(tmp_path).check({"lag": 2})


def test_the_journal_of_one_process_is_not_that_of_several(tmp_path, monkeypatch):
  assert journal.folder_of(tmp_path) == tmp_path
  written(tmp_path)
  monkeypatch.setattr("jax.process_count", lambda: 2)
  message = (
    "a run with 1 process, and this run has several: start as many processes as it"
  )
  with pytest.raises(JournalError, match=message):
    journal.folder_of(tmp_path)
  assert journal.folder_of(tmp_path / "new").name == "process_0"


def test_the_journal_of_another_run_is_not_changed(tmp_path):
  data = written(tmp_path)
  path_of(tmp_path).write_bytes(data[:-1])
  other = Journal(tmp_path, reads=True)
  assert other.decisions == [["run", {"lag": 1}], ["start", 0, "a"]]
  other.close()
  assert path_of(tmp_path).read_bytes() == data[:-1]
