"""Programs that sharding_utils_test runs in processes with simulated devices.

python sharding_programs.py one_process
python sharding_programs.py two_processes RANK PORT
"""

import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

from tunix.sft.sharding_utils import get_sharding, shard_input
from tunix.utils.mesh import create_mesh

BATCH = {"tokens": np.arange(48, dtype=np.int32).reshape(16, 3), "text": ["a", "b"]}


class Messages(logging.Handler):
  def __init__(self):
    super().__init__()
    self.texts = []
    logging.getLogger("tunix.sft.sharding_utils").addHandler(self)

  def emit(self, record):
    self.texts.append(record.getMessage())


def expect_error(part, function, *arguments):
  try:
    function(*arguments)
  except ValueError as error:
    assert part in str(error), error
    return
  raise AssertionError(f"no error that says {part!r}")


def all_axes_split_the_first_dimension():
  mesh = create_mesh({"dp": 2, "fsdp": 4})
  explicit = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
  ways = [lambda: jax.set_mesh(mesh), lambda: mesh, lambda: jax.set_mesh(explicit)]
  for way in ways:
    with way():
      out = shard_input(BATCH, ("dp", "fsdp"))["tokens"]
      assert out.sharding.shard_shape(out.shape) == (2, 3), out.sharding
      first = min(out.addressable_shards, key=lambda shard: shard.index[0].start)
      np.testing.assert_array_equal(first.data, BATCH["tokens"][:2])
      np.testing.assert_array_equal(out, BATCH["tokens"])
      part = shard_input(BATCH["tokens"], "fsdp")
      assert part.sharding.shard_shape(part.shape) == (4, 3)


def what_is_placed_and_what_is_left_alone():
  mesh = create_mesh({"data": 4, "model": 2})
  with jax.set_mesh(mesh):
    names = np.array(["a"] * 16)
    batch = {
      "x": np.ones((8, 2), np.float64),
      "half": jnp.ones((4, 1), jnp.bfloat16),
      "scalar": np.float32(3),
      "zero_d": np.array(3),
      "names": names,
      "none": None,
      "flag": True,
    }
    out = shard_input(batch, ("data",))
    assert isinstance(out["x"], jax.Array) and out["x"].dtype == jnp.float32
    assert out["half"].dtype == jnp.bfloat16 and out["half"].sharding.spec == P("data")
    assert out["zero_d"].sharding.is_fully_replicated
    assert out["names"] is names and out["none"] is None and out["flag"] is True
    again = shard_input(out, ("data",))
    assert again["x"] is out["x"] and again["half"] is out["half"]
    other = shard_input(out, ("data", "model"))
    assert other["x"].sharding.shard_shape((8, 2)) == (1, 2)


def what_does_not_divide_is_replicated_and_said_once():
  messages = Messages()
  mesh = create_mesh({"a": 2, "b": 4})
  with jax.set_mesh(mesh):
    for _ in range(3):
      out = shard_input(np.ones((4, 5)), ("a", "b"))  # divides by 2 and 4, not by 8
      assert out.sharding.is_fully_replicated
  assert len(messages.texts) == 1 and "(4, 5)" in messages.texts[0], messages.texts
  sharding = get_sharding(np.ones(8), mesh, P("a", "b"))
  assert sharding.is_fully_replicated and len(messages.texts) == 2
  assert get_sharding(3.0, mesh, P("a")).is_fully_replicated
  assert get_sharding(np.ones((4, 8)), mesh, P("a", "b")).spec == P("a", "b")
  assert get_sharding(np.ones((4, 7)), mesh, P("a", None)).spec == P("a", None)
  assert len(messages.texts) == 2


def an_axis_that_the_mesh_lacks():
  with jax.set_mesh(create_mesh({"data": 8})):
    expect_error(
      "no axis 'fsdp', it has ('data',)", shard_input, np.ones((8, 2)), ("fsdp",)
    )


def without_a_mesh():
  out = shard_input(BATCH, ("fsdp",))
  assert isinstance(out["tokens"], jax.Array) and out["text"] == ["a", "b"]
  assert len(out["tokens"].devices()) == 1


def one_process():
  assert jax.device_count() == 8
  all_axes_split_the_first_dimension()
  what_is_placed_and_what_is_left_alone()
  what_does_not_divide_is_replicated_and_said_once()
  an_axis_that_the_mesh_lacks()
  without_a_mesh()


def two_processes(rank, port):
  rank = int(rank)
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
  assert jax.device_count() == 8 and jax.local_device_count() == 4
  rows = np.arange(24, dtype=np.float32).reshape(8, 3)
  mine = rows[4 * rank : 4 * rank + 4]
  total = jax.jit(lambda x: (x * jnp.arange(x.shape[0])[:, None]).sum())
  expected = (rows * np.arange(8)[:, None]).sum()

  # Parts of 4 rows do not divide by 8, the 8 rows that they make do.
  with jax.set_mesh(create_mesh({"fsdp": 8})):
    out = shard_input({"x": mine}, ("fsdp",))["x"]
    assert out.shape == (8, 3) and out.sharding.spec == P(("fsdp",)), out.sharding
    assert float(total(out)) == expected
    assert shard_input(out, ("fsdp",)) is out
    for size in (3, 2):
      expect_error("2 processes", shard_input, np.ones((size, 3)), ("fsdp",))
    scalar = shard_input(np.array(2.0), ("fsdp",))
    assert scalar.sharding.is_fully_replicated and float(scalar) == 2

  with jax.set_mesh(create_mesh({"fsdp": 4, "tp": 2})):
    out = shard_input(mine, ("fsdp",))
    assert out.sharding.shard_shape(out.shape) == (2, 3)
    assert float(total(out)) == expected
    wide = shard_input(out, ("fsdp", "tp"))  # an array of all processes, laid out anew
    assert wide.sharding.shard_shape(wide.shape) == (1, 3)
    assert float(total(wide)) == expected

  # tp spans the processes: both hold every row, and pass the same ones.
  with jax.set_mesh(create_mesh({"tp": 2, "fsdp": 4})):
    out = shard_input(rows, ("fsdp",))
    assert out.shape == (8, 3) and float(total(out)) == expected

  # A mesh of one process: its own business, and none of the other's.
  with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:4], ("fsdp",))):
    if rank == 0:
      out = shard_input(rows, ("fsdp",))
      assert out.sharding.shard_shape(out.shape) == (2, 3)
      np.testing.assert_array_equal(out, rows)
    else:
      expect_error("process 1 has no device", shard_input, rows, ("fsdp",))


if __name__ == "__main__":
  globals()[sys.argv[1]](*sys.argv[2:])
  print("done")
