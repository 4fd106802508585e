"""What processes_test runs in each process: RANK PORT COUNT FOLDER JOB WHAT...."""

import contextlib
import functools
import gc
import json
import pathlib
import shutil
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from tests import optimizers
from tests.rl import clusters
from tests.rl.env import toy_envs
from tests.rl.rollout import hosts
from tunix.cli.main import GC_THRESHOLD
from tunix.rl.algorithm_config import RolloutCorrection
from tunix.rl.config import Role
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.reward.rewards import RewardManager
from tunix.rl.schedules.journal import JournalError
from tunix.rl.weights import local_arrays, reshard
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import JsonlBackend, MetricsLoggerOptions
from tunix.utils import coordination, mesh as mesh_lib, tree

CALLS = []
CLOSES = contextlib.ExitStack()
TEXTS = []  # completions, in the order of the batches


def counted(prompts, completions, **columns):
  CALLS.append(len(prompts))
  return clusters.even(prompts, completions, **columns)


def noted(prompts, completions, rewards, **columns):
  TEXTS.extend(completions)
  return {"noted": len(completions)}


def learner(job, folder, steps, **more):
  options: dict[str, Any] = more | {
    "mini_batch_size": 4,
    "max_steps": steps,
    "eval_every_n_steps": 2,
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=1),
    "metrics_logging_options": MetricsLoggerOptions(
      folder, backend_factories=[lambda: JsonlBackend(folder)]
    ),
  }
  rewards = RewardManager([counted], rows_per_call=1)
  if job.startswith(("engines", "hosts")):
    return engines(job, rewards, **options)
  if job == "ppo":
    cluster = clusters.cluster(clusters.model(), critic=True, **options)
    return PPOLearner(cluster, PPOConfig(beta=0.0), rewards)
  cluster = clusters.cluster(
    clusters.model(),
    reference=clusters.model(1),
    actor_optimizer=optimizers.adam(1e-2),
    **options,
  )
  correction = RolloutCorrection()
  config = GRPOConfig(num_generations=4, beta=0.04, rollout_correction=correction)
  return GRPOLearner(cluster, config, rewards)


class Fragile(toy_envs.Echo):
  """Fails in some episodes of the last prompt of a batch."""

  async def step(self, action):
    if self._number == 3 and action[0] % 2:
      raise RuntimeError("the sandbox is gone")
    return await super().step(action)


def engines(job, rewards, **options: Any):
  """Engines in each process, or on hosts: "engines-lagged-env", "hosts-lagged-env"."""
  if jax.process_count() == 1:  # two devices train, one of them samples as well
    mesh = mesh_lib.create_mesh({"tp": 1}, jax.devices()[:1])
    options["role_to_mesh"] = {Role.ROLLOUT: mesh}
  if name := next((x for x in ("lagged", "greedy") if x in job), None):
    options["schedule"] = name
  more = {"reward_fns": rewards}
  # As many slots as a process of two needs: sums of other sizes are rounded otherwise.
  rollout: dict[str, Any] = {"slots": 8}
  options["rollout"] = rollout
  if "env" in job:
    rollout |= {"max_tokens_to_generate": 4, "max_prompt_length": 8}
    limits = EpisodeConfig(max_turns=3, max_tokens=24)
    more = {"env": Fragile, "episodes": limits}
    if "greedy" in job:  # each process computes those of its own prompts
      more["reward_fns"] = rewards
  engine = "per_process"
  if job.startswith("hosts"):
    engine, rollout["engine_options"] = "remote", {"urls": host_urls()}
  cluster = clusters.cluster(
    clusters.model(),
    rollout_engine=engine,
    **options,
  )
  config = GRPOConfig(num_generations=4, beta=0.0)
  return GRPOLearner(cluster, config, metric_fns=noted, **more)


@functools.cache
def host_urls():
  """Serves a host in each process; the addresses of all."""
  urls, _ = CLOSES.enter_context(hosts.served(lambda: hosts.make(slots=8)))
  return [url for [url] in coordination.gather("hosts", urls)]


def run(job, folder, steps, batches=4, **options):
  """Trains on; returns the step it began at, and the weights."""
  out = learner(job, folder, steps, **options)
  start = out.train_steps
  out.train(clusters.prompts(batches, size=4), clusters.prompts(1, size=4, seed=9))
  params = out.rl_cluster.actor_trainer._module.params
  weights = {k: mesh_lib.to_host(x) for k, x in tree.flatten(params).items()}
  out.close()
  return start, weights


def whole(job, folder):
  """The run in one go."""
  CALLS.clear()
  TEXTS.clear()
  _, weights = run(job, folder / "whole", 4)
  (folder / f"rows-{jax.process_index()}").write_text(str(sum(CALLS)))
  (folder / f"texts-{jax.process_index()}.json").write_text(json.dumps(TEXTS))
  if jax.process_index() == 0:
    np.savez(folder / "weights.npz", **weights)


def cut(job, folder):
  """The run cut in the middle: the same bytes."""
  run(job, folder / "cut", 2)
  if jax.process_index() == 0:
    shutil.copytree(folder / "cut", folder / "half")  # for one process to go on from
  coordination.gather("a copy", None)
  start, weights = run(job, folder / "cut", 4)
  assert start == 2
  if jax.process_index() == 0:
    for name, value in np.load(folder / "weights.npz").items():
      np.testing.assert_array_equal(weights[name], value, err_msg=name)


def replayed(job, folder):
  """A run cut in the middle, and its replay: the same bytes."""
  run(job, folder / "cut", 2)
  start, weights = run(job, folder / "cut", 4)
  assert start == 2
  decisions = str(folder / "cut" / "checkpoints" / "journal")
  start, again = run(job, folder / "again", 4, replay=decisions)
  assert start == 0
  for name, value in weights.items():
    np.testing.assert_array_equal(value, again[name], err_msg=name)
  lines = [(folder / x / "metrics.jsonl").read_bytes() for x in ("cut", "again")]
  assert lines[0] == lines[1]


def is_of_several(job, folder):
  """One process does not go on with the journals of several."""
  try:
    run(job, folder / "cut", 5)
  except JournalError as error:
    assert "belongs to a run with several, and this run has 1 process" in str(error)
  else:
    raise AssertionError("they were taken")


def from_half(job, folder):
  """Goes on from what other processes left."""
  start, weights = run(job, folder / "half", 4)
  assert start == 2
  np.savez(folder / "half.npz", **weights)


def roles(job, folder):
  """The rollout on other axes of the same devices; on other devices it is refused."""
  del job, folder
  axes = {"fsdp": 4, "tp": 2}
  for devices in (jax.devices(), jax.devices()[::-1]):
    mesh = mesh_lib.create_mesh(axes, devices)
    refused = devices != jax.devices()
    try:
      out = clusters.grpo(role_to_mesh={Role.ROLLOUT: mesh}, max_steps=1)
    except ValueError as error:
      assert refused and "rollout has other devices than the actor" in str(error), error
    else:
      assert not refused
      out.train(clusters.prompts(1, size=4))
      assert out.rl_cluster.actor_trainer.train_steps == 1
      out.close()


def local(job, folder):
  """Arrays over all processes are copied to a mesh of this process."""
  del job, folder
  devices, count = jax.devices(), jax.process_count()
  each = len(devices) // count
  mixed = [d for i in range(each) for d in devices[i::each]]  # one of each process
  here = mesh_lib.create_mesh({"tp": each}, jax.local_devices())
  value = np.arange(8 * 24, dtype=np.float32).reshape(8, 24)
  for order in (devices, mixed):
    mesh = mesh_lib.create_mesh({"fsdp": len(devices)}, order)
    local_arrays.check_mesh(mesh, here)
    spread = jax.device_put(value, jax.NamedSharding(mesh, P("fsdp")))
    for spec in (P(None, "tp"), P("tp"), P()):
      target = jax.NamedSharding(here, spec)
      out = reshard.reshard_pytree(spread, target)
      assert out.sharding == target and out.is_fully_addressable
      np.testing.assert_array_equal(out, value)


def refused(job, folder):
  """What an engine in each process cannot do, by name."""
  mine = mesh_lib.create_mesh({"tp": 1}, jax.devices()[-1:])
  cases: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "greedy", "rollout_engine": "vanilla"}, "started in another order"),
    ({"schedule": "lagged", "rollout_engine": "vanilla"}, "started in another order"),
    ({"role_to_mesh": {Role.ROLLOUT: mine}}, "which is a device of process 1"),
    (
      {"rollout_engine": "vllm"},
      "expected one of vanilla, per_process, padded, remote",
    ),
  ]
  for options, part in cases:
    if "role_to_mesh" in options and jax.process_index() == 1:
      continue  # the other one does not reach an exchange
    try:
      clusters.grpo(**{"rollout_engine": "per_process", **options})
    except ValueError as error:
      assert part in str(error), error
    else:
      raise AssertionError(f"{options} was taken")
  try:
    cluster = clusters.cluster(clusters.model())
    GRPOLearner(cluster, GRPOConfig(beta=0.0), env=toy_envs.Echo)
  except ValueError as error:
    assert "whose environments cannot share one engine" in str(error), error
  else:
    raise AssertionError("environments were taken")


def different_prompts(job, folder):
  out = learner(job, folder, 4)
  seed = jax.process_index()
  try:
    out.train(clusters.prompts(1, size=4, seed=seed))
  except ValueError as error:
    assert "(train): digest is" in str(error), error
    assert "given the same prompts" in str(error), error
  else:
    raise AssertionError("they were taken")


def do(job, folder, what, devices=None):
  """Calls the functions of these names over the first devices, or over all."""
  devices = jax.devices()[:devices]
  with jax.set_mesh(mesh_lib.create_mesh({"fsdp": len(devices)}, devices)):
    for name in what:
      globals()[name](job, folder)


def main() -> None:
  gc.set_threshold(*GC_THRESHOLD)
  rank, port, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
  folder, job = pathlib.Path(sys.argv[4]), sys.argv[5]
  if count > 1:
    jax.distributed.initialize(
      f"localhost:{port}", num_processes=count, process_id=rank
    )
    try:
      learner(job, folder / "nowhere", 4)
    except ValueError as error:
      part = f"the actor is on devices of 1 of {count} processes"
      assert part in str(error), error
    else:
      raise AssertionError("models on one device were taken")
  do(job, folder, sys.argv[6:])
  CLOSES.close()
  print("done")


if __name__ == "__main__":
  main()
