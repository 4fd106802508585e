"""Every kind of job inside a mesh with Explicit axes gives what it gives on the same
mesh with Auto axes."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests import optimizers, toys
from tests.distillation import trainers as distilling
from tests.generate.toy_ids import Ids
from tests.rl import clusters
from tests.sft import trainers
from tests.sft.dpo import preferences
from tunix.generate.sampler import Sampler
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import Role
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig


def mesh_of(kind):
  axes = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
  return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=axes)


def split(mesh, model):
  """The model with its arrays laid out on the mesh by its specs."""
  for _, node in nnx.iter_graph(model):
    if isinstance(node, nnx.Variable):
      x, spec = node.get_value(), node.get_metadata().get("out_sharding") or ()
      entries = [
        axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(spec, x.shape)
      ]
      node.set_value(jax.device_put(x, NamedSharding(mesh, P(*entries))))
  return model


def sft(mesh):
  model = split(mesh, toys.model(num_layers=1, lora_rank=2))
  trainers.trainer(model).train([toys.batch(0)], [toys.batch(1)])
  return model


def dpo(mesh):
  model, reference = (split(mesh, preferences.model(seed)) for seed in range(2))
  config = DPOTrainingConfig(pbar_description=None)
  trainer = DPOTrainer(model, reference, optimizers.adam(1e-2), config)
  trainer.train([preferences.pairs(rows=8)])
  return model


def distil(mesh):
  student = split(mesh, distilling.fresh_student())
  teacher = split(mesh, distilling.teacher())
  trainer = distilling.trainer(student=student, known=teacher)
  trainer.train([toys.batch(0)])
  return student


def grpo(mesh):
  model, reference = (split(mesh, clusters.model(seed)) for seed in range(2))
  roles = {Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh}
  cluster = clusters.cluster(model, reference=reference, role_to_mesh=roles)
  learner = GRPOLearner(cluster, GRPOConfig(num_generations=2), clusters.even)
  learner.train(clusters.prompts(1))
  learner.close()
  return model


@pytest.mark.parametrize("job", [sft, dpo, distil, grpo])
def test_a_job(job):
  leaves = {}
  for kind in ("auto", "explicit"):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
      leaves[kind] = trainers.leaves(job(mesh))
  for name, want in leaves["auto"].items():
    # Adam makes a gradient's sign of what rounding leaves of a gradient of zero.
    np.testing.assert_allclose(leaves["explicit"][name], want, atol=2e-4, err_msg=name)


def test_sampling():
  out = {}
  for kind in ("auto", "explicit"):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
      sampler = Sampler(split(mesh, toys.model(num_layers=1)), Ids())
      prompts = ["3 4 5", "6"] * 4
      out[kind] = sampler(prompts, 5, temperature=1.0, seed=1).text
  assert out["auto"] == out["explicit"]
