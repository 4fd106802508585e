"""Records on disk: torn and damaged ones, and the order of their effects."""

import pytest

from tunix.rl import journal
from tunix.rl.journal import Journal, JournalError, RecordFile


def path_of(folder):
  return folder / journal.DECISIONS


def written(folder):
  """The bytes of a journal with two decisions and an ended group."""
  made = Journal(folder)
  made.check({"lag": 1})
  made.add("start", 0)
  made.end(3, (0, 1), "digest", made.store({"tokens": [1, 2]}))
  made.close()
  return path_of(folder).read_bytes()


def test_a_record_that_is_cut_off_anywhere_is_dropped_and_written_again(tmp_path):
  data = written(tmp_path)
  ends = [at for at, _ in RecordFile(path_of(tmp_path)).records] + [len(data)]
  assert len(ends) == 4
  for length in (0, 5, *(end + d for end in ends[:-1] for d in (0, 5, 11, 12, 13))):
    path_of(tmp_path).write_bytes(data[:length])
    torn = Journal(tmp_path)
    kept = sum(end <= length for end in ends[1:])
    assert len(torn.decisions) == kept
    assert (0, 1) not in torn.ended
    torn.add("start", 5)
    torn.close()
    again = Journal(tmp_path)
    assert again.decisions[kept:] == [["start", 5]]
    again.close()


def test_a_damaged_byte_is_an_error_with_its_place(tmp_path):
  data = written(tmp_path)
  start = RecordFile(path_of(tmp_path)).records[1][0]
  end = RecordFile(path_of(tmp_path)).records[2][0]
  for at in range(start, end):
    damaged = bytearray(data)
    damaged[at] ^= 4
    path_of(tmp_path).write_bytes(damaged)
    with pytest.raises(JournalError, match=f"record at byte {start} of .*decisions"):
      Journal(tmp_path)
  path_of(tmp_path).write_bytes(b"a file of another program")
  with pytest.raises(JournalError, match="is not a journal"):
    Journal(tmp_path)


def test_ended_groups_are_read_again_and_stored_ones_that_did_not_end_are_not(tmp_path):
  written(tmp_path)
  first = Journal(tmp_path)
  first.store({"tokens": [9]})  # killed before the record of its end
  first.close()
  again = Journal(tmp_path)
  assert again.ended.keys() == {(0, 1)}
  assert again.content((0, 1)) == {"tokens": [1, 2]}
  again.end(4, (0, 0), "digest", again.store({"tokens": [3]}))
  assert again.content((0, 0)) == {"tokens": [3]}
  (tmp_path / journal.EPISODES).write_bytes(b"tunix journal 1\n")
  with pytest.raises(JournalError, match="episodes"):
    Journal(tmp_path).content((0, 1))


def test_other_settings_are_refused(tmp_path):
  written(tmp_path)
  with pytest.raises(JournalError, match="lag 1, and this run has 2"):
    Journal(tmp_path).check({"lag": 2})


def test_the_journal_of_another_run_is_not_changed(tmp_path):
  data = written(tmp_path)
  path_of(tmp_path).write_bytes(data[:-1])
  other = Journal(tmp_path, reads=True)
  assert other.decisions == [["run", {"lag": 1}], ["start", 0]]
  other.close()
  assert path_of(tmp_path).read_bytes() == data[:-1]
