import dataclasses
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tunix.models.automodel import AutoModel
from tunix.models.files import tensor_files, weight_reader
from tunix.models.files.stored_tensor import StoredTensor
from tunix.models.files.tensor_files import NewTensor
from tunix.models.files.weight_reader import WeightReader
from tunix.models.transformer.params import Placement
from tunix.utils import tree

P = jax.sharding.PartitionSpec
LAYERS, OUT, IN = 3, 600, 40
RNG = np.random.default_rng(0)
VALUES = {f"l{i}": RNG.standard_normal((OUT, IN), np.float32) for i in range(LAYERS)}
STACKED = Placement("w", tuple(VALUES), lead=(len(VALUES),), transpose=True)
PLAIN = Placement("w", ("l1",), lead=(), transpose=False)
WANT = {
  "stacked": np.stack([x.T for x in VALUES.values()]),
  "plain": VALUES["l1"],
}


class Recorded(np.ndarray):
  """A mapped tensor that notes how many bytes are asked for."""

  asked: list

  def __getitem__(self, index):
    part = np.asarray(self)[index]
    self.asked.append(part.nbytes)
    return part


@dataclasses.dataclass(frozen=True)
class Recording(StoredTensor):
  asked: list = dataclasses.field(default_factory=list)

  def map(self):
    array = super().map().view(Recorded)
    array.asked = self.asked
    return array


def recording(tensors):
  """The tensors, and the list that collects the sizes of all that is read."""
  asked = []
  fields = [f.name for f in dataclasses.fields(StoredTensor)]
  made = {
    name: Recording(*(getattr(tensor, field) for field in fields), asked)
    for name, tensor in tensors.items()
  }
  return made, asked


@pytest.fixture
def stored(tmp_path):
  tensors = [NewTensor(k, v.dtype, v.shape, lambda v=v: v) for k, v in VALUES.items()]
  tensor_files.write_file(tmp_path / "model.safetensors", tensors)
  return recording(tensor_files.open_folder(tmp_path))


@pytest.fixture(params=[weight_reader._BLOCK, 7 * 40 * 4])
def blocks(request, monkeypatch):
  """Tensors of one piece, and of many with a remainder."""
  monkeypatch.setattr(weight_reader, "_BLOCK", request.param)
  if request.param < 1e6:
    monkeypatch.setattr(weight_reader, "_ROWS", 7)


@pytest.mark.parametrize("place, name", [(STACKED, "stacked"), (PLAIN, "plain")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values(stored, blocks, place, name, dtype):
  want = WANT[name].astype(dtype)
  with WeightReader(stored[0]) as reader:
    got = reader.load(place, want.shape, dtype, None)
    np.testing.assert_array_equal(got, want)
    index = tuple(slice(n // 4, n - n // 5) for n in want.shape)
    np.testing.assert_array_equal(reader.read(place, index, dtype), want[index])
    empty = (slice(0, 0),) * want.ndim
    assert reader.read(place, empty, dtype).shape == (0,) * want.ndim


@pytest.mark.parametrize(
  "place, name, spec, copies",
  [
    (STACKED, "stacked", P(None, "fsdp", None), 2),
    (STACKED, "stacked", P(None, "tp", "fsdp"), 1),
    (STACKED, "stacked", P(), 8),
    (PLAIN, "plain", P("fsdp", "tp"), 1),
    (PLAIN, "plain", P(None, "tp"), 4),
    (PLAIN, "plain", P(("fsdp", "tp")), 1),
  ],
)
def test_every_byte_is_read_once_whoever_holds_it(
  stored, blocks, mesh_fsdp4_tp2, place, name, spec, copies
):
  tensors, asked = stored
  want = WANT[name]
  where = jax.sharding.NamedSharding(mesh_fsdp4_tp2, spec)
  with WeightReader(tensors) as reader:
    got = reader.load(place, want.shape, np.float32, where)
    assert sum(asked) == want.nbytes
    np.testing.assert_array_equal(got, want)
    assert got.sharding == where
    held = sum(shard.data.nbytes for shard in got.addressable_shards)
    assert held == copies * want.nbytes
    # What one process of several would read: its device's slice, not a byte more.
    asked.clear()
    index = where.devices_indices_map(want.shape)[mesh_fsdp4_tp2.devices.flat[3]]
    index = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, want.shape))
    reader.read(place, index, np.float32)
    assert sum(asked) == math.prod(where.shard_shape(want.shape)) * 4


def test_a_whole_model_reads_its_checkpoint_once(mesh_fsdp8, monkeypatch):
  folder = checkpoints.GOLDEN / "llama3p1"
  tensors, asked = recording(tensor_files.open_folder(folder))
  monkeypatch.setattr(tensor_files, "open_folder", lambda _: tensors)
  AutoModel.from_pretrained(folder, mesh_fsdp8)
  assert sum(asked) == sum(v.nbytes for v in checkpoints.tensors(folder).values())


def test_only_slices_are_held_at_a_time(stored, mesh_fsdp8, monkeypatch):
  sizes = []
  new = weight_reader._array

  def noted(shape, dtype):
    sizes.append(math.prod(shape))
    return new(shape, dtype)

  monkeypatch.setattr(weight_reader, "_array", noted)
  where = jax.sharding.NamedSharding(mesh_fsdp8, P(None, None, "fsdp"))
  with WeightReader(stored[0]) as reader:
    reader.load(STACKED, (LAYERS, IN, OUT), np.float32, where)
  assert sizes == [LAYERS * IN * OUT // 8] * 8


def test_weights_outlive_the_files_and_may_be_donated(tmp_path):
  folder = checkpoints.copy("qwen3", tmp_path / "model")
  models = [AutoModel.from_pretrained(folder) for _ in range(2)]
  first, second = (tree.flatten(nnx.state(model)) for model in models)
  want = {path: np.array(value) for path, value in first.items()}
  file = next(folder.glob("*.safetensors"))
  with file.open("r+b") as stream:  # the file itself, not a new one
    stream.write(bytes(file.stat().st_size))
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  for path, value in first.items():
    np.testing.assert_array_equal(add(value), want[path] + 1)
    assert value.is_deleted()
    np.testing.assert_array_equal(second[path], want[path])


def test_memory_is_aligned_so_that_jax_adopts_it():
  for size in (1, 1000, 10_000_000):
    memory = weight_reader._array([size], np.dtype(jnp.bfloat16))
    assert memory.ctypes.data % 64 == 0
    if size > 1000:
      placed = jax.device_put(memory)
      assert placed.unsafe_buffer_pointer() == memory.ctypes.data


# Tensors of 8 MB, turned and stacked, of a checkpoint of 256 MB.
PEAK = """
import pathlib, resource, sys
import jax
import numpy as np
from tunix.models.files import tensor_files
from tunix.models.files.tensor_files import NewTensor
from tunix.models.transformer.params import Placement
from tunix.models.files.weight_reader import WeightReader

def resident():
  return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

folder = pathlib.Path(sys.argv[1])
value = np.ones((2048, 1024), np.float32)
keys = [f"{name}{i}" for name in "abcd" for i in range(8)]
new = [NewTensor(key, value.dtype, value.shape, lambda: value) for key in keys]
tensor_files.write_file(folder / "model.safetensors", new)
jax.block_until_ready(jax.device_put(value))
before = resident()
kept = []
with WeightReader(tensor_files.open_folder(folder)) as reader:
  for name in "abcd":
    place = Placement(name, tuple(f"{name}{i}" for i in range(8)), (8,), True)
    kept.append(reader.load(place, (8, 1024, 2048), np.float32, None))
jax.block_until_ready(kept)
# Not ru_maxrss, which a child inherits from the process that started it.
lines = open("/proc/self/status").read().splitlines()
peak = next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024
print((peak - before) / (256 << 20))
"""


def test_peak_memory_is_the_model_s(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert 1.0 <= float(done.stdout) < 1.3
