import csv
import gzip
import json
import os
import pickle
import sys
import types

import pytest
from hypothesis import given, settings, strategies as st

from tunix.data.reading import stream
from tunix.data.reading.files import CsvRecords, JsonArrayRecords, open_file
from tunix.data.reading.jsonl import JsonlRecords
from tunix.data.reading.stored import HeldRecords, Renamed
from tunix.data.records import SFT

RECORDS = [
  {"prompt": 'a "quoted", [text] {with} \\ marks', "response": "ü\nsecond"},
  {
    "messages": [{"role": "user", "content": "]"}, {"role": "assistant", "content": ""}]
  },
  {"text": "x, y"},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array(tmp_path, indent):
  path = tmp_path / "a.json"
  path.write_text(f"\ufeff \n{json.dumps(RECORDS, indent=indent)}\n\n")
  records = open_file(path)
  assert isinstance(records, JsonArrayRecords)
  assert list(records) == RECORDS and records[-1] == RECORDS[-1]
  assert records.where(1) == f"{path}, record 1"
  assert pickle.loads(pickle.dumps(records))[0] == RECORDS[0]
  print_of = records.fingerprint
  path.write_text(json.dumps(RECORDS[:2]))
  assert open_file(path).fingerprint != print_of


_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(max_size=8),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3)
  ),
  max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(
  values=st.lists(_JSON, min_size=1, max_size=5),
  ascii=st.booleans(),
  indent=st.sampled_from([None, 1]),
)
def test_any_json_is_cut_where_its_entries_end(tmp_path_factory, values, ascii, indent):
  path = tmp_path_factory.mktemp("json") / "a.json"
  path.write_text(json.dumps(values, ensure_ascii=ascii, indent=indent), "utf-8")
  records = JsonArrayRecords(path)
  assert [records.raw(i) for i in range(len(records))] == values


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("[]", "is empty; expected"),
    ('[{"text": "a"}', "the JSON array has no end"),
    ('[{"text": "a"}]\n[{"text": "b"}]', "text follows the JSON array"),
    ('[{"text": "a"}, 7]', r"a\.json, record 1: found an int"),
    (
      '[{"text": "a"}, {"text": }]',
      r"a\.json, record 1: invalid JSON .*, one object an entry",
    ),
    ('[{"text": %s}]' % ("9" * 5000), r"a\.json, record 0: invalid JSON \(Exceeds"),
    (
      '[{"text": %s}]' % ("[" * 10**4 + "]" * 10**4),
      "record 0: the JSON is nested too",
    ),
  ],
)
def test_wrong_arrays_are_refused(tmp_path, text, message):
  path = tmp_path / "a.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    open_file(path).validate()


def test_json_lines_by_any_other_name(tmp_path):
  for name in ("a.json", "a.jsonl", "a.txt", "a"):
    (tmp_path / name).write_text('{"text": "a"}\n')
    assert isinstance(open_file(tmp_path / name), JsonlRecords)


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("tsv", "\t")])
def test_csv(tmp_path, suffix, separator):
  path = tmp_path / f"a.{suffix}"
  rows = ['"prompt"', "response "], ["a", '"two\nlines"'], [], ["ü", '"x,\t""y"""']
  path.write_bytes(("\ufeff" + "\r\n".join(separator.join(r) for r in rows)).encode())
  records = open_file(path)
  assert isinstance(records, CsvRecords)
  assert list(records) == [
    {"prompt": "a", "response": "two\nlines"},
    {"prompt": "ü", "response": 'x,\t"y"'},
  ]
  assert [records.where(i) for i in range(2)] == [f"{path}:2", f"{path}:5"]
  assert pickle.loads(pickle.dumps(records))[1]["prompt"] == "ü"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (b"", "is empty; expected"),
    (b"prompt,response\n", "is empty; expected"),
    (b"prompt,response\na\n", r"a\.csv:2: 1 cell, but the first line names 2 columns"),
    (b"prompt,response\na,\xff\n", r"a\.csv:2: the byte 0xff is no UTF-8"),
    (b"prompt,response\rq,a\r", r"a\.csv:1 is no CSV \(.*convert the line ends"),
    (b"a,text,a,\n,,,\n", r"a\.csv:1: the column 'a' is named twice; expected"),
    (b"question,answer\na,b\n", r"a\.csv:2: found fields 'question', 'answer'"),
  ],
)
def test_wrong_csv_is_refused(tmp_path, text, message):
  path = tmp_path / "a.csv"
  path.write_bytes(text)
  with pytest.raises(ValueError, match=message):
    open_file(path).validate()


@pytest.mark.parametrize(
  ("suffix", "separator", "noun"),
  [
    ("csv", ";", "CSV separated by semicolons"),
    ("csv", "\t", "CSV separated by tabs"),
    ("tsv", ";", "CSV separated by semicolons"),
    ("csv", ",", "CSV"),
  ],
)
def test_the_first_line_shows_the_separator(tmp_path, suffix, separator, noun):
  path = tmp_path / f"a.{suffix}"
  others = "".join({",", ";", "\t"} - {separator})  # cells may hold them
  row = separator.join(["7" + others, '"x\n' + separator + '"'])
  path.write_text(separator.join(["prompt", "response"]) + "\n" + row)
  records = pickle.loads(pickle.dumps(open_file(path)))
  assert list(records) == [{"prompt": "7" + others, "response": "x\n" + separator}]
  assert records.noun == noun


TEXT = '{"text": "Köln"}\n'
OTHER_FILES = [
  (gzip.compress(TEXT.encode()), " is compressed by gzip; .*`gunzip -k FILE`"),
  (b"PK\x03\x04...", " is a zip archive; "),
  (TEXT.encode("utf-16"), " is text in UTF-16; .*`iconv -f UTF-16"),
  (b"\xfe\xff" + TEXT.encode("utf-16-be"), " is text in UTF-16; "),
  (TEXT.encode("latin-1"), ":1: the byte 0xf6 is no UTF-8; .*-f WINDOWS-1252"),
]


@pytest.mark.parametrize(
  ("content", "message"), OTHER_FILES, ids=["gzip", "zip", "utf-16", "big", "latin-1"]
)
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json", "stream"])
def test_files_that_are_no_utf8_text_say_what_to_do(tmp_path, content, message, suffix):
  path = tmp_path / f"a.{suffix}"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=rf"a\.{suffix}{message}") as caught:
    if suffix == "stream":
      next(stream.of_file(path).start(None))
    else:
      open_file(path).validate()
  assert "\n" not in str(caught.value)


ODD = ["\u2028", "\u2029", "\x85", "\f", "\v", "\x1c", "\x1e", "\ufeff", "é\u2028\n b"]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json"])
def test_only_a_line_feed_ends_a_line(tmp_path, suffix):
  records = [{"prompt": f"a{x}b", "response": f"{x}c"} for x in ODD]
  path = tmp_path / f"a.{suffix}"
  with path.open("w", encoding="utf-8-sig", newline="") as file:
    if suffix in ("csv", "tsv"):
      separator = "\t" if suffix == "tsv" else ","
      writer = csv.DictWriter(file, records[0], delimiter=separator)
      writer.writeheader()
      writer.writerows(records)
    elif suffix == "json":
      json.dump(records, file, ensure_ascii=False)
    else:
      file.writelines(f"{json.dumps(x, ensure_ascii=False)}\n" for x in records)
  assert list(open_file(path)) == records


@pytest.mark.parametrize(
  ("rows", "line"),
  [
    (['"a,b', "c,d"], 2),
    (["a,b", 'c,"d', "e,f"], 3),
    (["a,b", '"x\ny","d', "e,f", "g,h"], 4),
    (['a,"b'], 2),
    (['"'], 2),
  ],
)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_quote_that_nothing_closes_is_refused_with_its_line(
  tmp_path, rows, line, end
):
  path = tmp_path / "a.csv"
  path.write_bytes(("\n".join(["prompt,response", *rows]) + end).encode())
  with pytest.raises(ValueError, match=rf"a\.csv:{line}: a quotation mark opens"):
    open_file(path)
  path.write_bytes(f'prompt,"response{end}'.encode())
  with pytest.raises(ValueError, match=r"a\.csv:1: a quotation mark opens"):
    open_file(path)


def test_rows_that_quotes_swallow_are_warned_of(tmp_path, caplog):
  path = tmp_path / "a.csv"
  # The second of two marks closes the cell that the first opens.
  rows = [f'"{i},b' if i % 90 == 5 else f"{i},b" for i in range(1000)]
  path.write_text("\n".join(["prompt,response", *rows]))
  assert len(open_file(path)) == 460
  assert "546 of 1000 lines may be separate rows" in caplog.text
  assert "first in lines 7 to 97" in caplog.text
  caplog.clear()
  path.write_text('prompt,response\nq,"a, b\n\nc"\n"q, r","a\nb"\n')
  assert len(open_file(path)) == 2
  assert not caplog.text


def test_a_long_cell_is_read(tmp_path):
  path = tmp_path / "a.csv"
  path.write_text(f"text\n{'x' * 200_000}\n")
  assert len(open_file(path)[0]["text"]) == 200_000


def test_parquet_is_read_by_datasets(tmp_path, monkeypatch):
  path = tmp_path / "a.parquet"
  with pytest.raises(FileNotFoundError, match="no such file; give a file of parquet"):
    open_file(path)
  path.write_bytes(b"PAR1")
  calls = []
  fake = types.SimpleNamespace(
    load_dataset=lambda *a, **k: calls.append((a, k)) or [{"text": "a"}]
  )
  monkeypatch.setitem(sys.modules, "datasets", fake)
  assert list(open_file(path)) == [{"text": "a"}]
  assert calls == [(("parquet",), {"data_files": str(path), "split": "train"})]


def test_a_broken_parquet_is_named(tmp_path, monkeypatch):
  def load_dataset(*_, **__):
    raise RuntimeError("generating failed") from OSError("no magic bytes\nat the end")

  fake = types.SimpleNamespace(load_dataset=load_dataset)
  monkeypatch.setitem(sys.modules, "datasets", fake)
  path = tmp_path / "a.parquet"
  path.write_bytes(b"PAR1")
  with pytest.raises(ValueError, match=r"a\.parquet is no .* \(no magic bytes\); exp"):
    open_file(path)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl", "a.parquet"])
def test_a_pipe_is_no_file(tmp_path, name):
  os.mkfifo(tmp_path / name)
  with pytest.raises(FileNotFoundError, match=r"a pipe or a device; give a file of"):
    open_file(tmp_path / name)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl"])
def test_missing_files_are_refused(tmp_path, name):
  with pytest.raises(FileNotFoundError, match="no such file; give a file of"):
    open_file(tmp_path / name)
  with pytest.raises(FileNotFoundError, match="a folder"):
    open_file(tmp_path)


def test_columns_have_our_names():
  held = HeldRecords([{"q": "a", "response": "old", "a": "b", "n": 1}], SFT, name="x")
  records = Renamed(held, {"prompt": "q", "response": "a"})
  assert list(records) == [{"prompt": "a", "response": "b", "n": 1}]
  assert records.where(0) == "x, record 0" and len(records) == 1
  assert records.fingerprint == held.fingerprint
  wrong = Renamed(held, {"prompt": "question"})
  message = (
    "x, record 0: there is no column 'question' for 'prompt'; the record has 'q'"
  )
  with pytest.raises(ValueError, match=message):
    wrong.validate()
