"""Figures of one accelerator, each from a fresh process that prints JSON lines.

  python -m benchmarks.gpu kernels                     # errors, and milliseconds
  python -m benchmarks.gpu sft --tokens 16384 [--lora 16] [--remat block]
  python -m benchmarks.gpu sft --tokens 16384 --lib transformers   # the same, by torch
  python -m benchmarks.gpu decode --batch 64
  python -m benchmarks.gpu grpo

The model has the sizes of `--preset` (Qwen3 0.6B) and random weights in bfloat16.
Milliseconds and seconds are medians after the first runs, which compile. MFU counts 6
FLOPs per weight of a matrix product and token (4 with adapters) and the products of
causal attention, and divides by the peak that the maker publishes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Figures = dict[str, Any]


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("job", choices=JOBS)
  parser.add_argument("--preset", default="qwen3_0p6b")
  parser.add_argument("--layers", type=int, help="instead of the preset's")
  parser.add_argument("--dtype", default="bfloat16")
  parser.add_argument("--lib", choices=("tunix", "transformers"), default="tunix")
  parser.add_argument("--tokens", type=int, default=16384, help="of sft: in a step")
  parser.add_argument("--length", type=int, default=2048, help="of sft: of a row")
  parser.add_argument("--packed", type=int, default=0, help="of sft: tokens of a part")
  parser.add_argument("--micro", type=int, help="of sft: rows of a micro-batch")
  parser.add_argument("--steps", type=int, default=8, help="of sft and grpo")
  parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights")
  parser.add_argument("--remat", default="none")
  parser.add_argument("--attention", default="auto", help="of sft and decode")
  parser.add_argument("--batch", type=int, default=64, help="of decode and grpo")
  parser.add_argument("--prompt", type=int, default=256)
  parser.add_argument("--new", type=int, default=256)
  parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048, 8192])
  options = parser.parse_args()
  if options.lib == "transformers" and (options.lora or options.packed):
    parser.error(
      "--lora and --packed are not written for --lib transformers: omit them"
    )
  return options


def show(**figures: Any) -> None:
  print(json.dumps(figures), flush=True)


def peak_gb() -> float | None:
  """Most memory that the first device held, in GB; None where it is not counted."""
  import jax

  stats = jax.local_devices()[0].memory_stats() or {}
  peak = stats.get("peak_bytes_in_use")
  return None if peak is None else round(peak / 1e9, 2)


def preset(options: argparse.Namespace) -> Any:
  from tunix.models import families

  more = {} if options.layers is None else {"num_layers": options.layers}
  return families.preset(options.preset)[1](**more)


def median_ms(run: Callable[[], Any], passes: int = 10) -> float:
  import jax

  jax.block_until_ready(run())
  times = []
  for _ in range(passes):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return round(1e3 * statistics.median(times), 3)


# --- kernels -------------------------------------------------------------------------


def job_kernels(options: argparse.Namespace) -> None:
  """Attention of a train step: errors of gradients, and time of value and gradient."""
  import jax
  import jax.numpy as jnp

  for length in options.lengths:
    rows = max(1, 16384 // length)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
      jax.random.normal(key, (rows, length, heads, 128), jnp.bfloat16)
      for key, heads in zip(keys, (16, 8, 8, 16))
    ]
    parts = jnp.broadcast_to(jnp.arange(length) // 300, (rows, length))
    for case, window, segments in (
      ("causal", None, None),
      ("window", 256, None),
      ("segments", None, parts),
    ):
      for path in able_paths(length, segments is not None):
        run = jax.jit(functools.partial(gradients, path, window, segments))
        show(
          length=length, rows=rows, case=case, path=path,
          ms=median_ms(functools.partial(run, *arrays)),
          errors=kernel_errors(path, window, segments, arrays),
        )  # fmt: skip


def able_paths(length: int, has_segments: bool) -> list[str]:
  import jax

  out = ["blockwise"]
  if length <= 2048:  # else the scores take tens of GB
    out.insert(0, "plain")
  if jax.default_backend() == "gpu" and not has_segments:
    out.append("cudnn")
  return out


def gradients(path: str, window: int | None, segments: Any, *arrays: Any) -> Any:
  """Returns value and gradients of attention, of (query, key, value, weights)."""
  import jax
  import jax.numpy as jnp

  from tunix.models.transformer.attention import paths as attention_paths
  from tunix.models.transformer.visibility import Visibility

  weights = arrays[-1]
  slots = jnp.arange(weights.shape[1])
  visible = Visibility(slots, segment_ids=segments, aligned=True)

  def loss(query, key, value):
    options = {"implementation": path, "window": window}
    out = attention_paths.attend(query, key, value, visible, **options)
    return jnp.sum(out.astype(jnp.float32) * weights)

  return jax.value_and_grad(loss, (0, 1, 2))(*arrays[:-1])


def kernel_errors(path: str, window: int | None, segments: Any, arrays: Any):
  """Norms of the errors over those of the gradients, against float32; of one row."""
  import jax
  import jax.numpy as jnp

  few = [x[:1, :2048] for x in arrays]
  some = None if segments is None else segments[:1, :2048]
  found = jax.jit(functools.partial(gradients, path, window, some))(*few)[1]
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(functools.partial(gradients, "plain", window, some))
    wanted = exact(*(x.astype(jnp.float32) for x in few))[1]
  norm = lambda x: float(jnp.linalg.norm(x.astype(jnp.float32)))
  return [round(norm(a - b) / norm(b), 5) for a, b in zip(found, wanted)]


# --- training ------------------------------------------------------------------------


def step_flops(sizes: Any, weights: int, tokens: int, length: int, lora: int) -> float:
  """FLOPs of a step: products with weights, and causal attention."""
  scores = sizes.num_layers * sizes.num_heads * sizes.head_dim * length
  forward = 2 * weights + 2 * scores  # half of the 4 * scores are visible
  return forward * tokens * (2 if lora else 3) + (2 * scores * tokens if lora else 0)


def job_sft(options: argparse.Namespace) -> None:
  """Steps on random rows: tokens a second, MFU, and peak memory."""
  rng = np.random.default_rng(0)
  rows = options.tokens // options.length
  ids = rng.integers(3, 150_000, (options.steps, rows, options.length)).astype(np.int32)
  train = {"tunix": sft_tunix, "transformers": sft_torch}[options.lib]
  figures = train(options, ids)
  show(
    lib=options.lib, tokens=options.tokens, length=options.length, lora=options.lora,
    remat=options.remat, micro=options.micro, packed=options.packed, **figures,
  )  # fmt: skip


def figures_of(options: argparse.Namespace, sizes: Any, weights: int, clock: Any):
  import jax

  from tunix.perf.chips import chip_of

  seconds = statistics.median(clock[3:])
  out = {"ms": round(1e3 * seconds, 1), "first_s": round(clock[0], 1)}
  out["tokens_per_s"] = round(options.tokens / seconds)
  work = step_flops(sizes, weights, options.tokens, options.length, options.lora)
  chip = chip_of(jax.devices()[0])
  if chip is not None:
    out["mfu"] = round(work / seconds / chip.flops, 3)
  return out


def sft_tunix(options: argparse.Namespace, ids: np.ndarray) -> Figures:
  import jax
  import optax
  from flax import nnx

  from benchmarks.adapter import LORA_TARGETS
  from tunix.models import lora
  from tunix.models.automodel import AutoModel
  from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

  model = AutoModel.from_config(
    preset(options),
    dtype=options.dtype,
    remat=options.remat,
    attention=options.attention,
  )
  sizes = model.config
  kernels = [x for x in jax.tree.leaves(nnx.state(model)) if x.ndim > 1]
  weights = sum(x.size for x in kernels)  # tied: the embedding is the last product
  if options.lora:
    config = lora.LoraConfig(
      rank=options.lora, alpha=float(options.lora), targets=LORA_TARGETS
    )
    model = lora.apply(model, config)

  class Hooks:
    def __init__(self):
      self.clock, self.losses = [time.perf_counter()], []

    def on_train_step_end(self, trainer, train_step, train_loss):
      del trainer, train_step
      self.losses.append(float(train_loss))
      self.clock.append(time.perf_counter())

  micro = options.micro or ids.shape[1]
  config = TrainingConfig(
    max_steps=len(ids),
    pbar_description=None,
    gradient_accumulation_steps=ids.shape[1] // micro,
  )
  trainer = PeftTrainer(model, optax.adamw(1e-5), config)
  hooks = Hooks()

  def batch(rows):
    out = {"input_tokens": rows, "input_mask": np.ones_like(rows)}
    if options.packed:
      slots = np.arange(rows.shape[1], dtype=np.int32)
      out["segment_ids"] = np.broadcast_to(slots // options.packed + 1, rows.shape)
      out["positions"] = np.broadcast_to(slots % options.packed, rows.shape)
    return out

  batches = [batch(part) for step in ids for part in np.split(step, len(step) // micro)]
  trainer.with_training_hooks(hooks).train(batches)
  out = figures_of(options, sizes, weights, np.diff(hooks.clock))
  out |= {"peak_gb": peak_gb(), "losses": np.round(hooks.losses[:3], 4).tolist()}
  digest = hashlib.sha256()
  for x in jax.tree.leaves(nnx.state(trainer.model, nnx.Param)):
    digest.update(np.asarray(x).tobytes())
  return out | {"weights": digest.hexdigest()[:16]}  # equal if the run repeats itself


def sft_torch(options: argparse.Namespace, ids: np.ndarray) -> Figures:
  """transformers' model with scaled dot product attention and fused AdamW."""
  import torch
  import transformers

  sizes = preset(options)
  config = transformers.Qwen3Config(
    vocab_size=sizes.vocab_size,
    hidden_size=sizes.embed_dim,
    intermediate_size=sizes.hidden_dim,
    num_hidden_layers=sizes.num_layers,
    num_attention_heads=sizes.num_heads,
    num_key_value_heads=sizes.num_kv_heads,
    head_dim=sizes.head_dim,
    tie_word_embeddings=True,
    attn_implementation="sdpa",
  )
  dtype = getattr(torch, options.dtype)
  model = transformers.Qwen3ForCausalLM(config).to("cuda", dtype)
  if options.remat == "block":
    model.gradient_checkpointing_enable()
  weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
  micro = options.micro or ids.shape[1]
  clock, losses = [time.perf_counter()], []
  for step in ids:
    parts = np.split(step, len(step) // micro)
    total = 0.0
    for part in parts:
      rows = torch.as_tensor(part, dtype=torch.long, device="cuda")
      loss = model(input_ids=rows, labels=rows).loss / len(parts)
      loss.backward()
      total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(total))
    torch.cuda.synchronize()
    clock.append(time.perf_counter())
  out = figures_of(options, sizes, weights, np.diff(clock))
  peak = round(torch.cuda.max_memory_allocated() / 1e9, 2)
  return out | {"peak_gb": peak, "losses": np.round(losses[:3], 4).tolist()}


# --- decoding ------------------------------------------------------------------------


def job_decode(options: argparse.Namespace) -> None:
  """Greedy tokens a second of the engine (by path of attention) and of the sampler."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from benchmarks.adapter import complete, complete_padded
  from benchmarks.groups import Ids
  from tunix.generate.engine.config import EngineConfig
  from tunix.generate.engine.engine import Engine
  from tunix.generate.sampler import Sampler
  from tunix.models.automodel import AutoModel
  from tunix.perf.chips import chip_of

  model = AutoModel.from_config(preset(options), dtype=options.dtype)
  size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
  c = model.config
  rng = np.random.default_rng(0)
  prompts = [rng.integers(3, 150_000, options.prompt) for _ in range(options.batch)]
  lengths = [options.new] * options.batch
  total, found = options.batch * options.new, {}
  kept = 2 * c.num_layers * c.num_kv_heads * c.head_dim * jnp.dtype(c.dtype).itemsize
  read = size + kept * options.batch * (options.prompt + options.new / 2)
  chip = chip_of(jax.devices()[0])

  def measure(name, run):
    times = []
    for _ in range(3):
      start = time.perf_counter()
      rows = run()
      times.append(time.perf_counter() - start)
    found[name] = rows
    seconds = min(times[1:])
    first = next(iter(found.values()))
    same = [int((np.append(a != b, True)).argmax()) for a, b in zip(first, rows)]
    out = {"path": name, "batch": options.batch, "tokens_per_s": round(total / seconds)}
    if chip is not None and chip.memory_rate:
      # The bound reads all weights and the cache once for each round.
      out["of_bound"] = round(read / chip.memory_rate * options.new / seconds, 3)
    show(**out, first_s=round(times[0], 1), mean_equal_tokens=float(np.mean(same)))

  sampler = Sampler(model, Ids())
  measure("padded", lambda: complete_padded(sampler, prompts, lengths, options.batch))
  is_gpu = jax.default_backend() == "gpu"
  paths = ("rows", "gather", *(["gpu_paged"] if is_gpu else []))
  for path in paths if options.attention == "auto" else (options.attention,):
    config = EngineConfig(
      slots=options.batch,
      max_tokens=options.prompt + options.new,
      prefix_cache=False,
      attention=path,
      prefill_tokens=2048,
    )
    engine = Engine(model, Ids(), config)
    measure(path, functools.partial(complete, engine, prompts, lengths))
    engine.close()
  show(peak_gb=peak_gb())


# --- reinforcement learning ----------------------------------------------------------


def job_grpo(options: argparse.Namespace) -> None:
  """GRPO steps with groups of 8: seconds of each phase."""
  import optax

  from benchmarks.adapter import Clock, Phases
  from benchmarks.groups import Ids
  from tunix.models.automodel import AutoModel
  from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
  from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig
  from tunix.rl.rollout.base_rollout import RolloutConfig

  model = lambda: AutoModel.from_config(
    preset(options), dtype=options.dtype, remat=options.remat
  )
  cluster = RLCluster(
    actor=model(),
    reference=model(),
    tokenizer=Ids(),
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-6), pbar_description=None
      ),
      rollout_config=RolloutConfig(
        max_tokens_to_generate=options.new,
        max_prompt_length=options.prompt,
        eos_tokens=[],
      ),
    ),
  )

  def reward(prompts, completions, **extra):
    del prompts, extra
    return [float(len(text) % 7) for text in completions]

  learner = GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.04), reward)
  clock = Clock()
  phases = Phases(learner, clock)
  rng = np.random.default_rng(0)
  prompts = rng.integers(
    3, 150_000, (options.steps, options.batch // 8, options.prompt)
  )
  learner.train({"prompts": rows.tolist()} for rows in prompts)
  medians = {
    name: statistics.median(part[name][0] for part in phases.parts[2:])
    for name in phases.parts[-1]
  }
  drawn = options.batch * options.new
  show(
    batch=options.batch, new=options.new, **clock.summary(skip=2), phases=medians,
    drawn_per_s=round(drawn / medians["generate"]), peak_gb=peak_gb(),
  )  # fmt: skip


JOBS = ("kernels", "sft", "decode", "grpo")


def main() -> None:
  options = arguments()
  globals()[f"job_{options.job}"](options)


if __name__ == "__main__":
  main()
