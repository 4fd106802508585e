import json
import os
import pickle
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import checkpoints, torch_archives as archives
from tunix.models.automodel import AutoModel
from tunix.models.files import tensor_files, torch_files, torch_pickle

VALUES = {
  "full": np.arange(6, dtype=np.float32).reshape(2, 3),
  "half": np.arange(5, dtype=np.float16),
  "whole": np.array([[1, -2]]),
  "scalar": np.array(2.5, np.float32),
  "nothing": np.empty((0, 4), np.float32),
}
TWELVE = np.arange(12, dtype=np.float32)


@pytest.fixture
def file(tmp_path):
  return tmp_path / "pytorch_model.bin"


def refused(file, match):
  with pytest.raises(ValueError, match=match) as error:
    torch_files.read_file(file)
  message = str(error.value)
  assert str(file) in message and "safetensors" in message
  assert "\n" not in message and len(message) < 700
  return message


def view_of_twelve(file, start, shape, strides, count=12, key="0"):
  made = archives.tensor(key, "FloatStorage", count, start, shape, strides)
  return archives.archive(file, archives.state({"x": made}), {"0": TWELVE.tobytes()})


def test_values(file):
  archives.write(file, VALUES)
  read = torch_files.read_file(file)
  assert list(read) == list(VALUES)
  for name, want in VALUES.items():
    got = read[name].map()
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert (read[name].dtype, read[name].shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got, want)
    assert got.size == 0 or not got.flags.writeable


def test_views_with_strides(file):
  # Of [[0 1 2 3] [4 5 6 7] [8 9 10 11]], columns 1 and 3, turned.
  view_of_twelve(file, 1, (2, 3), (2, 4))
  tensor = torch_files.read_file(file)["x"]
  np.testing.assert_array_equal(tensor.map(), [[1, 5, 9], [3, 7, 11]])
  assert not tensor.map().flags.writeable
  # The stride of an axis of size 1 does not matter.
  view_of_twelve(file, 4, (2, 1, 4), (4, 99, 1))
  tensor = torch_files.read_file(file)["x"]
  np.testing.assert_array_equal(tensor.map(), [[[4, 5, 6, 7]], [[8, 9, 10, 11]]])


@pytest.mark.parametrize(
  "start, shape, strides, count",
  [
    (1, (12,), (1,), 12),  # one too many
    (0, (2, 3), (9, 2), 12),  # the last at 9 + 4
    (12, (1,), (1,), 12),
    (0, (13,), (0,), 12),  # repeated: any size could be claimed
    (0, (2**40, 2**30), (0, 0), 12),
    (0, (0, 2**40, 2**40), (1, 1, 1), 12),
    (0, (3,), (1, 1), 12),
    (-1, (3,), (1,), 12),
    (0, (-3,), (1,), 12),
    (2, (2,), (-1,), 12),
    (0, (12,), (1,), 13),  # not what the archive holds
    (0, (1,) * 40, (1,) * 40, 12),
  ],
)
def test_views_that_leave_their_storage(file, start, shape, strides, count):
  view_of_twelve(file, start, shape, strides, count)
  refused(file, "leaves its storage|whole numbers|larger than|at most 32|has 48 bytes")


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "", "1", "0/../0"])
def test_storages_are_members_of_the_archive(file, key):
  view_of_twelve(file, 0, (12,), (1,), key=key)
  refused(file, "the name of storage .* is no number|'model/data/1' is not in it")


class _Runs:
  """Pickled as a call of a function."""

  def __init__(self, function, *arguments):
    self.call = function, arguments

  def __reduce__(self):
    return self.call


class _WithState:
  def __init__(self):
    self.harmless = 1


def malicious(trace):
  """Pickles that execute something in an ordinary reader, and the name refused."""
  shell = f"touch {trace}"
  nested = {"a": [({"b": _Runs(eval, f"__import__('os').system({shell!r})")},)]}
  return {
    "system": (pickle.dumps(_Runs(os.system, shell), 2), r"'posix\.system'"),
    "eval": (pickle.dumps({"x": nested}, 2), r"'__builtin__\.eval'"),
    "protocol 4": (pickle.dumps(_Runs(os.system, shell), 4), r"'posix\.system'"),
    "getattr": (b"\x80\x02cbuiltins\ngetattr\n.", r"'builtins\.getattr'"),
    "torch.load": (b"\x80\x02ctorch\nload\n.", r"'torch\.load'"),
    "deep": (
      b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
      "__globals__",
    ),
    "object": (pickle.dumps(_WithState(), 2), r"'copy_reg\._reconstructor'|_WithState"),
    "instance": (b"(S'id'\nios\nsystem\n.", "INST|STRING"),
    "new object": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "NEWOBJ"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1"),
  }


@pytest.mark.parametrize("kind", malicious(""))
def test_nothing_is_executed(file, tmp_path, kind):
  pickled, match = malicious(tmp_path / "trace")[kind]
  archives.archive(file, pickled, {})
  assert "nothing in it was executed" in refused(file, match)
  assert not (tmp_path / "trace").exists()


DICT = archives.call("collections.OrderedDict")
FUNCTION = archives.name("torch._utils._rebuild_tensor_v2")


@pytest.mark.parametrize(
  "body, match",
  [
    (FUNCTION + archives.state({"__code__": b"N"})[2:-1] + b"b.", "sets attributes"),
    (DICT + b"(" + DICT + DICT + b"tb.", "sets attributes"),
    (DICT + FUNCTION + b"N\x86R.", "calls a value that is no function"),
    (FUNCTION + DICT + b"R.", "has dict as arguments"),
    (FUNCTION + b")R.", "damaged"),
    (archives.call("torch._utils._rebuild_parameter", b"N") + b".", "no tensor"),
    (archives.call("collections.OrderedDict", b"]") + b".", "made of arguments"),
    (b"Nr\xff\xff\xff\x7f0.", "POP"),  # a memo number of 2^31
    (b"h\x07.", "damaged"),
    (b"u.", "damaged"),
    (b"NQ.", "damaged"),
    (b"(" + archives.text("module") + b"NNNNtQ.", "no storage"),
    (b"N", "no end"),
    (b"\xff.", "does not exist"),
    (b"X\xff\xff\xff\x7fabc", "expected 2147483647 bytes"),
    (b"\x95" + b"\xff" * 8 + b".", "damaged|FRAME|expected"),
    (b"].", "holds list"),
    (b"}" + archives.text("a") + b"K\x01s.", "'a' is of type int, expected a tensor"),
    (b"}(" + archives.text("a") + b"N" + archives.text("a") + b"Nu.", "occurs twice"),
    (b"}K\x01Ns.", "int as a key"),
    (b"}(Nu.", "no dict"),
  ],
)
def test_streams_that_no_torch_writes(file, body, match):
  archives.archive(file, b"\x80\x02" + body, {})
  refused(file, match)


def test_tuples_that_share_their_parts_take_no_time(file):
  # 2^200 leaves; hashing or printing it would never end.
  bomb = b"N" + b"".join(b"q\x01h\x01\x86" for _ in range(200))
  archives.archive(file, b"\x80\x02}" + bomb + b"Ns.", {})
  refused(file, "tuple as a key")
  archives.archive(file, b"\x80\x02" + bomb + b".", {})
  refused(file, "holds tuple")


def test_sizes_are_limited(file, monkeypatch):
  monkeypatch.setattr(torch_pickle, "MAX_BYTES", 100)
  archives.archive(file, b"N" * 101, {})
  refused(file, "'model/data.pkl' has 101 bytes, at most 100 are read")
  monkeypatch.setattr(torch_pickle, "_MAX_STEPS", 50)
  archives.archive(file, b"N" * 99 + b".", {})
  refused(file, "more than 50 instructions")


def test_archives_that_no_torch_writes(file):
  state = archives.state(
    {"x": archives.tensor("0", "FloatStorage", 12, 0, (12,), (1,))}
  )
  members = {"0": TWELVE.tobytes()}
  archives.archive(file, state, members)
  good = file.read_bytes()
  archives.archive(file, state, members, compression=zipfile.ZIP_DEFLATED)
  refused(file, "is compressed")
  archives.archive(file, state, members, order="big")
  refused(file, "byte order")
  archives.archive(file, state, members, folder="a/b")
  refused(file, "0 members are named")
  with zipfile.ZipFile(file, "a") as more:
    more.writestr("c/data.pkl", state)
    more.writestr("d/data.pkl", state)
  refused(file, "2 members are named")
  with pytest.warns(UserWarning, match="Duplicate"):
    archives.archive(file, state, members | {"../byteorder": ""}, order="little")
    with zipfile.ZipFile(file, "a") as more:
      more.writestr("model/data/0", members["0"])
  refused(file, "two members have one name")
  for end in (len(good) - 1, len(good) // 2, 5):
    file.write_bytes(good[:end])
    refused(file, "damaged")
  # The central directory sends a storage to the place of another member.
  at = good.rindex(b"model/data/0") - 4
  file.write_bytes(good[:at] + bytes(4) + good[at + 4 :])
  refused(file, "is not at the offset in the index")
  file.write_bytes(good[:at] + b"\xf0\xff\xff\x00" + good[at + 4 :])
  refused(file, "is outside the file")


def test_old_format(file):
  file.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"more")
  refused(file, r"before PyTorch 1\.6, which only torch reads")
  file.write_bytes(b"")
  refused(file, "is damaged")


def test_folders(tmp_path):
  folder = checkpoints.copy("llama3p1", tmp_path / "model")
  values = checkpoints.tensors(folder)
  want = AutoModel.from_pretrained(folder)(np.arange(8)[None])[0]
  archives.write(folder / "pytorch_model.bin", {"wrong": TWELVE})
  # safetensors come first
  assert "wrong" not in tensor_files.open_folder(folder)
  for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
    file.unlink()
  archives.write(folder / "pytorch_model.bin", values)
  got = AutoModel.from_pretrained(folder)(np.arange(8)[None])[0]
  np.testing.assert_array_equal(got, want)

  (folder / "pytorch_model.bin").unlink()
  places, names = {}, list(values)
  for i, part in enumerate((names[:5], names[5:]), 1):
    file = f"pytorch_model-0000{i}-of-00002.bin"
    archives.write(folder / file, {name: values[name] for name in part})
    places |= dict.fromkeys(part, file)
  index = folder / "pytorch_model.bin.index.json"
  index.write_text(json.dumps({"weight_map": places}))
  got = AutoModel.from_pretrained(folder)(np.arange(8)[None])[0]
  np.testing.assert_array_equal(got, want)
  index.write_text(json.dumps({"weight_map": places | {names[0]: file}}))
  with pytest.raises(ValueError, match="which does not have it"):
    tensor_files.open_folder(folder)
  index.unlink()
  assert sorted(tensor_files.open_folder(folder)) == sorted(values)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saves(file, protocol):
  torch = pytest.importorskip("torch")
  base = torch.arange(12.0).reshape(3, 4)
  module = torch.nn.Linear(2, 3)  # its state dict carries an attribute
  state = module.state_dict()
  state |= {
    "turned": base.t()[1:, ::2],
    "part": base[1],
    "same": base,
    "parameter": torch.nn.Parameter(base + 1),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
  }
  kinds = (
    "float64 float16 bfloat16 float8_e4m3fn float8_e5m2 int32 int16 int8 uint8 bool"
  )
  for kind in (*kinds.split(), "uint16", "uint32", "uint64"):
    state[kind] = torch.arange(4).to(getattr(torch, kind))
  torch.save(state, file, pickle_protocol=protocol)
  read = torch_files.read_file(file)
  assert list(read) == list(state)
  for name, want in state.items():
    got = read[name].map()
    assert got.dtype == jnp.dtype(str(want.dtype).removeprefix("torch."))
    assert got.shape == tuple(want.shape)
    raw = want.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert np.ascontiguousarray(got).tobytes() == raw, name
  # One storage, several tensors: mapped from the same bytes of the file.
  assert read["part"].offset == read["same"].offset + 16


def test_what_torch_saves_besides_tensors(file):
  torch = pytest.importorskip("torch")
  torch.save({"step": 3, "model": {"x": torch.ones(2)}}, file)
  refused(file, "'step' is of type int, expected a tensor")
  torch.save(torch.nn.Linear(2, 2), file)
  refused(file, r"it names '.*Linear'")
  torch.save({"x": torch.ones(2, dtype=torch.complex64).conj()}, file)
  refused(file, "ComplexFloatStorage")
  torch.save({"x": torch.ones(1).expand(3)}, file)
  refused(file, "repeats some")
  torch.save({"x": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
  refused(file, r"before PyTorch 1\.6")
