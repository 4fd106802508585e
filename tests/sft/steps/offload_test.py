"""Optimizer state in the host's memory: the same run, and where its arrays lie."""

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.sft import resume_test, trainers
from tests.sft.trainers import trainer, wide
from tunix.plan import residents
from tunix.sft.steps import offload
from tunix.utils import tree

DATA = [trainers.small(seed, rows=8) for seed in range(3)]


def kinds(t):
  """{memory kind} of the moments, and of the counters."""
  state = tree.flatten(t.optimizer.opt_state).values()
  return [
    {x.sharding.memory_kind for x in state if bool(x.ndim) == large}
    for large in (True, False)
  ]


def trained(mesh, skip_jit=False, **config):
  with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
    t = trainer(wide(), **config)
    t.train(DATA, DATA[:1], skip_jit=skip_jit)
  return t


@pytest.mark.parametrize("how", ["one device", "mesh", "skip_jit"])
def test_a_run_is_bitwise_the_same(how, mesh_fsdp8):
  mesh = mesh_fsdp8 if how == "mesh" else None
  plain, moved = (
    trained(mesh, skip_jit=how == "skip_jit", offload_optimizer=flag)
    for flag in (False, True)
  )
  assert kinds(plain) == [{"device"}, {"device"}]
  assert kinds(moved) == [{"pinned_host"}, {"device"}]
  assert trainers.equal(trainers.leaves(plain.model), trainers.leaves(moved.model))
  both = [
    {n: trainers.as_numpy(x) for n, x in tree.flatten(t.optimizer.opt_state).items()}
    for t in (plain, moved)
  ]
  assert trainers.equal(*both)
  if mesh is not None:
    moments = [
      t.optimizer.opt_state[0].mu["embed"]["embedding"] for t in (plain, moved)
    ]
    assert [x.sharding.spec[0] for x in moments] == ["fsdp", "fsdp"]


@pytest.mark.parametrize("first", [False, True])
def test_a_run_goes_on_with_it_or_without(first, tmp_path):
  data = trainers.smalls(resume_test.STEPS)
  whole = resume_test.run(tmp_path / "whole", data)
  cut = tmp_path / "cut"
  options = {"max_steps": 3, "offload_optimizer": first}
  resume_test.run(cut, data, **options)
  t = resume_test.make(cut, offload_optimizer=not first)
  assert t.train_steps == 3
  assert kinds(t)[0] == {"device" if first else "pinned_host"}
  t.close()
  assert resume_test.same(
    resume_test.run(cut, data, offload_optimizer=not first), whole
  )


def test_devices_without_such_memory_are_refused(monkeypatch):
  memory = types.SimpleNamespace(kind="unpinned_host")
  device = types.SimpleNamespace(platform="cpu", addressable_memories=lambda: [memory])
  monkeypatch.setattr(offload.jax, "local_devices", lambda: [device])
  with pytest.raises(ValueError, match="offload_optimizer is True and cpu devices"):
    trainer(offload_optimizer=True)


def test_a_plan_counts_it_on_no_device(mesh_fsdp8):
  rows = NamedSharding(mesh_fsdp8, P("fsdp"))
  shape = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=rows)
  where = offload.layout(shape, rows)
  assert residents.shard_bytes(shape) == 32
  moved = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=where)
  assert offload.is_on_host(moved) and residents.shard_bytes(moved) == 0
