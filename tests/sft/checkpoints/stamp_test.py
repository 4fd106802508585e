import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests import processes
from tests.sft import stamp_programs
from tunix.sft.checkpoints import stamp
from tunix.sft.checkpoints.stamp import content_stamp

DTYPES = (
  "bool",
  "int4",
  "uint4",
  "int8",
  "uint16",
  "int32",
  "float8_e4m3fn",
  "float8_e5m2",
  "float4_e2m1fn",
  "bfloat16",
  "float16",
  "float32",
)


def array(dtype="float32", shape=(8, 16), seed=0):
  draw = np.random.default_rng(seed).integers(-7, 8, shape)
  return np.asarray(jnp.asarray(draw).astype(dtype))


def by_hand(bits):
  """The two words with Python's integers, element by element in C order."""
  words = [0, 0]
  for place, h in enumerate(bits):
    h ^= place * 0x9E3779B1 % 2**32
    for constant in (0x7FEB352D, 0x846CA68B):
      h = (h ^ (h >> 16)) * constant % 2**32
    h ^= h >> 15
    again = (h ^ (h >> 12)) * 0x2C1B3C6D % 2**32
    words[0] += h
    words[1] += again ^ (again >> 15)
  return [word % 2**32 for word in words]


def test_words_and_hash_by_hand():
  x = np.float32([[1.0, -0.0, 3.5], [0.1, np.nan, -2.0]])
  words = by_hand([int(b) for b in x.view(np.uint32).ravel()])
  row = ["a.b", [2, 3], "float32", *words]
  want = hashlib.blake2b(
    json.dumps([row], separators=(",", ":")).encode(), digest_size=16
  )
  assert content_stamp({"a": {"b": x}}) == want.hexdigest()
  assert stamp.leaf_stamps({"a": {"b": x}}) == {
    "a.b": f"float32[2, 3]:{words[0]:08x}{words[1]:08x}"
  }


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_single_bit_changes_it(dtype):
  """Every bit of three elements, in each dtype that a leaf may have."""
  x = array(dtype)
  start = content_stamp([x])
  assert start == content_stamp([x.copy()]) == content_stamp([jnp.asarray(x)])
  width = jax.dtypes.itemsize_bits(x.dtype)
  bits = 1 if dtype == "bool" else width
  raw = f"uint{max(8, width)}"
  for place in (0, 37, 127):
    for bit in range(bits):
      changed = x.copy()
      changed.view(raw).reshape(-1)[place] ^= np.asarray(1 << bit, raw)
      assert content_stamp([changed]) != start, (place, bit)


@pytest.mark.parametrize("dtype", ("float64", "int64", "uint64"))
def test_64_bits_are_not_rounded(dtype):
  x = np.arange(12, dtype=dtype).reshape(3, 4)
  start = content_stamp([x])
  for bit in range(64):
    changed = x.copy()
    changed.view(np.uint64)[1, 2] ^= np.uint64(1 << bit)
    assert content_stamp([changed]) != start
  assert content_stamp([x.T.copy().T]) == start  # whatever the strides
  with jax.enable_x64(True):
    assert content_stamp([jnp.asarray(x)]) == start


def test_order_shape_name_and_dtype_count():
  x, y = array(seed=0), array(seed=1)
  start = content_stamp({"x": x, "y": y})
  swapped_rows, swapped_columns = x.copy(), x.copy()
  swapped_rows[[2, 5]] = x[[5, 2]]
  swapped_columns[:, [0, 15]] = x[:, [15, 0]]
  others = [
    {"x": y, "y": x},
    {"x": swapped_rows, "y": y},
    {"x": swapped_columns, "y": y},
    {"x": x.reshape(16, 8), "y": y},
    {"x": x, "z": y},
    {"x": x},
    {"x": x.view(np.int32), "y": y},
    {"x": np.where(x == 0, np.float32(-0.0), x), "y": y},
    {},
  ]
  assert len({start, *map(content_stamp, others)}) == len(others) + 1


def test_low_zero_bits_do_not_weaken_it():
  """bfloat16 values kept in float32: the low 16 bits are 0 in every element, and both
  words still take all values in their low bits."""
  rows = [array("bfloat16", (64,), seed).astype(np.float32) for seed in range(64)]
  stamps = stamp.leaf_stamps(rows).values()
  for word in (slice(-16, -8), slice(-8, None)):
    assert len({int(s[word], 16) % 2**16 for s in stamps}) > 60


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "int4"))
def test_the_same_on_any_layout(kind, dtype):
  x = array(dtype, (8, 16, 4))
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
  other = jax.make_mesh((2,), ("b",), axis_types=(kind,), devices=jax.devices()[5:7])
  specs = (P(), P("a"), P(None, "b", "a"), P(("b", "a")))
  layouts = [NamedSharding(mesh, s) for s in specs] + [NamedSharding(other, P("b"))]
  split = {f"{i}": jax.device_put(x, where) for i, where in enumerate(layouts)}
  assert content_stamp(split) == content_stamp(dict.fromkeys(split, x))


def test_host_memory_and_keys():
  x = jnp.asarray(array())
  away = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
  assert content_stamp([x, x]) == content_stamp([away, x])
  stamps = {content_stamp([jax.random.key(seed)]) for seed in range(3)}
  assert len(stamps) == 3
  assert content_stamp([jax.random.key_data(jax.random.key(0))]) not in stamps


@pytest.mark.slow
@pytest.mark.ci
def test_two_processes_of_four_devices():
  program = pathlib.Path(stamp_programs.__file__)
  names = ("rows", "columns", "whole")
  want = content_stamp(dict.fromkeys(names, stamp_programs.X))
  processes.finish(*processes.together(program, 2, 4, want))


def test_memory_does_not_grow_with_the_array(mesh_fsdp8):
  """bfloat16, whose bits are widened: no temporary of the array's size, and of a split
  array only its sums travel."""
  where = NamedSharding(mesh_fsdp8, P("fsdp"))
  shape = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16, sharding=where)
  whole = NamedSharding(mesh_fsdp8, P())
  program = jax.jit(stamp._reduce, out_shardings=whole).lower(shape).compile()
  memory = program.memory_analysis()
  assert memory.argument_size_in_bytes == 4096 * 256 * 2 // 8
  assert memory.temp_size_in_bytes < 4096


@pytest.mark.parametrize(
  "leaf, message",
  [
    (np.complex64(1), "leaf 'w' holds complex64"),
    (np.array(["text"]), "leaf 'w' holds <U4"),
    (np.array([None]), "leaf 'w' holds object"),
    (1.5, "leaf 'w' is float, only arrays"),
  ],
)
def test_what_has_no_stamp(leaf, message):
  for function in (content_stamp, stamp.leaf_stamps):
    with pytest.raises(TypeError, match=message):
      function({"w": leaf})
