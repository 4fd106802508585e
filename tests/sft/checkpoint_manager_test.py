"""Checkpoints of modules: what is saved, restored, refused, and what damage does."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests import optimizers
from tests.sft import trainers
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.checkpoints import orbax_options
from tunix.sft.config import CheckpointOptions
from tunix.utils import coordination

SYNC = CheckpointOptions(save_every_n_steps=1, asynchronous=False)


class Pair(nnx.Module):
  """A module with a LoRA parameter, a base and a counter; nothing to compile."""

  def __init__(self, value=0.0, width=8):
    self.base = nnx.Param(jnp.full((width, 2), value))
    self.lora = nnx.LoRAParam(jnp.full((width, 1), value, jnp.bfloat16))
    self.count = nnx.Variable(jnp.array(int(value)))


class Plain(nnx.Module):
  def __init__(self, value=0.0):
    self.base = nnx.Param(jnp.full((8, 2), value))


def manager(path, **options):
  values = {"save_every_n_steps": 1, "asynchronous": False, **options}
  return CheckpointManager(path, CheckpointOptions(**values))


def test_a_module_comes_back_with_its_metadata(tmp_path):
  m = manager(tmp_path)
  assert m.latest_step() is None and m.maybe_restore(Pair()) == (0, {})
  assert m.save(3, saved := Pair(3.0), custom_metadata={"note": ["x", 1]})
  m.close()
  m = manager(tmp_path)
  assert m.latest_step() == 3
  assert m.maybe_restore(model := Pair()) == (3, {"note": ["x", 1]})
  assert trainers.equal(trainers.leaves(model), trainers.leaves(saved))
  assert model.lora.dtype == jnp.bfloat16 and int(model.count[...]) == 3
  assert {"model_params", "custom_metadata"} <= {
    p.name for p in (tmp_path / "3").iterdir()
  }


def test_metadata_that_is_no_json_is_refused_before_anything_is_written(tmp_path):
  m = CheckpointManager(tmp_path)  # in the background, whose errors come late
  with pytest.raises(
    TypeError, match=r"custom_metadata of a checkpoint cannot .* JSON"
  ):
    m.save(1, Pair(), custom_metadata={"weight": jnp.ones(())})
  assert not list(tmp_path.iterdir())


def test_steps_are_chosen_and_old_ones_deleted(tmp_path):
  m = manager(tmp_path, max_to_keep=2)
  for step in (1, 2, 3):
    m.save(step, Pair(float(step)))
  assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
  assert m.maybe_restore(model := Pair(), step=2)[0] == 2
  assert model.base[0, 0] == 2
  with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 1 .* \[2, 3\]"):
    m.maybe_restore(Pair(), step=1)
  assert not m.save(3, Pair()), "a step is saved once"


def test_what_a_killed_save_had_not_deleted_is_pruned(tmp_path):
  m = manager(tmp_path, max_to_keep=None)
  for step in (1, 2, 3):
    m.save(step, Pair())
  m.prune()
  m.close()
  (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()  # deleted in part
  manager(tmp_path, max_to_keep=2).prune()
  assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_cadence_by_steps_and_by_time(tmp_path):
  by_steps = manager(tmp_path / "a", save_every_n_steps=3)
  assert [by_steps.save(step, Plain()) for step in (1, 2, 3, 4)] == [0, 0, 1, 0]
  assert by_steps.save(4, Plain(), force=True)
  seldom = manager(tmp_path / "b", save_every_n_steps=None, min_interval_secs=3600)
  assert [seldom.save(step, Plain()) for step in (1, 2, 3)] == [1, 0, 0]
  often = manager(tmp_path / "c", save_every_n_steps=None, min_interval_secs=0)
  assert [often.save(step, Plain()) for step in (1, 2, 3)] == [1, 1, 1]


def test_only_lora_parameters(tmp_path):
  m = manager(tmp_path / "lora")
  m.save(1, Pair(5.0), save_only_lora_params=True)
  m.restore(model := Pair(), restore_only_lora_params=True)
  assert model.lora[0, 0] == 5 and model.base[0, 0] == 0 and model.count[...] == 0
  with pytest.raises(ValueError, match="base is not in it"):
    m.restore(Pair())
  with pytest.raises(ValueError, match="Plain has no LoRA parameters"):
    m.save(2, Plain(), save_only_lora_params=True)
  full = manager(tmp_path / "full")
  full.save(1, Pair(5.0))
  full.restore(model := Pair(), restore_only_lora_params=True)
  assert model.lora[0, 0] == 5 and model.base[0, 0] == 0 and model.count[...] == 0


def test_an_nnx_optimizer_goes_around(tmp_path):
  def updated():
    model = Plain(1.0)
    optimizer = nnx.Optimizer(model, optimizers.adam(0.1), wrt=nnx.Param)
    gradient = nnx.grad(lambda m: jnp.sum(m.base[...] ** 2))(model)
    optimizer.update(model, gradient)
    return model, optimizer

  model, optimizer = updated()
  m = manager(tmp_path)
  m.save(1, model, optimizer)
  other = Plain()
  fresh = nnx.Optimizer(other, optimizers.adam(0.1), wrt=nnx.Param)
  m.restore(other, fresh)
  assert int(fresh.step[...]) == 1
  assert trainers.equal(
    trainers.leaves(fresh), trainers.leaves(optimizer)
  ) and trainers.equal(trainers.leaves(other), trainers.leaves(model))
  assert m.maybe_restore(Plain())[0] == 1, "the optimizer may be left out"


def test_numbers_and_states_are_no_optimizers_to_restore(tmp_path):
  m = manager(tmp_path)
  with pytest.raises(TypeError, match=r"optimizer is 3; expected an nnx\.Opt"):
    m.save(1, Plain(), 3)
  m.save(1, Plain(), optimizers.adam(0.1).init({"w": jnp.ones(2)}))
  for wrong in (3, optimizers.adam(0.1).init({"w": jnp.ones(2)})):
    with pytest.raises(TypeError, match="cannot be restored in place"):
      m.maybe_restore(Plain(), wrong)


def test_without_a_folder_nothing_happens():
  m = CheckpointManager()
  assert not m.save(1, Plain(), force=True) and m.latest_step() is None
  assert m.maybe_restore(Plain()) == (0, {})
  with pytest.raises(FileNotFoundError, match="made without a root directory"):
    m.restore(Plain())
  m.close()


def test_strict_restore_and_a_closed_manager(tmp_path):
  m = manager(tmp_path)
  with pytest.raises(FileNotFoundError, match=f"no checkpoint in {tmp_path}"):
    m.restore(Plain())
  m.close()
  m.close()
  for use in (lambda: m.save(1, Plain(), force=True), lambda: m.maybe_restore(Plain())):
    with pytest.raises(RuntimeError, match="is closed"):
      use()
  with pytest.raises(TypeError, match="options is a dict"):
    CheckpointManager(tmp_path, {})  # pyright: ignore[reportArgumentType]


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(tmp_path):
  m = manager(tmp_path)
  m.save(1, Pair(1.0))
  with pytest.raises(ValueError, match=r"base is float32\[8, 2\] in it and float32\["):
    m.maybe_restore(Pair(width=16))
  with pytest.raises(ValueError, match="it also has lora"):
    m.maybe_restore(Plain())
  model = Pair()
  optimizer = nnx.Optimizer(model, optimizers.adam(0.1), wrt=nnx.Param)
  with pytest.raises(ValueError, match=r"\(optimizer_state\): .* is not in it"):
    m.maybe_restore(model, optimizer)
  assert [p.name for p in tmp_path.iterdir()] == ["1"]


def biggest(folder: pathlib.Path) -> pathlib.Path:
  files = [p for p in folder.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def truncate(folder):
  path = biggest(folder / "model_params")
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
  "truncated data": truncate,
  "no metadata of arrays": lambda f: (f / "model_params" / "_METADATA").unlink(),
  "no item": lambda f: shutil.rmtree(f / "model_params"),
  "no JSON item": lambda f: shutil.rmtree(f / "custom_metadata"),
  "broken JSON": lambda f: [
    p.write_text("{") for p in (f / "custom_metadata").rglob("*") if p.is_file()
  ],
  "empty": lambda f: [shutil.rmtree(p) for p in f.iterdir() if p.is_dir()],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside(tmp_path, kind, caplog):
  m = manager(tmp_path)
  for step in (1, 2):
    m.save(step, trainers.tokens_only(step), custom_metadata={"step": step})
  m.close()
  DAMAGE[kind](tmp_path / "2")
  m = manager(tmp_path)
  model = trainers.tokens_only()
  assert m.maybe_restore(model) == (1, {"step": 1})
  want = trainers.leaves(trainers.tokens_only(1))
  assert trainers.equal(trainers.leaves(model), want)
  assert "renamed to 2.damaged" in caplog.text and m.latest_step() == 1
  assert {p.name for p in tmp_path.iterdir()} == {"1", "2.damaged"}
  assert m.save(2, model), "the step can be saved again"
  truncate(tmp_path / "2")
  truncate(tmp_path / "1")
  before = trainers.leaves(model)
  with pytest.raises(RuntimeError, match=r"none of the checkpoints \[1, 2\] .* can be"):
    m.maybe_restore(model)
  assert trainers.equal(before, trainers.leaves(model))
  assert {p.name for p in tmp_path.iterdir()} == {"1", "2", "2.damaged"}, "all stay"


@pytest.mark.parametrize(
  "error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: 8 GiB"), OSError(5, "nfs")]
)
def test_a_machine_that_cannot_read_renames_nothing(tmp_path, monkeypatch, error):
  m = manager(tmp_path)
  for step in (1, 2):
    m.save(step, trainers.tokens_only(step))
  m.wait()

  def fail(*_):
    raise error

  monkeypatch.setattr(m, "_read", fail)
  with pytest.raises(type(error)):
    m.maybe_restore(trainers.tokens_only())
  assert {p.name for p in tmp_path.iterdir()} == {"1", "2"}


def test_what_is_being_written_is_waited_for(tmp_path):
  m = CheckpointManager(tmp_path, CheckpointOptions(save_every_n_steps=1))
  model = trainers.tokens_only(1)
  m.save(1, model)
  assert m.maybe_restore(other := trainers.tokens_only())[0] == 1
  assert trainers.equal(trainers.leaves(other), trainers.leaves(model))
  m.close()


def test_a_second_manager_waits_for_the_first_one_s_save(tmp_path):
  first = manager(tmp_path, asynchronous=True)
  assert first.save(1, Pair(1.0, width=2**21))
  second = manager(tmp_path)
  assert second.maybe_restore(model := Pair(width=2**21))[0] == 1
  assert float(model.base[0, 0]) == 1.0


def test_another_dtype_is_another_model(tmp_path):
  m = manager(tmp_path)
  m.save(1, Plain())
  half = Plain()
  nnx.update(half, jax.tree.map(lambda x: x.astype("bfloat16"), nnx.state(half)))
  with pytest.raises(ValueError, match=r"float32\[.*\] in it and bfloat16\["):
    m.maybe_restore(half)


def test_options_of_orbax_are_understood(tmp_path):
  import orbax.checkpoint as ocp

  options = ocp.CheckpointManagerOptions(save_interval_steps=3, max_to_keep=2)
  m = CheckpointManager(tmp_path, options)
  saved = [step for step in range(1, 10) if m.save(step, Plain())]
  m.close()
  assert saved == [1, 3, 6, 9] or saved == [3, 6, 9]
  assert {p.name for p in tmp_path.iterdir()} == {"6", "9"}
  policy = ocp.checkpoint_managers.ContinuousCheckpointingPolicy(
    minimum_interval_secs=50
  )
  by_time = ocp.CheckpointManagerOptions(save_decision_policy=policy)
  assert orbax_options.from_any(by_time).min_interval_secs == 50
  with pytest.raises(ValueError, match="keep_period is 4, which has no counterpart"):
    CheckpointManager(tmp_path, ocp.CheckpointManagerOptions(keep_period=4))


def test_it_is_restored_onto_the_layout_of_the_model(tmp_path, mesh_fsdp8):
  def on_mesh(seed):
    with jax.set_mesh(mesh_fsdp8):
      model = trainers.wide(seed)
      trainers.trainer(model)
    return model

  m = manager(tmp_path)
  m.save(1, model := on_mesh(1))
  m.save(2, plain := trainers.wide(2))
  m.restore(one := trainers.wide(), step=1)
  m.restore(eight := on_mesh(0), step=2)
  assert trainers.equal(trainers.leaves(one), trainers.leaves(model))
  assert trainers.equal(trainers.leaves(eight), trainers.leaves(plain))
  for restored, form in ((one, plain), (eight, model)):
    pairs = zip(*(jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (restored, form)))
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
  specs = [x.sharding.spec for x in jax.tree.leaves(nnx.state(eight, nnx.Param))]
  assert any(spec != P() for spec in specs)


def test_failures_to_write_are_one_line(tmp_path):
  from tunix.sft.checkpoints.errors import named_failure

  for error in (OSError(), OSError("first\nsecond"), ValueError("x: ENOSPC")):
    raises = pytest.raises(OSError, match="could not be written")
    with raises as raised, named_failure("folder", 3):
      raise error
    assert "\n" not in str(raised.value) and "make room" in str(raised.value)
  full = ValueError("RESOURCE_EXHAUSTED: f: 4: No space left [os_error_code='28']")
  reason = r"\(in folder\): No space left\. Earlier"
  with pytest.raises(OSError, match=reason), named_failure("folder", None):
    raise full
  for error in (ValueError("unrelated"), coordination.AbsentError("1: ENOSPC")):
    with pytest.raises(type(error)) as same, named_failure("folder", 3):
      raise error
    assert same.value is error
