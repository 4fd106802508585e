"""Runs one RL job of the kill drills: python -m tests.rl.drill_worker JOB FOLDER.

The arguments RANK COUNT PORT may follow, for one of several processes. A greedy job
whose FOLDER begins with "replay_" repeats the one beside it. A job that ends with
"-hosts" samples on the hosts of the environment variable HOSTS, and one that ends with
"-curriculum" chooses its prompts.
"""

import contextlib
import gc
import os
import pathlib
import sys
from typing import Any

import jax

from tests import optimizers, toys
from tests.rl import clusters
from tests.rl.env import toy_envs
from tunix.cli.main import GC_THRESHOLD
from tunix.models.automodel import AutoModel
from tunix.models.qwen3_5.model import ModelConfig, pattern
from tunix.models.transformer.config import DeltaNetConfig, fields_by_type
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.prompts.curriculum import CurriculumConfig
from tunix.rl.reward.judge import Judge
from tunix.rl.rl_learner import RLLearner
from tunix.sft import launch
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import CheckpointOptions
from tunix.utils import mesh as mesh_lib

STEPS = 24
CURRICULUM = "-curriculum"
HOSTS = "TUNIX_DRILL_HOSTS"
# A gated delta net below gated attention.
RECURRENT = ModelConfig(
  num_layers=2,
  layer_types=pattern(2, interval=2),
  type_fields=fields_by_type(
    linear={
      "mixer": DeltaNetConfig(num_heads=4, num_key_heads=2, head_dim=8, key_dim=8)
    }
  ),
  vocab_size=toys.VOCAB,
  embed_dim=32,
  hidden_dim=48,
  num_heads=2,
  num_kv_heads=1,
  head_dim=16,
)


def actor(job: str = ""):
  if job == "grpo-recurrent":
    return AutoModel.from_config(RECURRENT)
  rank = 4 if job == "grpo-lora" else 0
  return toys.model(embed_dim=64, hidden_dim=128, head_dim=16, lora_rank=rank)


def sometimes(prompts, completions, number, **columns):
  """Groups of odd-numbered prompts teach nothing: DAPO draws further ones."""
  values = clusters.even(prompts, completions, **columns)
  return [1.0 if n % 2 else value for value, n in zip(values, number)]


def learner(job: str, folder: pathlib.Path) -> RLLearner:
  """The learner of a job: "grpo", "grpo-lora", "lagged", "greedy-env-hosts", ..."""
  options: dict[str, Any] = {
    "max_steps": STEPS,
    "eval_every_n_steps": 6,
    "mini_batch_size": 2,
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=4),
    "metrics_logging_options": MetricsLoggerOptions(folder / "logs"),
  }
  rollout: dict[str, Any] = {}
  if jax.process_count() > 1:
    options["rollout_engine"] = "per_process"
  if job.endswith("-hosts"):
    job = job.removesuffix("-hosts")
    options["rollout_engine"] = "remote"
    urls = os.environ[HOSTS].split()
    rollout["engine_options"] = {"urls": urls, "lost_s": 120.0}
  options["rollout"] = rollout
  shared: dict[str, Any] = {"num_iterations": 2, "beta": 0.05, "pass_threshold": 0.5}
  if job.endswith(CURRICULUM):
    job = job.removesuffix(CURRICULUM)
    shared["curriculum"] = CurriculumConfig(easy_from=0.5, hard_chance=0.5)
  if job == "ppo":
    cluster = clusters.cluster(
      actor(),
      critic=True,
      reference=actor(),
      critic_optimizer=optimizers.adam(1e-3),
      **options,
    )
    return PPOLearner(cluster, PPOConfig(**shared), clusters.even, data_shuffle_seed=1)
  if job == "dapo":
    cluster = clusters.cluster(actor(), **options)
    config = DAPOConfig(num_generations=4, num_iterations=2)
    return DAPOLearner(cluster, config, sometimes, data_shuffle_seed=1)
  if job.startswith("greedy"):
    options |= {"schedule": "greedy"}
    if folder.name.startswith("replay_"):
      other = folder.with_name(folder.name.removeprefix("replay_"))
      options["replay"] = str(other / "checkpoints" / "journal")
  if job.endswith("-env"):
    if job == "lagged-env":
      options |= {"schedule": "lagged"}
    rollout |= {"max_tokens_to_generate": 4, "max_prompt_length": 8}
    cluster = clusters.cluster(actor(), **options)
    config = GRPOConfig(num_generations=4, num_iterations=2, beta=0.0)
    limits = EpisodeConfig(max_turns=3, max_tokens=24)
    return GRPOLearner(
      cluster, config, env=toy_envs.Echo, episodes=limits, data_shuffle_seed=1
    )
  if job == "lagged":
    options |= {"schedule": "lagged", "lag": 2}
  reward: Any = clusters.even
  if job == "judged":  # by the server of TUNIX_JUDGE_URL
    prompt = folder / "judge.txt"
    folder.mkdir(parents=True, exist_ok=True)
    prompt.write_text("{prompt}\n{completion}")
    reward = Judge(str(prompt), model="m", cache=str(folder / "judges"))
  # A LoRA's reference is its base.
  models = {} if job == "grpo-lora" else {"reference": actor(job)}
  cluster = clusters.cluster(actor(job), **models, **options)
  config = GRPOConfig(num_generations=4, **shared)
  return GRPOLearner(cluster, config, reward, data_shuffle_seed=1)


def main() -> None:
  gc.set_threshold(*GC_THRESHOLD)
  job, folder = sys.argv[1], pathlib.Path(sys.argv[2])
  # Compiling is most of the drill; equal programs give equal bits.
  jax.config.update("jax_compilation_cache_dir", str(folder.parent / "programs"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  mesh = contextlib.nullcontext()
  if len(sys.argv) > 3:
    rank, count, port = map(int, sys.argv[3:])
    launch.initialize(f"localhost:{port}", count, rank, heartbeat_s=10)
    mesh = jax.set_mesh(mesh_lib.create_mesh({"fsdp": count}))
  with mesh:
    made = learner(job, folder)
    print(f"starts from step {made.train_steps}", flush=True)
    # A curriculum needs prompts that come again.
    known = clusters.prompts(3) * 20
    data = known if job.endswith(CURRICULUM) else clusters.prompts(40)
    made.train(data, clusters.prompts(2, seed=9))
    made.close()


if __name__ == "__main__":
  main()
