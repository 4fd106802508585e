import json
import pickle
import types

import grain
import numpy as np
import pytest
from array_record.python import array_record_module

from tests import toys_calls
from tunix.data.reading.array_record import ArrayRecords
from tunix.data.reading.jsonl import JsonlRecords
from tunix.data.reading.stored import HeldRecords
from tunix.data.records import SFT
from tunix.data.render import render_record

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
    "messages": [{"role": "user", "content": "a", "name": None}],
    "n": 3,
    "x": [1.5, 2.0],
  }
  with pytest.raises(ValueError, match='x, record 0: "text" is a bytes, expected a'):
    HeldRecords([{"text": b"\xff"}], name="x").validate()


class Table:
  """Rows as Arrow holds them: every object of a column has the keys of all objects."""

  def __init__(self, rows):
    self.features = feature_of(rows)
    self.rows = [filled(row, self.features) for row in rows]

  def __len__(self):
    return len(self.rows)

  def __getitem__(self, index):
    return self.rows[index]


def feature_of(values):
  values = [value for value in values if value is not None]
  if values and isinstance(values[0], dict):
    names = dict.fromkeys(name for value in values for name in value)
    return {n: feature_of([value.get(n) for value in values]) for n in names}
  if values and isinstance(values[0], list):
    inner = feature_of([part for value in values for part in value])
    return types.SimpleNamespace(feature=inner)
  return types.SimpleNamespace(dtype=type(values[0]).__name__ if values else "null")


def filled(value, feature):
  if isinstance(value, dict):
    return {name: filled(value.get(name), inner) for name, inner in feature.items()}
  if isinstance(value, list):
    return [filled(part, feature.feature) for part in value]
  return value


def tool(name, **parameters):
  function = {"name": name, "parameters": {"properties": parameters}}
  return {"type": "function", "function": function}


def test_nulls_are_the_same_in_json_lists_and_columns(tmp_path):
  call = {"name": "f", "arguments": {"city": "Oslo", "unit": None}}
  user, answer = ({"role": r, "content": r} for r in ("user", "assistant"))
  rows = [
    {"prompt": "a", "response": "b", "label": None},
    {"text": "a", "messages": None, "chosen": None},
    {"messages": [user, answer], "tools": [tool("g", day={"type": "x"})]},
    {
      "messages": [
        user | {"weight": None, "train": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "b"},
        answer | {"weight": 1},
      ],
      "prompt": None,
      "tools": [tool("f", city={"default": None})],
    },
    {"conversations": [{"from": "human", "value": "a", "role": None}, answer]},
  ]
  file = tmp_path / "a.jsonl"
  file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  tokenizer = toys_calls.tokenizer_of("qwen25")
  sources = [JsonlRecords(file), HeldRecords(rows, name="a")]
  sources.append(HeldRecords(Table(rows), name="a"))
  texts = []
  for records in sources:
    assert sum(records.validate().values()) == len(rows)
    rendered = [render_record(row, SFT, tokenizer).tokens for row in records]
    texts.append([tokenizer.decode(r, skip_special_tokens=False) for r in rendered])
  assert texts[0] == texts[1] == texts[2]
  assert '"unit": null' in texts[0][3] and '"default": null' in texts[0][3]


def test_nulls_that_no_rendering_shows_do_not_change_a_fingerprint():
  def fingerprint(message, arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    return HeldRecords([{"messages": [message], "calls": [call]}], name="a").fingerprint

  plain = fingerprint({"role": "user"}, {"a": 1})
  assert plain == fingerprint({"role": "user", "name": None}, {"a": 1})
  assert plain != fingerprint({"role": "user"}, {"a": 1, "b": None})


def test_nulls_of_other_sources():
  class Json:
    """The feature of `datasets` of this name, which decodes objects."""

  row = {"messages": [{"name": None}], "meta": {"a": None}, "n": None}
  table = Table([])
  table.rows = [row]
  table.features = {"messages": types.SimpleNamespace(feature=Json()), "meta": Json()}
  assert HeldRecords(table, name="a").raw(0) == row
  unknown = HeldRecords(grain.MapDataset.source([row]), name="a")
  assert unknown.raw(0) == {"messages": [{}], "meta": {}, "n": None}


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
  with pytest.raises(ValueError, match="mine, record 6: found an int"):
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
