"""What every kind of job learns in two steps on some mesh: losses and gradients.

In several processes: python jobs_on_meshes.py RANK PORT COUNT FOLDER JOB MESH
"""

import math
import pathlib
import sys

import jax
import numpy as np

from tests import optimizers, toys
from tests.distillation import trainers as distilling
from tests.rl import clusters
from tests.sft.dpo import preferences
from tunix.distillation.distillation_trainer import (
  DistillationTrainer,
  TrainingConfig as DistillationConfig,
)
from tunix.distillation.strategies import LogitStrategy
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.sft import sharding_utils
from tunix.sft.config import TrainingConfig
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig
from tunix.sft.peft_trainer import PeftTrainer
from tunix.utils import mesh as mesh_lib, tree

MESHES = {
  "one device": {"fsdp": 1},
  "fsdp 2": {"fsdp": 2},
  "fsdp 4": {"fsdp": 4},
  "fsdp 8": {"fsdp": 8},
  "tp 2": {"fsdp": 1, "tp": 2},
  "fsdp 4 x tp 2": {"fsdp": 4, "tp": 2},
  "dp 8": {"dp": 8},
  "fsdp 2 x cp 4": {"fsdp": 2, "cp": 4},
  "cp 8": {"cp": 8},
}
RATE = 0.05


def optimizer():
  """SGD whose state is the last gradient."""
  return optimizers.sgd(RATE, momentum=0.0)


class Losses:
  """A hook that keeps them."""

  def __init__(self):
    self.values = []

  def on_train_step_end(self, trainer, step, loss):
    self.values.append(float(loss))


def of_trainer(trainer, data):
  hook = Losses()
  trainer.with_training_hooks(hook).train(data)
  return {"losses": np.asarray(hook.values), **gradients(trainer)}


def gradients(trainer, prefix=""):
  flat = tree.flatten(mesh_lib.to_host(trainer.optimizer.opt_state))
  return {f"{prefix}{k}": x for k, x in flat.items() if np.ndim(x)}


def sft(part, **options):
  model = preferences.model()
  t = PeftTrainer(model, optimizer(), TrainingConfig(pbar_description=None, **options))
  return of_trainer(t, [part(toys.batch(i)) for i in range(2)])


def dpo(part, **options):
  config = DPOTrainingConfig(pbar_description=None, **options)
  policy, reference = (preferences.model(seed) for seed in range(2))
  t = DPOTrainer(policy, reference, optimizer(), config)
  return of_trainer(t, [part(preferences.pairs(i, rows=8)) for i in range(2)])


def distill(part, **options):
  student, teacher = preferences.model(), distilling.teacher(num_layers=1)
  config = DistillationConfig(pbar_description=None, **options)
  t = DistillationTrainer(student, teacher, LogitStrategy(), optimizer(), config)
  return of_trainer(t, [part(toys.batch(i)) for i in range(2)])


def _rl(learner):
  learner.train(clusters.prompts(2, size=4))
  cluster = learner.rl_cluster
  out = gradients(cluster.actor_trainer, "actor.")
  if cluster.critic_trainer is not None:
    out |= gradients(cluster.critic_trainer, "critic.")
  learner.close()
  return out


def grpo(part, **options):
  del part  # every process is given all prompts
  cluster = clusters.cluster(
    reference=clusters.model(1), actor_optimizer=optimizer(), **options
  )
  return _rl(GRPOLearner(cluster, GRPOConfig(num_generations=4), clusters.even))


def ppo(part, **options):
  del part
  cluster = clusters.cluster(
    critic=True,
    actor_optimizer=optimizer(),
    critic_optimizer=optimizer(),
    **options,
  )
  return _rl(PPOLearner(cluster, PPOConfig(beta=0.0), clusters.even))


JOBS = {"sft": sft, "dpo": dpo, "distill": distill, "grpo": grpo, "ppo": ppo}


def learnt(job, mesh):
  """Losses of the steps and gradients of the last one, by name."""
  axes = MESHES[mesh]
  rows = tuple(axis for axis in ("dp", "fsdp") if axis in axes)
  made = mesh_lib.create_mesh(axes, jax.devices()[: math.prod(axes.values())])
  number, count = sharding_utils.process_part(made, rows)

  def part(batch):
    rows = len(next(iter(batch.values()))) // count
    return {k: x[number * rows :][:rows] for k, x in batch.items()}

  with jax.set_mesh(made):
    return JOBS[job](part, data_sharding_axis=rows)


def main() -> None:
  rank, port, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
  folder, job, mesh = pathlib.Path(sys.argv[4]), sys.argv[5], sys.argv[6]
  jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=rank)
  out = learnt(job, mesh)
  np.savez(folder / f"{rank}.npz", **out)
  print("done")


if __name__ == "__main__":
  main()
