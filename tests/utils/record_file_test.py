"""Files of records: each bit that differs, and each place where a kill cuts them."""

import os
import struct
import zlib
from unittest import mock

import pytest

from tunix.tinker.state import journal
from tunix.utils import array_codec, io, record_file
from tunix.utils.record_file import RecordError, RecordFile

RECORDS = [array_codec.to_bytes({"n": 1}, {}), array_codec.to_bytes({}, {}), b"x"]


def new(path, records):
  record_file.write(path, records)


def old(path, records):
  """As the Tinker service wrote journals before they had checksums of heads."""
  heads = [struct.pack("<II", len(x), zlib.crc32(x)) for x in records]
  path.write_bytes(b"".join(head + x for head, x in zip(heads, records)))


# How a file is written, and the bytes before the first record and of each head. The
# Tinker service opens both; a run of RL opens the new one in the same way.
FORMS = {"new": (new, 16, 12), "old": (old, 0, 8)}


@pytest.fixture(params=FORMS)
def form(request, tmp_path):
  """Returns (path, bytes, offsets of the records and of the end)."""
  write, start, head = FORMS[request.param]
  write(tmp_path / "file", RECORDS)
  ends = [start]
  for record in RECORDS:
    ends.append(ends[-1] + head + len(record))
  data = (tmp_path / "file").read_bytes()
  assert len(data) == ends[-1]
  return tmp_path / "file", data, ends


def found(path):
  file = journal.opened(path)
  try:
    return list(file.records())
  finally:
    file.close()


def put(path, data):
  """Writes bytes over those of a file: to make it anew takes ten times as long."""
  with path.open("r+b") as file:
    file.write(data)
    if path.stat().st_size > len(data):
      file.truncate()


def flipped(data, bit):
  out = bytearray(data)
  out[bit // 8] ^= 1 << bit % 8
  return bytes(out)


def test_a_flipped_bit_is_refused_with_its_place(form):
  path, data, ends = form
  for bit in range(8 * len(data)):
    put(path, damaged := flipped(data, bit))
    with pytest.raises(RecordError) as error:
      found(path)
    at = max([x for x in ends if x <= bit // 8], default=None)
    text = str(error.value)
    assert f"byte {at} of {path}" in text or f"{path} begins with" in text, bit
    assert path.read_bytes() == damaged  # a copy of the file can still be compared


def test_a_cut_loses_the_unfinished_record_alone(form):
  path, data, ends = form
  for cut in range(len(data) + 1):
    put(path, data[:cut])
    kept = RECORDS[: sum(x <= cut for x in ends[1:])]
    assert found(path) == kept, cut
    file = journal.opened(path)
    file.append(b"more", sync=True)
    file.close()
    assert found(path) == [*kept, b"more"], cut
    assert path.read_bytes().startswith(record_file.MAGIC)


def test_a_flipped_bit_after_a_cut_loses_nothing_but_the_unfinished_record(form):
  path, data, ends = form
  torn = data[: ends[-1] - 1]
  for bit in range(8 * len(torn)):
    put(path, flipped(torn, bit))
    try:
      kept = found(path)
    except RecordError:
      continue
    assert kept == RECORDS[:-1] and bit // 8 >= ends[-2], bit


def test_zeros_at_the_end_are_refused(form):
  path, data, ends = form
  path.write_bytes(data + bytes(16))
  with pytest.raises(RecordError, match=f"byte {ends[-1]} of"):
    found(path)


def test_the_bytes_are_those_of_the_journals_of_earlier_runs(tmp_path):
  new(tmp_path / "file", [b'["run",{}]'])
  assert (tmp_path / "file").read_bytes() == b"tunix journal 1\n" + bytes.fromhex(
    "0a0000000679a8ea25f2a8ac" + b'["run",{}]'.hex()
  )
  (tmp_path / "file").write_bytes(b"tunix journal 2\n")
  with pytest.raises(RecordError, match=r"begins with b'tunix journal 2.*another vers"):
    RecordFile(tmp_path / "file")


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path, monkeypatch):
  made = RecordFile(tmp_path / "file")
  write = os.pwrite
  monkeypatch.setattr(os, "pwrite", lambda file, x, at: write(file, x[:-9], at))
  with pytest.raises(OSError, match="free some space"):
    made.append(100 * b"long")
  monkeypatch.undo()
  made.append(b"short")  # shorter than the part that was written
  made.close()
  assert found(tmp_path / "file") == [b"short"]
  assert (tmp_path / "file").stat().st_size == made.size


@pytest.mark.parametrize(("name", "is_new"), [("replace", False), ("open", True)])
def test_a_file_goes_on_after_a_rewrite_that_fails(tmp_path, monkeypatch, name, is_new):
  new(tmp_path / "file", RECORDS)
  file = RecordFile(tmp_path / "file")
  with monkeypatch.context() as patch:
    patch.setattr(io.os, name, mock.Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
      file.rewrite([b"new"])
  file.append(b"more")
  file.close()
  expected = [b"new"] if is_new else RECORDS
  assert list(RecordFile(tmp_path / "file").records()) == [*expected, b"more"]


def test_a_file_that_is_only_read_is_not_changed(form):
  path = form[0]
  journal.opened(path).close()
  path.write_bytes(torn := path.read_bytes()[:-1])
  file = RecordFile(path, reads=True)
  assert list(file.records()) == RECORDS[:-1]
  file.close()
  assert path.read_bytes() == torn
