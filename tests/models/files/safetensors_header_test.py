import json
import pathlib
import tracemalloc

import pytest

from tunix.models.files import safetensors_header, tensor_files

FILE = pathlib.Path("x.safetensors")
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NEXT = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def parse(header, size=8):
  raw = header if isinstance(header, bytes) else json.dumps(header).encode()
  return safetensors_header.parse(FILE, raw, 100, 100 + size)


def test_offsets_are_places_in_the_file():
  empty = {"dtype": "BF16", "shape": [0, 3], "data_offsets": [8, 8]}
  read = parse({"b": NEXT, "none": empty, "a": ENTRY, "__metadata__": {"k": "v"}}, 16)
  assert {name: tensor.offset for name, tensor in read.items()} == {
    "b": 108,
    "none": 108,
    "a": 100,
  }
  assert parse({}, 0) == {}


HEADERS = [
  (b'{"a": 1, "a": 2}', "'a' occurs twice"),
  (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "'dtype' occurs twice"),
  (b"[" * 100_000, "nested too deep"),
  (b'{"a":' * 100_000, "nested too deep"),
  (b'{"\xff": 1}', "utf-8"),
  ('{"a": 1}'.encode("utf-16"), "utf-8"),
  (b"[]", "the header is list"),
  (b"", "Expecting value"),
  ({"a": [1]}, "'a' lacks dtype"),
  ({"a": {"dtype": "F32", "shape": [2]}}, "'a' lacks dtype"),
  ({"__metadata__": {"a": 1}}, "__metadata__ is not"),
  ({"__metadata__": []}, "__metadata__ is not"),
  ({"a": ENTRY | {"dtype": ["F32"]}}, r"unknown dtype \['F32'\]"),
  ({"a": ENTRY | {"dtype": "F4"}}, "unknown dtype 'F4'"),
  ({"a": ENTRY | {"shape": [-2]}}, r"\[-2\] are not all whole"),
  ({"a": ENTRY | {"shape": [-1, -2]}}, "not all whole"),
  ({"a": ENTRY | {"shape": [2.0]}}, "not all whole"),
  ({"a": ENTRY | {"shape": [True, 2]}}, "not all whole"),
  ({"a": ENTRY | {"shape": "2"}}, "no list"),
  ({"a": ENTRY | {"shape": [2] + [1] * 32}}, "at most 32"),
  ({"a": ENTRY | {"shape": [2**62, 2**62]}}, "larger than any file"),
  ({"a": ENTRY | {"shape": [0, 2**62, 9], "data_offsets": [0, 0]}}, "larger than"),
  ({"a": ENTRY | {"data_offsets": [0, True]}}, "not all whole"),
  ({"a": ENTRY | {"data_offsets": [0.0, 8.0]}}, "not all whole"),
  ({"a": ENTRY | {"data_offsets": [-8, 0]}}, "not all whole"),
  ({"a": ENTRY | {"data_offsets": [0]}}, "needs 8 bytes"),
  ({"a": ENTRY | {"data_offsets": [0, 8, 8]}}, "needs 8 bytes"),
  ({"a": ENTRY | {"data_offsets": [8, 0]}}, "needs 8 bytes"),
  ({"a": ENTRY | {"data_offsets": [0, 12]}}, "needs 8 bytes, data_offsets are"),
  ({"a": ENTRY, "b": ENTRY}, "'b' overlaps the one before"),
  ({"a": ENTRY, "b": NEXT | {"data_offsets": [4, 12]}}, "'b' overlaps"),
  ({"b": NEXT}, "'b' leaves a gap"),
  ({"a": ENTRY, "b": NEXT}, "108 bytes, 116 expected"),
  ({}, "108 bytes, 100 expected"),
  (b"{1: {}}", "Expecting property name"),
  (b'{"a": NaN}', "'a' lacks dtype"),
  (b'{"a": 1, "\\u0061": 2}', "'a' occurs twice"),
  (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}", "digits"),
  (b'{"\\ud800": {}}', r"'\\ud800' lacks dtype"),
  (b"{}" + b" " * 64 + b"x", "Extra data"),
  ({"a" * 500: {}}, r"'a+\.\.\. lacks dtype"),
  ({"a": ENTRY | {"data_offsets": [2**70, 2**70 + 8]}}, "'a': data_offsets .* larger"),
  ({"a": ENTRY, "b": ENTRY | {"shape": [0], "data_offsets": [4, 4]}}, "'b' overlaps"),
]


@pytest.mark.parametrize("header, match", HEADERS)
def test_headers_that_contradict_themselves(header, match):
  with pytest.raises(ValueError, match=match) as error:
    parse(header)
  assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("header, match", HEADERS)
def test_a_folder_with_such_a_file_is_refused_by_name(tmp_path, header, match):
  path = tmp_path / "model.safetensors"
  raw = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
  # The sizes in the message depend on the length of the header.
  match = match if "bytes, " not in match else "bytes"
  tracemalloc.start()
  with pytest.raises(ValueError, match=match) as error:
    tensor_files.open_folder(tmp_path)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert str(path) in str(error.value) and "\n" not in str(error.value)
  assert peak < 32 * len(raw) + 2_000_000  # bytes, not the sizes that it names


def test_a_header_that_is_too_long_is_not_read(tmp_path):
  path = tmp_path / "model.safetensors"
  length = 100_000_000
  with path.open("wb") as stream:
    stream.write(length.to_bytes(8, "little"))
    stream.truncate(8 + length)
  tracemalloc.start()
  with pytest.raises(ValueError, match="a header of 100000000 announced") as error:
    tensor_files.open_folder(tmp_path)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert str(path) in str(error.value) and peak < 1_000_000


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 9])
def test_announced_length_is_not_believed(tmp_path, length):
  path = tmp_path / "model.safetensors"
  path.write_bytes(length.to_bytes(8, "little") + b"{}      ")
  with pytest.raises(ValueError, match=f"a header of {length} announced") as error:
    tensor_files.open_folder(tmp_path)
  assert str(path) in str(error.value)
