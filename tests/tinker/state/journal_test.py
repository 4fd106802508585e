"""Folders of runs on disk: those of an earlier version, and damaged ones.

Each bit of a journal: tests/utils/record_file_test.py.
"""

import tarfile
from unittest import mock

import numpy as np
import pytest

from tests.golden import resume_jobs
from tests.utils.record_file_test import flipped, put
from tunix.cli.commands import serve
from tunix.tinker.service import LOCK, Service
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state import journal, state_file
from tunix.tinker.state.checkpoints import Checkpoints, Place
from tunix.tinker.state.records import Records
from tunix.tinker.state.runs import Op, Run
from tunix.utils import array_codec, folder_lock, io
from tunix.utils.record_file import MAGIC, RecordError

SETTINGS = TinkerSettings(keep_results=2)


def unpack(root):
  """Writes the folder of the service that tests/golden/make_tinker.py made."""
  with tarfile.open(resume_jobs.BEFORE / "tinker.tar.xz") as tar:
    tar.extractall(root, filter="data")


@pytest.fixture
def before(tmp_path):
  unpack(tmp_path)
  return tmp_path


def folder_of(root):
  """Returns the folder of its run."""
  (file,) = (root / "runs").glob("*/state-1")
  return file.parent


def words(root):
  return ["missing", "--port", "0", "--tinker", "--tinker_root", str(root)]


def same(one, other):
  return one.keys() == other.keys() and all(
    np.array_equal(one[name], other[name]) for name in one
  )


def contents(run):
  """What a run knows: results by number, and the requests after its state."""
  results = [(n, x.values, x.arrays, x.error) for n, x in run.results.items()]
  waiting = [run.next(), run.last, run.pending]
  return repr((run.done, results, waiting, run.stored_state()))


def test_a_run_of_an_earlier_version_goes_on(before):
  folder = folder_of(before)
  (folder / "current").write_text("1\n")  # as a person repairs it
  run = Run(folder, SETTINGS)
  assert run.done == 4 and run.last == 9 and run.pending == 1
  assert run.results.get(6).arrays["logprobs"].shape == (6,)
  assert run.result(7).values["metrics"]["grad_norm"] > 0
  assert int(run.stored_state()["optimizer.0"]) == 2
  # Requests that are sent again are the same ones.
  number, op = run.next()
  run.accept(number, op)
  run.close()
  known = contents(run)
  assert (folder / "journal-1").read_bytes().startswith(MAGIC)
  again = Run(folder, SETTINGS)
  assert contents(again) == known
  again.accept(8, Op(kind="optim_step", args={"learning_rate": 0.5}))
  again.close()
  assert Run(folder, SETTINGS).pending == 2
  # The next state and journal are those of this version.
  state = again.stored_state()
  again.write_state(state)
  again.switch()
  again.close()
  final = Run(folder, SETTINGS)
  assert same(final.stored_state(), state) and final.pending == 2
  assert (folder / "state-2").read_bytes().startswith(MAGIC)
  final.close()


def test_checkpoints_and_samples_of_an_earlier_version_are_read(before):
  place = Place(Run(folder_of(before), SETTINGS).id, "weights", "one")
  arrays = Checkpoints(before / "checkpoints", "base").arrays(place)
  assert int(arrays["optimizer.0"]) == 2 and len(arrays) > 10
  log = journal.opened(before / "samples" / "requests")
  ((meta, prompt),) = map(array_codec.from_bytes, log.records())
  log.close()
  assert meta["args"]["num_samples"] == 2 and prompt["prompt"].tolist() == [3, 4, 5]


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", ["journal-1", "state-1", "current"])
def test_a_damaged_run_is_refused_and_its_files_stay(before, name, is_old):
  file = folder_of(before) / name
  if not is_old:
    run = Run(file.parent, SETTINGS)
    state_file.write(file.parent / "state-1", *state_file.read(file.parent / "state-1"))
    run.close()
  if is_old and name == "state-1":  # without checksums, only a missing byte is noticed
    file.write_bytes(file.read_bytes()[:-1])
  else:
    data = file.read_bytes()
    put(file, flipped(data, int(8 * 0.3 * len(data))))
  names = {x: x.read_bytes() for x in file.parent.iterdir()}
  with pytest.raises(RecordError, match=str(file)):
    serve.main(words(before))  # before it looks for the model
  assert names == {x: x.read_bytes() for x in file.parent.iterdir()}


def test_a_flipped_bit_of_a_json_file_is_refused_by_name_or_gives_another_value(before):
  folder = folder_of(before)
  (session,) = (before / "sessions").iterdir()
  opened = {folder / "info.json": lambda: Run(folder, SETTINGS).close()}
  opened[session] = lambda: Records(before, 9)
  for file, opens in opened.items():
    opens()
    data, refused = file.read_bytes(), 0
    for bit in range(0, 8 * len(data), 7):
      put(file, flipped(data, bit))
      try:
        opens()
      except RecordError as error:
        assert str(file) in str(error), bit
        refused += 1
    assert refused > len(data) / 8
    put(file, data)


def test_a_state_is_refused_at_each_bit_and_each_length(tmp_path):
  file = tmp_path / "state"
  arrays = {"a": np.arange(3, dtype=np.float32), "b": np.array(1.5)}
  state_file.write(file, {"done": 3}, arrays)
  meta, found = state_file.read(file)
  assert meta == {"done": 3} and same(found, arrays)
  data = file.read_bytes()
  for bit in range(8 * len(data)):
    put(file, flipped(data, bit))
    with pytest.raises(RecordError):
      state_file.read(file)
  for length in range(len(data)):
    put(file, data[:length])
    with pytest.raises(RecordError):
      state_file.read(file)


@pytest.mark.parametrize(
  "text", ["", "{", "[]", "{}", '{"time": "x", "is_ephemeral": false}']
)
def test_a_damaged_checkpoint_is_refused_by_name_and_not_listed(tmp_path, text, caplog):
  made = Checkpoints(tmp_path, "base")
  places = [Place("a0", "weights", name) for name in ("good", "bad")]
  for place in places:
    made.save(place, {}, None, {"request": "", "spec": {}, "is_ephemeral": False})
  (file,) = tmp_path.rglob("bad/meta.json")
  file.write_text(text)
  with pytest.raises(RecordError, match=str(file)):
    made.meta(places[1])
  assert [place for place, _ in made.named(["a0"])] == places[:1]
  assert str(places[1]) in caplog.text
  made.delete(places[1])


def test_a_large_state_has_several_records(tmp_path, monkeypatch):
  monkeypatch.setattr(state_file, "_MOST", 64)
  arrays = {"a": np.arange(100.0)}
  state_file.write(tmp_path / "state", {}, arrays)
  assert same(state_file.read(tmp_path / "state")[1], arrays)
  data = (tmp_path / "state").read_bytes()
  (tmp_path / "state").write_bytes(data[: 16 + 5 * (12 + 64)])  # whole records
  with pytest.raises(RecordError, match="is cut off or damaged"):
    state_file.read(tmp_path / "state")


def test_a_kill_while_a_journal_is_converted_leaves_the_old_one(before, monkeypatch):
  file = folder_of(before) / "journal-1"
  data = file.read_bytes()
  with monkeypatch.context() as patch:
    patch.setattr(io.os, "replace", mock.Mock(side_effect=OSError("killed")))
    with pytest.raises(OSError, match="killed"):
      journal.opened(file)
  assert file.read_bytes() == data
  assert len(list(journal.opened(file).records())) > 3


def test_two_services_do_not_write_to_one_folder(tmp_path):
  settings = TinkerSettings(root=tmp_path)
  with folder_lock.hold(tmp_path, *LOCK):
    for start in (lambda: Service(None, settings), lambda: serve.main(words(tmp_path))):
      with pytest.raises(RuntimeError, match=r"is serving .*another root"):
        start()
