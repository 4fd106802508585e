"""Flipped bits of checkpoints; checksums across layouts of arrays."""

import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.checkpoints import checksums
from tunix.sft.steps.run_state import RunState


def state(seed, rows=64):
  # Random bits do not compress, so that the file holds them as they are.
  bits = np.random.default_rng(seed).integers(0, 2**32, (rows, 128), np.uint32)
  return RunState(
    model_params={"w": jnp.asarray(bits)},
    model_rest={"key": jax.random.key(seed), "half": jnp.ones((3, 5), jnp.bfloat16)},
    optimizer_state={"count": jnp.asarray(7), "mu": np.arange(6.0)},
    progress={"step": 1234, "place": (1, 2), 3: None},
    custom_metadata={"loss": 0.1},
  )


def same(a, b):
  return all(
    np.array_equal(np.asarray(x), np.asarray(y))
    for part in ("model_params", "optimizer_state")
    for x, y in zip(
      jax.tree.leaves(getattr(a, part)), jax.tree.leaves(getattr(b, part))
    )
  )


@pytest.fixture
def saved(tmp_path):
  with_two = CheckpointManager(tmp_path / "good")
  for step in (1, 2):
    with_two.save_state(step, state(step), force=True)
  with_two.close()
  return tmp_path / "good"


def restored(saved, folder, change):
  """(step, state) of a copy whose newest checkpoint was changed."""
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(saved, folder)
  change(folder / "2")
  manager = CheckpointManager(folder)
  found = manager.restore_state(state(0))
  manager.close()
  return found


def test_no_flipped_bit_of_an_array_is_loaded(saved, tmp_path):
  rng, steps = random.Random(1), []
  file = max((saved / "2/model_params").rglob("*"), key=lambda p: p.stat().st_size)

  def flip(folder):
    path = folder / file.relative_to(saved / "2")
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)

  for _ in range(12):
    step, found = restored(saved, tmp_path / "copy", flip)
    assert same(found, state(step))
    steps.append(step)
  assert steps.count(1) > 6
  assert (tmp_path / "copy" / "2.damaged").exists() == (steps[-1] == 1)


@pytest.mark.parametrize("old, new", [("1234", "1235"), ("0.1", "0.3")])
def test_no_changed_number_of_json_is_loaded(saved, tmp_path, old, new):
  def change(folder):
    for path in (folder / "progress", folder / "custom_metadata"):
      for file in path.rglob("*"):
        if file.is_file() and old in (text := file.read_text(errors="ignore")):
          file.write_text(text.replace(old, new))

  assert restored(saved, tmp_path / "copy", change)[0] == 1


def test_a_checkpoint_without_checksums_is_read(saved, tmp_path):
  def older(folder):
    shutil.rmtree(folder / "checksums")
    file = folder / "_CHECKPOINT_METADATA"
    metadata = json.loads(file.read_text())
    del metadata["item_handlers"]["checksums"]
    file.write_text(json.dumps(metadata))

  step, found = restored(saved, tmp_path / "copy", older)
  assert step == 2 and same(found, state(2))


def test_a_lost_checksum_is_damage(saved, tmp_path):
  lose = lambda folder: shutil.rmtree(folder / "checksums")
  assert restored(saved, tmp_path / "copy", lose)[0] == 1


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp"), P()])
def test_arrays_may_return_on_another_layout(mesh_fsdp8, spec):
  array = state(1).model_params["w"]
  put = lambda x, to: jax.device_put(x, NamedSharding(mesh_fsdp8, to))
  found = checksums.of({"p": {"w": put(array, P("fsdp"))}}, {})
  assert len(found["p/w"]) == 8
  checksums.check(found, {"p": {"w": put(array, spec)}}, {})
  other = array.at[3, 5].add(1)
  with pytest.raises(checksums.ChecksumError, match=r"^p/w differs from what was writ"):
    checksums.check(found, {"p": {"w": put(other, spec)}}, {})


def test_parts_of_processes_are_joined():
  found = checksums.joined(
    [{"a": [[[[0, 1]], "x"]]}, {"a": [[[[1, 2]], "y"]], "b": []}]
  )
  assert found == {"a": [[[[0, 1]], "x"], [[[1, 2]], "y"]], "b": []}
