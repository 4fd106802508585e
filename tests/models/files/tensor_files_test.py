import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

from tunix.models.files import tensor_files
from tunix.models.files.tensor_files import NewTensor


def new(name, value):
  return NewTensor(name, value.dtype, value.shape, lambda: value)


VALUES = {
  "half": np.arange(5, dtype=np.float16),
  "full": np.arange(6, dtype=np.float32).reshape(2, 3),
  "brain": np.arange(3).astype(jnp.bfloat16),
  "whole": np.array([[1, -2]], np.int64),
  "flag": np.array([True, False, True]),
  "scalar": np.array(2.5, np.float32),
  "nothing": np.empty((0, 4), np.float32),
}


def test_safetensors_reads_what_we_write(tmp_path):
  path = tmp_path / "x.safetensors"
  tensor_files.write_file(path, [new(k, v) for k, v in VALUES.items()])
  read = st.load_file(path)
  assert sorted(read) == sorted(VALUES)
  for name, value in VALUES.items():
    np.testing.assert_array_equal(read[name], value)
    assert read[name].dtype == value.dtype
  header = path.read_bytes()[8:]
  assert b'"__metadata__":{"format":"pt"}' in header


def test_we_read_what_safetensors_writes(tmp_path):
  path = tmp_path / "x.safetensors"
  st.save_file(VALUES, path)
  for name, tensor in tensor_files.read_header(path).items():
    assert (tensor.dtype, tensor.shape) == (VALUES[name].dtype, VALUES[name].shape)
    np.testing.assert_array_equal(tensor.map(), VALUES[name])


def test_every_tensor_starts_at_a_multiple_of_its_size(tmp_path):
  path = tmp_path / "x.safetensors"
  tensor_files.write_file(path, [new(k, v) for k, v in VALUES.items()])
  for tensor in tensor_files.read_header(path).values():
    assert tensor.offset % tensor.dtype.itemsize == 0


def test_columns_first_arrays_are_written_row_by_row(tmp_path):
  # safetensors itself writes such an array's buffer as it lies, that is transposed.
  value = np.asfortranarray(VALUES["full"])
  tensor_files.write_file(tmp_path / "x.safetensors", [new("x", value)])
  read = st.load_file(tmp_path / "x.safetensors")
  np.testing.assert_array_equal(read["x"], [[0, 1, 2], [3, 4, 5]])


def damaged(tmp_path, content):
  path = tmp_path / "model.safetensors"
  path.write_bytes(content)
  with pytest.raises(ValueError, match="is damaged or no safetensors file") as error:
    tensor_files.open_folder(tmp_path)
  assert "\n" not in str(error.value)
  return str(error.value)


def test_damaged_files(tmp_path):
  st.save_file(VALUES, tmp_path / "good")
  good = (tmp_path / "good").read_bytes()
  damaged(tmp_path, b"")
  damaged(tmp_path, b"hello")
  damaged(tmp_path, b"\xff" * 64)
  damaged(tmp_path, good[:-1])
  damaged(tmp_path, good[:20])
  damaged(tmp_path, good + b"x")
  damaged(tmp_path, good[:8] + b"#" + good[9:])

  def with_header(header):
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + b"\0" * 8

  entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
  (tmp_path / "model.safetensors").write_bytes(with_header({"a": entry}))
  assert list(tensor_files.open_folder(tmp_path)) == ["a"]
  assert "unknown dtype 'F7'" in damaged(
    tmp_path, with_header({"a": entry | {"dtype": "F7"}})
  )
  assert "'a' of shape (3,)" in damaged(
    tmp_path, with_header({"a": entry | {"shape": [3]}})
  )
  damaged(tmp_path, with_header({"a": entry | {"data_offsets": [4, 12]}}))
  damaged(tmp_path, with_header({"a": entry | {"data_offsets": [-8, 0]}}))
  damaged(tmp_path, with_header({"a": {}}))
  damaged(tmp_path, with_header(["a"]))


def test_folder_without_weights(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors file"):
    tensor_files.open_folder(tmp_path)


def test_shards_and_their_index(tmp_path):
  values = {f"t{i}": np.full(10, i, np.float32) for i in range(5)}  # 40 bytes each
  tensor_files.write_shards(tmp_path, [new(k, v) for k, v in values.items()], 100)
  files = sorted(f.name for f in tmp_path.glob("*.safetensors"))
  assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
  index = json.loads((tmp_path / tensor_files.INDEX).read_text())
  assert index["metadata"] == {"total_size": 200}
  assert index["weight_map"]["t2"] == files[1]
  read = tensor_files.open_folder(tmp_path)
  assert sorted(read) == sorted(values)
  np.testing.assert_array_equal(read["t4"].map(), values["t4"])


def write(folder, **files):
  with tensor_files.staged_folder(folder) as staging:
    for name, text in files.items():
      (staging / name.replace("__", ".")).write_text(text)


def content(folder):
  return {f.name: f.read_text() for f in folder.iterdir()}


def test_staged_folder_replaces_files_and_keeps_others(tmp_path):
  folder = tmp_path / "deep" / "out"
  write(folder, config__json="1")
  assert content(folder) == {"config.json": "1"}
  (folder / "notes.txt").write_text("mine")
  (folder / "model-00001-of-00002.safetensors").write_text("old")
  (folder / tensor_files.INDEX).write_text("old")
  write(folder, config__json="2", model__safetensors="new")
  assert content(folder) == {
    "config.json": "2",
    "model.safetensors": "new",
    "notes.txt": "mine",
  }
  assert [f.name for f in folder.parent.iterdir()] == ["out"]


def test_staged_folder_leaves_nothing_after_an_error(tmp_path):
  folder = tmp_path / "out"
  write(folder, config__json="1")
  for target in (folder, tmp_path / "new"):
    with (
      pytest.raises(OSError, match="no space"),
      tensor_files.staged_folder(target) as s,
    ):
      (s / "config.json").write_text("2")
      raise OSError("no space")
  assert content(folder) == {"config.json": "1"}
  assert [f.name for f in tmp_path.iterdir()] == ["out"]
  with pytest.raises(NotADirectoryError, match="is a file"):
    write(folder / "config.json", x="1")


# A limit on the size of files makes the kernel refuse a write, as a full disk does.
FULL_DISK = """
import pathlib, resource, signal, sys
import numpy as np
from tunix.models.files import tensor_files
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
value = np.ones(100_000, np.float32)
tensor = tensor_files.NewTensor("x", value.dtype, value.shape, lambda: value)
try:
  with tensor_files.staged_folder(folder) as staging:
    tensor_files.write_shards(staging, [tensor], 10**9)
except OSError as error:
  print("OSError", error.errno)
"""


def test_full_disk(tmp_path):
  folder = tmp_path / "out"
  write(folder, model__safetensors="old")
  done = subprocess.run(
    [sys.executable, "-c", FULL_DISK, str(folder)], capture_output=True, text=True
  )
  assert done.stdout.startswith("OSError"), done.stderr
  assert content(folder) == {"model.safetensors": "old"}
  assert [f.name for f in tmp_path.iterdir()] == ["out"]


def shards(folder):
  values = {f"t{i}": np.full(10, i, np.float32) for i in range(4)}
  tensor_files.write_shards(folder, [new(k, v) for k, v in values.items()], 100)
  index = folder / tensor_files.INDEX
  return index, json.loads(index.read_text())["weight_map"]


def refused(folder, error, match):
  with pytest.raises(error, match=match) as caught:
    tensor_files.open_folder(folder)
  assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "place, error, match",
  [
    (3, ValueError, "places 't1' in 3"),
    (None, ValueError, "places 't1' in None"),
    ([], ValueError, r"places 't1' in \[\]"),
    ("../model-00001-of-00002.safetensors", ValueError, "leaves the folder"),
    ("/etc/passwd", ValueError, "leaves the folder"),
    ("..", ValueError, "leaves the folder"),
    ("a\0b", ValueError, r"'a\\x00b', which leaves the folder"),
    ("\ud800", ValueError, "is no file name"),
    ("x" * 300, ValueError, "is no file name"),
    ("model.bin", FileNotFoundError, "names model.bin, which does not exist"),
    ("folder", ValueError, "folder is a folder or a device"),
    ("model-00002-of-00002.safetensors", ValueError, "which does not have it"),
  ],
)
def test_places_that_an_index_may_not_name(tmp_path, place, error, match):
  index, places = shards(tmp_path)
  (tmp_path / "folder").mkdir()
  index.write_text(json.dumps({"weight_map": places | {"t1": place}}))
  refused(tmp_path, error, match)


def test_indices_that_contradict_themselves(tmp_path):
  index, places = shards(tmp_path)
  good = json.dumps({"weight_map": places})
  index.write_text(good.replace('"t1": ', '"t0": "x", "t1": '))
  refused(tmp_path, ValueError, "'t0' occurs twice")
  index.write_text('{"weight_map": {}, "weight_map": ' + json.dumps(places) + "}")
  refused(tmp_path, ValueError, "'weight_map' occurs twice")
  index.write_text('{"weight_map":' * 50_000)
  refused(tmp_path, ValueError, "nested too deep")
  index.write_bytes(good.encode("utf-16"))
  refused(tmp_path, ValueError, "is not valid JSON")
  index.write_text('{"weight_map": ["t0"]}')
  refused(tmp_path, ValueError, "has no weight_map")
  index.unlink()
  index.mkdir()
  refused(tmp_path, ValueError, "is a folder or a device, expected a file")


def test_files_too_large_to_be_settings(tmp_path, monkeypatch):
  shards(tmp_path)
  monkeypatch.setattr(tensor_files, "MAX_JSON", 10)
  refused(tmp_path, ValueError, "more than 10 bytes")


def test_two_shards_hold_one_tensor(tmp_path):
  index, places = shards(tmp_path)
  first, second = sorted(set(places.values()))
  value = np.zeros(3, np.float32)
  tensor_files.write_file(
    tmp_path / second, [new(k, value) for k in ("t1", "t2", "t3")]
  )
  refused(tmp_path, ValueError, f"{first} and {second} both hold 't1'")
  index.unlink()  # the same without an index
  refused(tmp_path, ValueError, f"{first} and {second} both hold 't1'")
