"""tunix behind the methods of a side-by-side benchmark harness.

Each method runs one job on a Hugging Face folder of random weights and returns a dict
of figures; `docs/performance.md` says what is compared with what.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

LORA_TARGETS = (
  "q_proj",
  "k_proj",
  "v_proj",
  "o_proj",
  "gate_proj",
  "up_proj",
  "down_proj",
)


class Clock:
  """Wall and CPU seconds of every step."""

  def __init__(self):
    self.marks = [(time.perf_counter(), time.process_time())]

  def tick(self) -> None:
    self.marks.append((time.perf_counter(), time.process_time()))

  def summary(self, skip: int = 2) -> dict[str, Any]:
    wall, cpu = (
      [b[i] - a[i] for a, b in zip(self.marks, self.marks[1:])] for i in (0, 1)
    )
    return {
      "first_s": round(wall[0], 3),
      "steps": [round(x, 3) for x in wall[1:]],
      "median_s": round(float(np.median(wall[skip:])), 4),
      "min_s": round(min(wall[skip:]), 4),
      "cpu_median_s": round(float(np.median(cpu[skip:])), 4),
    }


class Recorder:
  """Training hooks that wait for every step and note its loss and time."""

  def __init__(self):
    self.clock, self.losses = Clock(), []

  def on_train_step_end(self, trainer: Any, train_step: int, train_loss: Any) -> None:
    del trainer, train_step
    self.losses.append(round(float(train_loss), 5))
    self.clock.tick()


class Phases:
  """Wall and CPU seconds of the phases of a learner's steps."""

  def __init__(self, learner: Any, clock: Clock):
    self.parts: list[dict[str, Any]] = []
    self._now: dict[str, tuple[float, float]] = {}
    cluster = learner.rl_cluster
    for owner, name, key in (
      (cluster, "generate", "generate"),
      (cluster, "get_ref_per_token_logps", "ref_logps"),
      (learner, "_update", "update"),
    ):
      setattr(owner, name, self._timed(getattr(owner, name), key, clock))

  def _timed(self, function: Any, key: str, clock: Clock) -> Any:
    def run(*args: Any, **options: Any) -> Any:
      start = time.perf_counter(), time.process_time()
      out = function(*args, **options)
      wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
      self._now[key] = (round(wall, 3), round(cpu, 3))
      if key == "update":
        clock.tick()
        self.parts.append(dict(self._now))
        self._now.clear()
      return out

    return run


def rss_mb() -> int:
  with open("/proc/self/statm") as file:
    return round(int(file.read().split()[1]) * 4096 / 2**20)


def batch_of(ids: np.ndarray) -> dict[str, np.ndarray]:
  return {"input_tokens": ids, "input_mask": np.ones_like(ids)}


def complete(
  engine: Any,
  prompts: Sequence[np.ndarray],
  lengths: Sequence[int],
  **options: Any,
) -> list[np.ndarray]:
  """Returns exactly `lengths[i]` tokens after prompt i, by the engine.

  Args:
    engine: the engine.
    prompts: token ids of each prompt.
    lengths: number of new tokens of each completion.
    **options: options of the requests; greedy without any.
  """
  from tunix.generate.engine.request import EngineRequest

  requests = [
    EngineRequest(prompt=prompt, max_tokens=int(length), stop_ids=(), **options)
    for prompt, length in zip(prompts, lengths)
  ]
  return [row.tokens for completions in engine.run(requests) for row in completions]


def complete_padded(
  sampler: Any, prompts: Sequence[np.ndarray], lengths: Sequence[int], slots: int
) -> list[np.ndarray]:
  """Returns the greedy ones by the padded sampler: batches of `slots`, by arrival."""
  tokens = []
  for at in range(0, len(prompts), slots):
    rows = slice(at, at + slots)
    limits = [int(length) for length in lengths[rows]]
    tokens += sampler(list(prompts[rows]), limits, eos_tokens=[]).tokens
  return tokens


class Adapter:
  """The jobs of the harness."""

  def __init__(self):
    self._kept: dict[tuple[Any, ...], Any] = {}  # engines and samplers, by arguments

  def model(self, path: str, lora_rank: int = 0, mesh: Any = None) -> nnx.Module:
    from tunix.models.automodel import AutoModel

    model = AutoModel.from_pretrained(path, mesh=mesh, dtype=jnp.float32)
    if lora_rank:
      from tunix.models import lora

      config = lora.LoraConfig(
        rank=lora_rank, alpha=float(lora_rank), targets=LORA_TARGETS
      )
      model = lora.apply(model, config)
    return model

  def sft(
    self, path: str, ids: np.ndarray, lora_rank: int = 0, lr: float = 1e-4, chunk=0
  ) -> dict[str, Any]:
    """Trains one step a batch; ids [steps, B, T]."""
    del chunk  # ours is always chunked
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    config = TrainingConfig(max_steps=len(ids), pbar_description=None)
    trainer = PeftTrainer(self.model(path, lora_rank), optax.adamw(lr), config)
    recorder = Recorder()
    trainer.with_training_hooks(recorder).train([batch_of(x) for x in ids])
    return {**recorder.clock.summary(), "losses": recorder.losses}

  def generate(
    self,
    path: str,
    ids: np.ndarray,
    new: int,
    temperature: float = 0.0,
    reps: int = 3,
  ) -> dict[str, Any]:
    """Generates `new` tokens after prompts of equal length; ids [B, P]."""
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.generate.tokenizer_adapter import TokenizerAdapter

    model = self.model(path)
    c = model.config
    cache = CacheConfig(
      cache_size=ids.shape[1] + new,
      num_layers=c.num_layers,
      num_kv_heads=c.num_kv_heads,
      head_dim=c.head_dim,
    )
    sampler = Sampler(model, TokenizerAdapter.from_pretrained(path), cache)
    clock = Clock()
    for _ in range(reps + 1):
      out = sampler(
        list(ids),
        max_generation_steps=new,
        temperature=temperature,
        eos_tokens=[],
      )
      clock.tick()
    return {**clock.summary(skip=1), "tokens": np.stack(out.tokens)}

  def ragged(
    self,
    path: str,
    prompts: Sequence[np.ndarray],
    lengths: Sequence[int],
    slots: int,
    **options: Any,
  ) -> list[list[int]]:
    """Generates `lengths[i]` greedy tokens after prompt i, `slots` rows at a time."""
    from tunix.generate.engine.config import EngineConfig
    from tunix.generate.engine.engine import Engine
    from tunix.generate.tokenizer_adapter import TokenizerAdapter

    key = (path, slots, *sorted(options.items()))
    if key not in self._kept:
      config = EngineConfig(**{"slots": slots, "max_tokens": 512, **options})
      tokenizer = TokenizerAdapter.from_pretrained(path)
      self._kept[key] = Engine(self.model(path), tokenizer, config)
    engine = self._kept[key]
    # A repeated call has the same prompts. Their prefixes must not be kept.
    engine.update_weights()
    return [tokens.tolist() for tokens in complete(engine, prompts, lengths)]

  def ragged_padded(
    self,
    path: str,
    prompts: Sequence[np.ndarray],
    lengths: Sequence[int],
    slots: int,
  ) -> list[list[int]]:
    """Generates the tokens of `ragged` with the padded sampler."""
    from tunix.generate.sampler import Sampler
    from tunix.generate.tokenizer_adapter import TokenizerAdapter

    if (path,) not in self._kept:
      tokenizer = TokenizerAdapter.from_pretrained(path)
      self._kept[(path,)] = Sampler(self.model(path), tokenizer)
    rows = complete_padded(self._kept[(path,)], prompts, lengths, slots)
    return [tokens.tolist() for tokens in rows]

  def dpo(
    self,
    path: str,
    prompts: np.ndarray,
    chosen: np.ndarray,
    rejected: np.ndarray,
    lr: float = 1e-5,
    lora_rank: int = 0,
    shared_prompt: bool = True,
    **options: Any,
  ) -> dict[str, Any]:
    """One step a batch of pairs, with a second model for its reference (with adapters:
    what lies below them), a pair's prompt computed once; ids [steps, B, T]."""
    from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput

    config = DPOTrainingConfig(
      max_steps=len(prompts),
      pbar_description=None,
      shared_prompt=shared_prompt,
      **options,
    )
    reference = None if lora_rank else self.model(path)
    model = self.model(path, lora_rank)
    trainer = DPOTrainer(model, reference, optax.adamw(lr), config)
    recorder, ones = Recorder(), np.ones_like
    trainer.with_training_hooks(recorder).train(
      TrainingInput(
        prompt_ids=p,
        prompt_mask=ones(p),
        chosen_ids=c,
        chosen_mask=ones(c),
        rejected_ids=r,
        rejected_mask=ones(r),
      )
      for p, c, r in zip(prompts, chosen, rejected)
    )
    return {**recorder.clock.summary(), "losses": recorder.losses}

  def grpo(
    self,
    path: str,
    prompts: list[list[str]],
    columns: dict[str, list[list[Any]]],
    reward: Any,
    generations: int,
    new: int,
    max_prompt: int,
    lr: float,
    beta: float = 0.04,
    temperature: float = 1.0,
    no_eos: bool = False,
    on_step: Any = None,
    loss_type: str | None = None,
    **algorithm: Any,
  ) -> dict[str, Any]:
    """One GRPO step a batch of prompts; columns are [steps][B]."""
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig
    from tunix.rl.rollout.base_rollout import RolloutConfig

    if loss_type:
      algorithm["loss_agg_mode"] = loss_type
    means, clock = [], Clock()

    def rewards(prompts, completions, **extra):
      found = reward(completions, **{name: extra[name] for name in columns})
      means.append(round(float(np.mean(found)), 4))
      if on_step:
        on_step(len(means), means[-1], completions)
      return found

    tokenizer = TokenizerAdapter.from_pretrained(path)
    cluster = RLCluster(
      actor=self.model(path),
      reference=self.model(path) if beta else None,
      tokenizer=tokenizer,
      cluster_config=ClusterConfig(
        training_config=RLTrainingConfig(
          actor_optimizer=optax.adamw(lr), pbar_description=None
        ),
        rollout_config=RolloutConfig(
          max_tokens_to_generate=new,
          max_prompt_length=max_prompt,
          temperature=temperature,
          eos_tokens=[] if no_eos else None,
        ),
      ),
    )
    config = GRPOConfig(num_generations=generations, beta=beta, **algorithm)
    learner = GRPOLearner(cluster, config, rewards)
    phases = Phases(learner, clock)
    ids = [[tokenizer.encode(text) for text in batch] for batch in prompts]  # no BOS
    learner.train(
      {"prompts": batch, **{name: x[i] for name, x in columns.items()}}
      for i, batch in enumerate(ids)
    )
    return {**clock.summary(skip=1), "rewards": means, "parts": phases.parts[-8:]}

  def load(self, path: str) -> dict[str, Any]:
    from tunix.models.automodel import AutoModel

    start = time.perf_counter()
    model = AutoModel.from_pretrained(path)
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    return {"load_s": round(time.perf_counter() - start, 3), "rss_mb": rss_mb()}

  def ckpt(self, path: str, out: str) -> dict[str, Any]:
    """Saves and restores parameters and Adam's moments."""
    from tunix.sft.checkpoint_manager import CheckpointManager

    model = self.model(path)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
    rng = np.random.default_rng(0)

    def noise(x):  # zeros would be compressed away
      return jnp.asarray(rng.standard_normal(x.shape, np.float32)) if x.ndim else x

    moments = nnx.state(optimizer, nnx.optimizer.OptState)
    nnx.update(optimizer, jax.tree.map(noise, moments))
    manager = CheckpointManager(os.path.join(out, "tunix"))
    start = time.perf_counter()
    manager.save(1, model, optimizer, force=True)
    returned = time.perf_counter()
    manager.close()
    os.sync()
    saved = time.perf_counter()
    step, _ = CheckpointManager(os.path.join(out, "tunix")).maybe_restore(
      model, optimizer
    )
    jax.block_until_ready(jax.tree.leaves((nnx.state(model), nnx.state(optimizer))))
    files = [os.path.join(d, f) for d, _, fs in os.walk(out) for f in fs]
    return {
      "save_returns_s": round(returned - start, 2),
      "save_s": round(saved - start, 2),
      "restore_s": round(time.perf_counter() - saved, 2),
      "bytes": sum(os.path.getsize(f) for f in files),
      "restored_step": step,
    }

  def logits(self, path: str, ids: np.ndarray) -> np.ndarray:
    """ids [B, T] -> logits [B, T, V]."""
    return np.asarray(self.model(path)(jnp.asarray(ids))[0])

  def loss_and_params(self, path: str):
    """(loss(params, ids) -> scalar, params)."""
    from tunix.sft.losses import next_token_loss

    graph, params = nnx.split(self.model(path))

    def loss(params, ids):
      return next_token_loss(nnx.merge(graph, params), ids, jnp.ones_like(ids)).mean()

    return loss, params

  def lowered_sft(
    self, path: str, mesh: Any, ids: np.ndarray, lora_rank: int = 0
  ) -> Any:
    """The jitted AdamW step, lowered on shapes that are sharded over the mesh."""
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    with jax.set_mesh(mesh):
      trainer = PeftTrainer(
        self.model(path, lora_rank, mesh), optax.adamw(1e-4), TrainingConfig()
      )
      return trainer.lower_train_step(batch_of(ids))
