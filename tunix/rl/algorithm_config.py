"""What an algorithm is, as values: ratio x clip x advantage x reduction x KL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tunix.ops import advantages, kl
from tunix.ops.policy_gradient import LEVELS
from tunix.ops.reductions import AGGREGATIONS
from tunix.utils import checks

# How the ratio to the policy before the update enters the loss.
LOSS_ALGOS = ("grpo", "gspo", "cispo", "rloo", "reinforce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
  """Weights for what the sampler's log-probs and the trainer's differ by.

  Attributes:
    kind: "truncate" (weights min(ratio, high)) or "mask" (0 outside [low, high]).
    level: "token"; "sequence-product": the ratio of whole completions, which is exact
      where nothing is bounded (TRL's and verl's "sequence"); or "sequence", its
      geometric mean over tokens.
    low, high: bounds of the ratio; `low` only masks.
  """

  kind: str = "truncate"
  level: str = "token"
  low: float = 0.5
  high: float = 2.0

  def __post_init__(self):
    checks.fields(self)
    if self.kind not in ("truncate", "mask"):
      raise ValueError(f'kind is {self.kind!r}: choose "truncate" or "mask"')
    _choose("level", self.level, LEVELS)
    if not 0 <= self.low <= 1 <= self.high or self.low == self.high:
      raise ValueError(
        f"low {self.low} and high {self.high} must lie on both sides of 1, where the "
        "sampler and the trainer agree"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
  """Settings that the policy-gradient algorithms share.

  Attributes:
    num_generations: completions of one prompt.
    num_iterations: times that a batch of rollouts is trained on.
    beta: weight of the KL divergence from the reference; 0: no reference is needed.
    kl_method: its estimator, a name of `ops.kl.ESTIMATORS` or a function.
    kl_corrected: multiply the estimate by the ratio (see `ops.kl.corrected`): with k1
      and k3 its gradient is then that of the reverse KL. For a KL in the loss.
    epsilon: the ratio is clipped to [1 - epsilon, 1 + epsilon].
    epsilon_low, epsilon_high: the same for each side alone; None: epsilon.
    epsilon_c: dual clip: bounds the loss of negative advantages at epsilon_c times
      them; above 1 + the upper clip, or None.
    loss_algo: "grpo" (ratio by token), "gspo" (by sequence, normalised by length),
      "rloo" (of whole sequences), "cispo" (clipped weight on the log-prob), "reinforce"
      (no ratio; one update by each rollout).
    loss_agg_mode: from tokens to one number, a name of `ops.reductions.AGGREGATIONS`.
    advantage_estimator: a name of `ops.advantages.ADVANTAGES`, or a function of rewards
      [P, G] and `where` [P, G].
    entropy_coef: weight of the entropy that is rewarded; None or 0: it is not computed.
    rollout_correction: weights for the sampler's inexact log-probs; None: none.
    mask_truncated: leave completions that met their limit out of the loss.
    shared_prompt: compute the prompt of a group once for all its completions; None:
      where the model can.
    exact_tile_rows: score by fixed tiles of this many rows, so that the bits of a
      log-prob depend on nothing but its row, and the ratio of the first update is
      exactly 1; None: by whole batches. Excludes shared prompts.
    eval_num_generations: completions of a prompt in evaluation.
    pass_threshold: a completion passes when its reward is at least this; None: no
      pass@k is reported.
  """

  kl_in_loss: ClassVar[bool] = True  # or in the rewards

  num_generations: int = 1
  num_iterations: int = 1
  beta: float = 0.04
  kl_method: str | Callable[..., Any] = "k3"
  kl_corrected: bool = False
  epsilon: float = 0.2
  epsilon_low: float | None = None
  epsilon_high: float | None = None
  epsilon_c: float | None = None
  loss_algo: str = "grpo"
  loss_agg_mode: str = "token-mean"
  advantage_estimator: str | Callable[..., Any] = "group_normalized"
  entropy_coef: float | None = None
  rollout_correction: RolloutCorrection | None = None
  mask_truncated: bool = False
  shared_prompt: bool | None = None
  exact_tile_rows: int | None = None
  eval_num_generations: int = 1
  pass_threshold: float | None = None

  def __post_init__(self):
    counts = "num_generations num_iterations eval_num_generations exact_tile_rows"
    weights = "beta epsilon epsilon_low epsilon_high entropy_coef"
    checks.fields(
      self,
      **dict.fromkeys(counts.split(), checks.COUNT),
      **dict.fromkeys(weights.split(), checks.NOT_NEGATIVE),
    )
    if self.clip_low > 1:
      raise ValueError(
        f"the lower clip is {self.clip_low}: ratios are never below 0, so that all "
        "above 1.0 clips nothing; 1.0 says that"
      )
    if self.epsilon_c is not None and self.epsilon_c <= 1 + self.clip_high:
      raise ValueError(
        f"epsilon_c is {self.epsilon_c}: the dual clip must be above the upper clip, "
        f"{1 + self.clip_high}, such as 3.0"
      )
    _choose("loss_algo", self.loss_algo, LOSS_ALGOS)
    _choose("loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
    if self.loss_algo == "rloo" and self.loss_agg_mode != (
      mode := "sequence-mean-token-mean"
    ):
      raise ValueError(
        f'loss_agg_mode is {self.loss_agg_mode!r} and loss_algo "rloo": every token '
        f"carries the ratio of its whole row, whose mean is {mode!r}; set that"
      )
    if self.loss_algo == "reinforce" and self.num_iterations > 1:
      raise ValueError(
        f"num_iterations is {self.num_iterations}: without a ratio later updates would "
        "be off-policy; choose a loss_algo that has one"
      )
    if self.loss_algo in ("cispo", "reinforce") and self.epsilon_c is not None:
      raise ValueError(
        f"epsilon_c has no meaning with loss_algo {self.loss_algo!r}: leave it out"
      )
    if self.exact_tile_rows is not None and self.shared_prompt:
      raise ValueError(
        "exact_tile_rows scores every row by itself, shared_prompt groups them: "
        "choose one"
      )
    resolve("kl_method", self.kl_method, kl.ESTIMATORS)
    if self.kl_corrected and not (self.beta and self.kl_in_loss):
      where = "is 0" if self.kl_in_loss else "weighs a KL in the rewards"
      raise ValueError(
        f"kl_corrected corrects a gradient, and beta {where}: leave it out"
      )
    self._check_advantages()

  def _check_advantages(self) -> None:
    """Algorithms with other advantages than groups' replace it."""
    resolve("advantage_estimator", self.advantage_estimator, advantages.ADVANTAGES)

  @property
  def clip_low(self) -> float:
    """The lower clip, as a distance from 1."""
    return self.epsilon if self.epsilon_low is None else self.epsilon_low

  @property
  def clip_high(self) -> float:
    """The upper clip, as a distance from 1."""
    return self.epsilon if self.epsilon_high is None else self.epsilon_high


def resolve(field: str, value: Any, table: Mapping[str, Callable[..., Any]]) -> Any:
  """A function, given itself or by its name in `table`.

  Raises:
    ValueError: there is no such name.
  """
  if callable(value):
    return value
  _choose(field, value, table)
  return table[value]


def _choose(field: str, value: Any, known: Any) -> None:
  if value not in known:
    raise ValueError(f"{field} is {value!r}: choose one of {', '.join(known)}")
