"""Records on disk: torn and damaged ones, and the order of their effects."""

import os

import pytest

from tunix.rl import journal
from tunix.rl.journal import Journal, JournalError


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


def offsets(folder):
  return [at for at, _ in journal.read(path_of(folder))[0]]


def test_a_record_that_is_cut_off_anywhere_is_dropped_and_written_again(tmp_path):
  data = written(tmp_path)
  ends = offsets(tmp_path) + [len(data)]
  assert len(ends) == 4
  for length in (0, 5, *(end + d for end in ends[:-1] for d in (0, 5, 11, 12, 13))):
    path_of(tmp_path).write_bytes(data[:length])
    torn = Journal(tmp_path)
    kept = sum(end <= length for end in ends[1:])
    assert len(torn.decisions) == kept
    assert (0, 1) not in torn.ended
    torn.add("start", 5, "a")
    torn.close()
    again = Journal(tmp_path)
    assert again.decisions[kept:] == [["start", 5, "a"]]
    again.close()


def test_a_damaged_byte_is_an_error_with_its_place(tmp_path):
  data = written(tmp_path)
  _, start, end = offsets(tmp_path)
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
  with pytest.raises(JournalError, match=r"record at byte 16 of .*episodes"):
    damaged.content((0, 1))


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path, monkeypatch):
  made = Journal(tmp_path)
  made.check({"lag": 1})
  write = os.pwrite
  monkeypatch.setattr(os, "pwrite", lambda file, x, at: write(file, x[:-9], at))
  with pytest.raises(OSError, match="free some space"):
    made.store({"tokens": list(range(100))})
  monkeypatch.undo()
  # Another group's record, shorter than the part that was written.
  made.end(3, (0, 0), "digest", made.store({"tokens": [1]}))
  made.close()
  again = Journal(tmp_path)
  assert again.content((0, 0)) == {"tokens": [1]}
  records, end = journal.read(tmp_path / journal.EPISODES)
  assert len(records) == 1 and end == (tmp_path / journal.EPISODES).stat().st_size
  again.close()


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
