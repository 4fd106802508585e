import json
import pickle

import grain
import numpy as np
import pytest
from array_record.python import array_record_module

from tunix.data.array_record import ArrayRecords
from tunix.data.records import SFT
from tunix.data.stored import HeldRecords

RECORDS = [{"prompt": f"{i}", "response": "ü", "extra": [i, None]} for i in range(5)]


def write_shards(folder, records=RECORDS, shards=2):
  for shard in range(shards):
    writer = array_record_module.ArrayRecordWriter(
      str(folder / f"a-{shard}.array_record"), "group_size:1"
    )
    for record in records[shard::shards]:
      writer.write(json.dumps(record).encode())
    writer.close()
  return str(folder / "a-*.array_record")


@pytest.mark.parametrize(
  "wrap", [list, grain.MapDataset.source, lambda x: dict(enumerate(x)).values()]
)
def test_anything_with_a_length_and_items_is_records(wrap):
  if wrap(RECORDS).__class__.__name__ == "dict_values":
    with pytest.raises(TypeError, match="mine is a dict_values; expected an object"):
      HeldRecords(wrap(RECORDS), name="mine")
    return
  records = HeldRecords(wrap(RECORDS), name="mine")
  assert list(records) == records[:] == RECORDS
  assert records.where(3) == "mine, record 3"
  assert records.validate() == {"prompt": 5}
  assert records.fingerprint == HeldRecords(RECORDS, name="other").fingerprint
  assert records.fingerprint != HeldRecords(RECORDS[1:], name="mine").fingerprint


def test_values_of_other_libraries_become_plain():
  held = HeldRecords(
    [
      {
        "messages": np.asarray(
          [{"role": b"user", "content": "a", "name": None}], dtype=object
        ),
        "n": np.int64(3),
        "x": np.asarray([1.5, 2.0]),
      }
    ],
    name="x",
  )
  assert held[0] == {
    "messages": [{"role": "user", "content": "a"}],
    "n": 3,
    "x": [1.5, 2.0],
  }
  with pytest.raises(ValueError, match=r"x, record 0: bytes are no UTF-8 text"):
    HeldRecords([{"text": b"\xff"}], name="x").validate()


@pytest.mark.parametrize(
  ("items", "kind", "message"),
  [
    ([], ValueError, "mine is empty; expected"),
    ({"train": [], "test": []}, TypeError, "a mapping of 'train', 'test'; choose one"),
    (iter(RECORDS), TypeError, "mine is a list_iterator; expected an object"),
  ],
)
def test_what_holds_no_records_is_refused(items, kind, message):
  with pytest.raises(kind, match=message):
    HeldRecords(items, name="mine")


def test_wrong_records_are_named():
  records = HeldRecords([*RECORDS, {"prompt": 3}, 7], name="mine")
  with pytest.raises(ValueError, match='mine, record 5: "prompt" without "response"'):
    records.validate()
  with pytest.raises(ValueError, match="mine, record 6: found a int"):
    _ = records[6]


def test_array_record_files(tmp_path):
  pattern = write_shards(tmp_path)
  records = ArrayRecords(pattern)
  assert list(records) == [*RECORDS[0::2], *RECORDS[1::2]]  # by the names of shards
  assert records[3] == RECORDS[1]
  assert records.where(3) == f"{pattern}, record 3"
  assert pickle.loads(pickle.dumps(records))[4] == RECORDS[3]
  assert records.fingerprint == ArrayRecords(pattern).fingerprint
  single = ArrayRecords(str(tmp_path / "a-0.array_record"), SFT)
  assert list(single) == RECORDS[0::2]
  assert single.fingerprint != records.fingerprint


def test_wrong_array_record_files_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such file; give an ArrayRecord file"):
    ArrayRecords(str(tmp_path / "none.array_record"))
  (tmp_path / "bad.array_record").write_bytes(b"{}")
  with pytest.raises(ValueError, match=r"bad\.array_record cannot be read as ArrayRec"):
    ArrayRecords(str(tmp_path / "bad.array_record"))
  whole = tmp_path / "a-0.array_record"
  write_shards(tmp_path, shards=1)
  (tmp_path / "cut.array_record").write_bytes(whole.read_bytes()[:40_000])
  with pytest.raises(ValueError, match=r"cut\.array_record cannot be read"):
    ArrayRecords(str(tmp_path / "cut.array_record"))
  write_shards(tmp_path, [["no object"]], shards=1)
  with pytest.raises(ValueError, match=r"a-0\.array_record, record 0: found a list"):
    ArrayRecords(str(whole)).validate()
