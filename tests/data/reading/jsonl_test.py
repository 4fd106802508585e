import json
import pickle

import pytest

from tunix.data.reading import jsonl
from tunix.data.reading.jsonl import JsonlRecords

GOOD = [
  {"prompt": "a", "response": "b", "id": 7},
  {"prompt": [{"role": "user", "content": "a"}], "response": ""},
  {"messages": [{"role": "narrator", "content": "ü"}]},
  {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
  {"messages": [{"role": "assistant", "content": "a", "weight": 0, "train": False}]},
  {"text": "once", "tools": None},
]


def write(tmp_path, *lines):
  path = tmp_path / "data.jsonl"
  path.write_bytes("\n".join(lines).encode())
  return path


def test_records_are_read_by_position_and_lines_are_counted(tmp_path):
  lines = [json.dumps(record, ensure_ascii=False) for record in GOOD]
  path = write(tmp_path, lines[0], "", "  ", *lines[1:])
  records = JsonlRecords(path)
  assert len(records) == len(GOOD)
  assert [records[i] for i in (5, 2, 0)] == [GOOD[5], GOOD[2], GOOD[0]]
  assert list(records) == records[:] == GOOD
  assert records[-1] == GOOD[-1]
  assert records.where(1) == f"{path}:4"
  assert records.validate() == {"prompt": 2, "messages": 3, "text": 1}
  assert pickle.loads(pickle.dumps(records))[3] == GOOD[3]
  with pytest.raises(IndexError):
    _ = records[6]
  assert jsonl.place(records, 0) == f"{path}:1"
  assert jsonl.place(GOOD, 3) == "record 3"
  assert repr(records) == f"JsonlRecords('{path}', 6 records)"


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
  path = tmp_path / "data.jsonl"
  path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n\r\n')
  assert [r["text"] for r in JsonlRecords(path)] == ["a", "b"]


def test_the_fingerprint_is_of_the_content(tmp_path):
  first = JsonlRecords(write(tmp_path, '{"text": "a"}')).fingerprint
  assert JsonlRecords(write(tmp_path, '{"text": "a"}')).fingerprint == first
  assert JsonlRecords(write(tmp_path, '{"text": "b"}')).fingerprint != first


def test_missing_and_empty_files_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such file; give a file of JSON"):
    JsonlRecords(tmp_path / "none.jsonl")
  with pytest.raises(FileNotFoundError, match="a folder"):
    JsonlRecords(tmp_path)
  with pytest.raises(ValueError, match=r"data\.jsonl is empty; expected"):
    JsonlRecords(write(tmp_path, "", "  "))


BAD = {
  '{"text": ': "invalid JSON",
  "[1]": "found a list, expected",
  "{}": "found no fields, expected",
  '{"question": "a"}': "found fields 'question', expected",
  '{"prompt": "a", "text": "b"}': "found fields 'prompt', 'text'",
  '{"prompt": "a"}': '"prompt" without "response"',
  '{"prompt": 3, "response": "b"}': '"prompt" is an int, expected a string or a list',
  '{"prompt": "a", "response": null}': '"prompt" without "response"; expected',
  '{"prompt": [], "response": "b"}': '"prompt" is an empty list',
  '{"text": 3}': '"text" is an int',
  '{"text": " "}': '"text" is blank',
  '{"text": "a", "tools": {}}': '"tools" is a dict',
  '{"text": "a", "tools": ["f"]}': '"tools" holds a str, expected a list of JSON',
  '{"text": ' + "[" * 100_000: "the JSON is nested too deeply",
  '{"messages": "a"}': '"messages" is a str, expected a list of messages',
  '{"messages": ["a"]}': r'"messages"\[0\] is a str',
  '{"messages": [{"content": "a"}]}': r'"messages"\[0\]: "role" is missing',
  '{"messages": [{"role": "user"}]}': '"content" is missing, expected a string',
  '{"messages": [{"role": "user", "content": ["a"]}]}': '"content".0. is a part',
  '{"messages": [{"role": "user", "content": "a", "weight": 0.5}]}': "is 0.5, expected",
  '{"messages": [{"role": "user", "content": "a", "train": 1}]}': "expected true or",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40])
def test_bad_records_are_named_by_line_on_access_and_by_validation(tmp_path, line):
  records = JsonlRecords(write(tmp_path, '{"text": "a"}', "", line, '{"text": "b"}'))
  assert records[2] == {"text": "b"}
  message = r"data\.jsonl:3: .*" + BAD[line]
  with pytest.raises(ValueError, match=message):
    _ = records[1]
  with pytest.raises(ValueError, match=message):
    records.validate()


@pytest.mark.parametrize("text", ['{"text": "other"}\n', ""])
def test_a_file_that_is_written_anew_while_it_is_read(tmp_path, text):
  path = tmp_path / "data.jsonl"
  path.write_text('{"text": "a"}\n{"text": "b"}\n')
  records = JsonlRecords(path)
  assert records[1]
  path.write_text(text)
  with pytest.raises(ValueError, match=r"data.jsonl was changed while it was read"):
    records[1]
