"""The sections of a configuration that the jobs `grpo` and `ppo` have of their own.

Null in `algorithm` means the algorithm's own default; which of its keys an algorithm
has is looked up when it is built.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.cli.convert import at_least

RL_JOBS = ("grpo", "ppo")
RL_SECTIONS = ("rollout", "algorithm", "rl", "reward", "samples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutKeys:
  """How completions are sampled."""

  max_tokens_to_generate: int = 256
  max_prompt_length: int = 256
  temperature: float = 1.0
  eval_temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  min_p: float | None = None
  seed: int | None = None
  stop_strings: tuple[str, ...] = ()
  engine: Literal["vanilla", "vllm", "sglang_jax"] = "vanilla"
  engine_options: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    at_least(
      1,
      rollout__max_tokens_to_generate=self.max_tokens_to_generate,
      rollout__max_prompt_length=self.max_prompt_length,
    )
    at_least(0, rollout__eval_temperature=self.eval_temperature)
    if not self.temperature > 0:
      raise ValueError(
        f"rollout.temperature is {self.temperature}: it must be positive, greedy "
        "rollouts teach nothing (rollout.eval_temperature may be 0)"
      )
    if self.engine_options and self.engine == "vanilla":
      raise ValueError(
        f"rollout.engine_options {sorted(self.engine_options)} are for other engines: "
        "the vanilla one has none"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmKeys:
  """Fields of the algorithms' configurations, and the name of a variant."""

  name: Literal["grpo", "drgrpo", "dapo", "gspo", "cispo", "rloo"] | None = None
  num_generations: int | None = None
  num_iterations: int | None = None
  beta: float | None = None
  kl_method: str | None = None
  kl_corrected: bool | None = None
  epsilon: float | None = None
  epsilon_low: float | None = None
  epsilon_high: float | None = None
  epsilon_c: float | None = None
  loss_algo: str | None = None
  loss_agg_mode: str | None = None
  advantage_estimator: str | None = None
  entropy_coef: float | None = None
  rollout_correction: dict[str, Any] = dataclasses.field(default_factory=dict)
  mask_truncated: bool | None = None
  shared_prompt: bool | None = None
  exact_tile_rows: int | None = None
  eval_num_generations: int | None = None
  pass_threshold: float | None = None
  dynamic_sampling: bool | None = None
  max_refills: int | None = None
  overlong_buffer: dict[str, Any] = dataclasses.field(default_factory=dict)
  gamma: float | None = None
  gae_lambda: float | None = None
  clip_range_value: float | None = None
  whiten_advantages: bool | None = None

  def given(self) -> dict[str, Any]:
    """What is set, by name, besides the variant's name."""
    fields = [f.name for f in dataclasses.fields(self) if f.name != "name"]
    values = {name: getattr(self, name) for name in fields}
    return {name: value for name, value in values.items() if value not in (None, {})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlKeys:
  """Models besides the one that is trained, and sizes in prompts."""

  reference: str | None = None
  critic: str | None = None
  critic_learning_rate: float | None = None
  mini_batch_size: int | None = None
  train_micro_batch_size: int | None = None
  rollout_micro_batch_size: int | None = None
  compute_logps_micro_batch_size: int | None = None
  bucketed_lengths: bool = False
  shuffle_seed: int | None = None
  offload_to_cpu: bool = False

  def __post_init__(self):
    at_least(
      1,
      rl__mini_batch_size=self.mini_batch_size,
      rl__train_micro_batch_size=self.train_micro_batch_size,
      rl__rollout_micro_batch_size=self.rollout_micro_batch_size,
      rl__compute_logps_micro_batch_size=self.compute_logps_micro_batch_size,
    )
    at_least(
      0,
      rl__critic_learning_rate=self.critic_learning_rate,
      rl__shuffle_seed=self.shuffle_seed,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardKeys:
  """Where rewards come from."""

  functions: tuple[str, ...] | str = ()
  weights: tuple[float, ...] | None = None
  model: str | None = None
  workers: int = 0
  timeout_s: float | None = None

  def __post_init__(self):
    if self.weights is not None and len(self.weights) != len(self.entries):
      raise ValueError(
        f"reward.weights has {len(self.weights)} numbers for {len(self.entries)} "
        "reward.functions: give one a function"
      )
    at_least(0, reward__workers=self.workers)
    if self.timeout_s is not None and not self.workers:
      raise ValueError(
        f"reward.timeout_s is {self.timeout_s} and reward.workers 0: only a process of "
        "its own can be ended; set reward.workers"
      )

  @property
  def entries(self) -> tuple[str, ...]:
    """`functions` as a sequence, also where a single one was given."""
    return (self.functions,) if isinstance(self.functions, str) else self.functions


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesKeys:
  """What is shown of the rollouts."""

  every_n_rollouts: int | None = 10
  max_groups: int = 8

  def __post_init__(self):
    at_least(
      1,
      samples__every_n_rollouts=self.every_n_rollouts,
      samples__max_groups=self.max_groups,
    )
