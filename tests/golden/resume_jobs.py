"""Small runs of SFT, DPO and GRPO, through Python and through `tunix train`.

They use nothing but what users may use, so that every version can run them: the one
that `make_resume.py` cut them short with, and the one at hand, which goes on.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from tunix.cli import main as cli
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.config import CheckpointOptions
from tunix.sft.dpo.dpo_trainer import DataInput, DPOTrainer, DPOTrainingConfig
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

BEFORE = pathlib.Path(__file__).parent / "resume_before"
VOCAB = 24
STEPS = 6
SAVE_EVERY = 2
STATE = ("model_params", "model_rest", "optimizer_state")  # items of a checkpoint


def environment() -> dict[str, str]:
  """What the bits of a result depend on, besides our own code."""
  packages = ("jax", "jaxlib", "flax", "optax", "numpy", "grain")
  cpu = pathlib.Path("/proc/cpuinfo")
  lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
  flags = [line for line in lines if line.startswith("flags")][:1] or lines[:1]
  flags_of_xla = os.environ.get("XLA_FLAGS", "").split()
  return {
    **{name: importlib.metadata.version(name) for name in packages},
    "python": ".".join(platform.python_version_tuple()[:2]),
    "cpu": hashlib.sha256(repr((platform.machine(), flags)).encode()).hexdigest()[:12],
    "XLA_FLAGS": " ".join(flag for flag in flags_of_xla if "timeout" not in flag),
    "optimizations": str(not jax.config.values["jax_disable_most_optimizations"]),
  }


class Digits:
  """Text is ids in words: "3 1 4", other words are 2; 0 pads and 1 ends an answer."""

  def encode(self, text: str) -> list[int]:
    return [int(word) if word.isdigit() else 2 for word in text.split()]

  def decode(self, ids: Any) -> str:
    return " ".join(map(str, ids))

  def bos_id(self) -> None:
    return None

  def eos_id(self) -> int:
    return 1

  def pad_id(self) -> int:
    return 0


class Droppy(nnx.Module):
  """A user's model whose random numbers a resumed run has to go on with."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)
    self.out = nnx.Linear(8, VOCAB, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.out(jnp.tanh(self.dropout(jnp.cumsum(self.embed(tokens), axis=1))))


def llama(vocab_size: int = VOCAB, seed: int = 0) -> nnx.Module:
  """A model of one layer. Its numbers come from NumPy: JAX's draws round differently
  from one processor to the next, and a run knows its reference by its bytes."""
  config = ModelConfig(
    num_layers=1,
    vocab_size=vocab_size,
    embed_dim=8,
    hidden_dim=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=256,
  )
  model = AutoModel.from_config(config, dtype=jnp.float32)
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype)
  nnx.update(model, jax.tree.map(draw, nnx.state(model)))
  return model


def options(folder: pathlib.Path) -> dict[str, Any]:
  """What all trainers are told."""
  return {
    "max_steps": STEPS,
    "eval_every_n_steps": 3,
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=SAVE_EVERY),
    "metrics_logging_options": MetricsLoggerOptions(folder / "logs"),
    "pbar_description": None,
  }


def texts(rng: np.random.Generator, count: int, longest: int) -> list[str]:
  draw = lambda: rng.integers(2, VOCAB, rng.integers(2, longest + 1))
  return [" ".join(map(str, draw())) for _ in range(count)]


def sft(folder: pathlib.Path) -> None:
  def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCAB, (4, 8), dtype=np.int32)
    return {"input_tokens": tokens, "input_mask": np.ones_like(tokens)}

  config = TrainingConfig(**options(folder), gradient_accumulation_steps=2)
  trainer = PeftTrainer(Droppy(nnx.Rngs(0)), optax.adam(1e-2), config)
  trainer.train([batch(seed) for seed in range(2 * STEPS)], [batch(90)])
  trainer.close()


def dpo(folder: pathlib.Path) -> None:
  def batch(seed: int) -> DataInput:
    rng = np.random.default_rng(seed)
    prompts, chosen, rejected = (texts(rng, 4, longest) for longest in (6, 5, 5))
    return DataInput(
      prompts=prompts, chosen_responses=chosen, rejected_responses=rejected
    )

  config = DPOTrainingConfig(
    **options(folder), beta=0.1, max_prompt_length=6, max_response_length=6
  )
  trainer = DPOTrainer(llama(), llama(seed=1), optax.adam(1e-2), config, Digits())
  trainer.train([batch(seed) for seed in range(STEPS)], [batch(90)])
  trainer.close()


def even(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
  """Share of even ids."""
  del prompts, columns
  rows = [[int(word) for word in text.split()] for text in completions]
  return [float(np.mean([i % 2 == 0 for i in row] or [0])) for row in rows]


def grpo(folder: pathlib.Path) -> None:
  def batch(seed: int) -> dict[str, list[str]]:
    return {"prompts": texts(np.random.default_rng(seed), 4, 8)}

  training = RLTrainingConfig(
    actor_optimizer=optax.adam(1e-2), mini_batch_size=2, **options(folder)
  )
  cluster = RLCluster(
    actor=llama(),
    reference=llama(seed=1),
    tokenizer=Digits(),
    cluster_config=ClusterConfig(
      training_config=training,
      rollout_config=RolloutConfig(max_tokens_to_generate=5, max_prompt_length=8),
    ),
  )
  algorithm = GRPOConfig(num_generations=4, num_iterations=1, beta=0.05)
  learner = GRPOLearner(cluster, algorithm, even, data_shuffle_seed=1)
  learner.train([batch(seed) for seed in range(STEPS)], [batch(90)])
  learner.close()


def command(job: str, folder: pathlib.Path, *argv: str) -> None:
  """`tunix train` from a folder beside which the inputs lie."""
  code = cli.main(
    ["train", f"--config=inputs/{job}.yaml", f"--output_dir={folder}", *argv]
  )
  assert code == 0, f"tunix train ended with {code}"


JOBS = {
  "sft": sft,
  "dpo": dpo,
  "grpo": grpo,
  **{
    f"train_{job}": lambda folder, job=job: command(job, folder)
    for job in ("sft", "dpo", "grpo")
  },
}


def steps(folder: pathlib.Path) -> list[int]:
  names = [p.name for p in (folder / "checkpoints").iterdir()]
  return sorted(int(name) for name in names if name.isdigit())


def state(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Every array of the last checkpoint, by item and name."""
  last = folder / "checkpoints" / str(steps(folder)[-1])
  found = {}
  for item in STATE:
    if (last / item).exists():
      with ocp.PyTreeCheckpointer() as reader:
        leaves = jax.tree.leaves_with_path(reader.restore(last / item))
      for path, value in leaves:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
          value = jax.random.key_data(value)
        found[item + jax.tree_util.keystr(path)] = np.asarray(value)
  return found
