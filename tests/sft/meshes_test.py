"""No mesh, jax.set_mesh, `with mesh:`, Auto and Explicit axes."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests import optimizers, toys
from tests.sft import trainers
from tests.sft.trainers import trainer, wide
from tunix.utils import tree


def explicit():
  return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))


DATA = [trainers.small(seed, rows=8) for seed in range(3)]


@pytest.fixture(scope="module")
def expected():
  model = wide()
  trainer(model).train(DATA, DATA[:1])
  return trainers.leaves(model)


@pytest.mark.parametrize("where", ["set_mesh", "legacy", "explicit", "built outside"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_kind_of_mesh_trains_alike(where, expected, mesh_fsdp8):
  contexts = {
    "set_mesh": lambda: jax.set_mesh(mesh_fsdp8),
    "legacy": lambda: mesh_fsdp8,
    "explicit": lambda: jax.set_mesh(explicit()),
    "built outside": lambda: jax.set_mesh(mesh_fsdp8),
  }
  model = wide()
  t = trainer(model) if where == "built outside" else None
  with contexts[where](), trainers.compilations() as names:
    t = t or trainer(model)
    t.train(DATA, DATA[:1])
  assert names.count("jit(step)") == 2, names  # one to train, one to evaluate
  got = trainers.leaves(model)
  for name, value in expected.items():
    np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=name)
  moments = tree.flatten(t.optimizer.opt_state)
  params = tree.flatten(t._module.params)
  split = [x for n, x in {**params, **moments}.items() if n.endswith("embedding")]
  assert len(split) == 3
  for array in split:
    assert array.sharding.shard_shape(array.shape) == (toys.VOCAB // 8, 16)
  assert moments["0.count"].sharding.is_fully_replicated


def test_training_goes_on_without_and_on_another_mesh(mesh_fsdp8, mesh_fsdp4_tp2):
  model, plain = wide(), wide()
  t = trainer(model)
  t.train_step(DATA[0])
  twin = nnx.clone(model)
  kept = trainers.leaves(twin)
  with jax.set_mesh(mesh_fsdp8):
    t.train_step(DATA[1])
  with jax.set_mesh(mesh_fsdp4_tp2):
    t.train_step(DATA[2])
  t.train_step(DATA[0])  # stays where it is
  assert t._module.params["out"]["kernel"].sharding.mesh == mesh_fsdp4_tp2
  trainer(plain).train([*DATA, DATA[0]])
  for name, value in trainers.leaves(plain).items():
    np.testing.assert_allclose(trainers.leaves(model)[name], value, atol=1e-5)
  assert trainers.equal(kept, trainers.leaves(twin)), "a clone made without a mesh"


def test_an_axis_that_the_mesh_lacks(mesh_fsdp8):
  with jax.set_mesh(mesh_fsdp8):
    t = trainer(wide(), data_sharding_axis=("dp",))
    with pytest.raises(ValueError, match=r"no axis 'dp', it has \('fsdp',\)"):
      t.train_step(DATA[0])


def test_the_batch_is_split_over_the_axes_named(mesh_fsdp4_tp2):
  for axes, rows in ((("fsdp",), 2), (("fsdp", "tp"), 1), ((), 8)):
    with jax.set_mesh(mesh_fsdp4_tp2):
      t = trainer(wide(), data_sharding_axis=axes)
      (((batch,), _),) = t._window([DATA[0]], None).groups
    tokens = batch["input_tokens"]
    assert tokens.sharding.shard_shape(tokens.shape) == (rows, 8)


def test_lora_on_a_mesh_compiles_once_and_keeps_the_layout(mesh_fsdp4_tp2):
  with jax.set_mesh(mesh_fsdp4_tp2):
    t = trainer(toys.model(num_layers=1, lora_rank=2))
    before = {k: x.sharding for k, x in tree.flatten(t._module.params).items()}
    with trainers.compilations() as names:
      t.train(toys.batches(3))
  assert names.count("jit(step)") == 1, names
  after = {k: x.sharding for k, x in tree.flatten(t._module.params).items()}
  assert before == after
  assert any("tp" in str(s.spec) for s in after.values())
  assert any("fsdp" in str(s.spec) for s in after.values())


def test_arrays_on_an_explicit_mesh_keep_their_layout_without_metadata():
  model = trainers.tokens_only()
  mesh = explicit()
  model.out.kernel.set_value(
    jax.device_put(model.out.kernel[...], NamedSharding(mesh, P(None, "fsdp")))
  )
  t = trainer(model, tx=optimizers.sgd(0.1))
  t.train_step(DATA[0])
  assert t._module.params["out"]["kernel"].sharding.spec == P(None, "fsdp")


class Looking:
  """A hook that calls the model, as a user would inside the mesh."""

  def __init__(self):
    self.logits = []

  def on_train_step_end(self, trainer, step, loss):
    self.logits.append(np.asarray(trainer.model(DATA[0]["input_tokens"])))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_model_comes_back_on_the_users_explicit_mesh(lora_rank):
  """Called, jitted, differentiated and trained on inside `set_mesh`, frozen leaves as
  well, and after it was trained under no mesh at all."""
  batches = [toys.batch(seed) for seed in range(2)]
  plain = toys.model(num_layers=1, lora_rank=lora_rank)
  trainer(plain).train(batches)
  mesh = explicit()
  with jax.set_mesh(mesh):
    model = toys.model(num_layers=1, lora_rank=lora_rank)
    t = trainer(model)
    for batch in batches:
      t.train_step(batch)
      arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
      assert {x.sharding.mesh for x in arrays} == {mesh}
      # Not op by op: hundreds of collectives in flight on eight devices of two cores
      # can wait for each other for ever.
      nnx.jit(nnx.grad(lambda m, x: m(x)[0].sum()))(model, batch["input_tokens"])
  want, _ = plain(batches[0]["input_tokens"])
  with jax.set_mesh(mesh):
    got, _ = nnx.jit(lambda m, x: m(x))(model, batches[0]["input_tokens"])
  np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_model_is_called_op_by_op_on_an_explicit_mesh():
  """Of one device, see above."""
  tokens = toys.batch(0)["input_tokens"]
  want, _ = toys.model(num_layers=1)(tokens)
  with jax.set_mesh(jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])):
    got, _ = toys.model(num_layers=1)(tokens)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_users_module_is_called_by_hooks_on_the_explicit_mesh():
  hook = Looking()
  with jax.set_mesh(explicit()):
    trainer(wide()).with_training_hooks(hook).train(DATA)
  assert len(hook.logits) == 3 and np.isfinite(hook.logits).all()
