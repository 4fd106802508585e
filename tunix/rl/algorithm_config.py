"""The settings of an algorithm: ratio, clip, advantage, reduction, KL divergence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from tunix.ops import advantages, kl
from tunix.ops.policy_gradient import LEVELS
from tunix.ops.reductions import AGGREGATIONS
from tunix.rl.prompts.curriculum import CurriculumConfig
from tunix.utils import checks
from tunix.utils.setting import known_values, named_values, setting

# The ways that the ratio to the policy before the update enters the loss.
LOSS_ALGOS = ("grpo", "gspo", "cispo", "sapo", "rloo", "reinforce")


class _Kind(NamedTuple):
  """The defaults of one kind of `RolloutCorrection`; None where it has no such bound.

  Attributes:
    low, high: bounds of the ratio.
    threshold: largest divergence, in nats or as a probability.
    is_loss: True for a loss of its own, False for a weight on the loss of `loss_algo`.
  """

  low: float | None = None
  high: float | None = None
  threshold: float | None = None
  is_loss: bool = False


KINDS = {
  "off": _Kind(),
  "decoupled": _Kind(),
  "truncate": _Kind(high=2.0),
  "mask": _Kind(low=0.5, high=2.0),
  "cispo": _Kind(low=0.0, high=5.0, is_loss=True),
  "dppo-tv": _Kind(threshold=0.15, is_loss=True),
  "dppo-kl": _Kind(threshold=0.05, is_loss=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
  """The correction for tokens that were not drawn by the policy that is updated.

  They were drawn by older weights, or by an engine whose log-probabilities differ.

  Attributes:
    kind: a weight on the loss of `loss_algo`: "decoupled" (the ratio v of the policy
      before the update to the policy that sampled; decoupled PPO), "truncate" (min(v,
      high)) or "mask" (v in [low, high], else 0; IcePop with high 5). Or a loss in the
      place of that of `loss_algo`, with the ratio u of the trained policy to the policy
      that sampled: "cispo" (u clipped to [low, high], on the log-probability),
      "dppo-tv" or "dppo-kl" (u, and 0 where the update would move the token's
      probability further away and its total variation or KL divergence is above the
      threshold). Or "off". See docs/algorithms.md for the formulas.
    level: level of v. "token"; "sequence-product", the ratio of the probabilities of
      whole completions (called "sequence" in TRL and verl), which is unbiased without
      bounds; or "sequence", the geometric mean of the tokens' ratios.
    low: lower bound of the ratio. None: 0.5 for "mask", 0 for "cispo".
    high: upper bound of the ratio. None: 2 for "truncate" and "mask", 5 for "cispo".
    threshold: largest divergence of a token. None: 0.15 for "dppo-tv", 0.05 nats for
      "dppo-kl".
  """

  kind: str = "truncate"
  level: str = "token"
  low: float | None = None
  high: float | None = None
  threshold: float | None = None

  def __post_init__(self):
    checks.fields(
      self,
      low=checks.NOT_NEGATIVE,
      high=checks.POSITIVE,
      threshold=checks.POSITIVE,
    )
    _choose("kind", self.kind, KINDS)
    _choose("level", self.level, LEVELS)
    bounds = ("low", "high", "threshold")
    defaults = named_values(KINDS[self.kind], bounds)
    for name, value in known_values(self, bounds).items():
      if defaults[name] is None:
        raise ValueError(
          f"{name} is {value} and kind is {self.kind!r}, which does not use it: leave "
          f"{name} out"
        )
    if self.is_loss and self.level != "token":
      raise ValueError(
        f"level is {self.level!r} and kind is {self.kind!r}, which has the ratio of "
        'each token: leave level at "token"'
      )
    low, high = self.bounds
    if not low <= 1 <= high or low == high:
      raise ValueError(
        f"low is {low} and high is {high}: expected low <= 1 <= high; the ratio is 1 "
        "where both policies agree"
      )

  @property
  def is_loss(self) -> bool:
    """True if the correction takes the place of the loss of `loss_algo`."""
    return KINDS[self.kind].is_loss

  @property
  def bounds(self) -> tuple[float, float]:
    """The bounds of the ratio, with the defaults of the kind; 0 and inf for none."""
    kind = KINDS[self.kind]
    low = kind.low if self.low is None else self.low
    high = kind.high if self.high is None else self.high
    return low or 0.0, math.inf if high is None else high

  @property
  def limit(self) -> float:
    """The largest divergence of a token, with the default of the kind; inf for none."""
    limit = KINDS[self.kind].threshold if self.threshold is None else self.threshold
    return math.inf if limit is None else limit


def safe_correction(
  staleness: int, *, is_rounded: bool = False
) -> RolloutCorrection | None:
  """Returns the correction of rollouts by another policy, if a user chooses none.

  It is truncated importance sampling by token. Its weights are at most 2 however old
  the weights of a token are, it drops no token, and it goes with every `loss_algo`.

  Args:
    staleness: the most updates, or batches, by which the weights that sample may be
      older than those that are trained. 0: on-policy, which needs no correction.
    is_rounded: True if the weights that sample are rounded (`RolloutConfig.weights`).
  """
  checks.number("staleness", staleness, checks.NOT_NEGATIVE, whole=True)
  return RolloutCorrection(kind="truncate") if staleness or is_rounded else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
  """Settings that the policy-gradient algorithms share.

  Attributes:
    num_generations: completions of each prompt.
    num_iterations: how many times a batch of rollouts is trained on.
    beta: weight of the KL divergence from the reference model; 0 needs no reference.
    kl_method: estimator of the KL divergence, a name in `ops.kl.ESTIMATORS` or a
      function.
    kl_corrected: if True, the estimate is multiplied by the ratio (see
      `ops.kl.corrected`), so that k1 and k3 have the gradient of the reverse KL. Only
      for algorithms with the KL divergence in the loss.
    epsilon: the ratio is clipped to [1 - epsilon, 1 + epsilon].
    epsilon_low, epsilon_high: the clip of one side; None uses epsilon.
    epsilon_c: dual clip: the loss of a negative advantage is at most epsilon_c times
      its size. It must be above 1 + epsilon_high; None is no dual clip.
    loss_algo: "grpo" (ratio of each token), "gspo" (ratio of the sequence, normalized
      by its length), "rloo" (ratio of the whole sequence), "cispo" (clipped weight on
      the log-probability), "sapo" (smooth gate on the ratio of each token in place of
      the clip) or "reinforce" (no ratio; one update on each batch of rollouts).
    loss_agg_mode: reduction of the token losses, a name in
      `ops.reductions.AGGREGATIONS`.
    advantage_estimator: a name in `ops.advantages.ADVANTAGES`, or a function of rewards
      [P, G] and `where` [P, G].
    entropy_coef: weight of the entropy bonus; None or 0 does not compute the entropy.
    observation_weight: weight of the cross-entropy of the tokens that an environment
      wrote between two actions of an episode; 0 does not train them (ECHO,
      arXiv:2605.24517). It needs an environment.
    rollout_correction: correction for tokens that were drawn by older weights, or by an
      engine whose log-probabilities differ from the trainer's. None corrects only
      stale rollouts and rollouts in 8 bits, with `safe_correction`; the kind "off"
      corrects nothing.
    mask_truncated: if True, completions that reached their token limit are left out of
      the loss.
    shared_prompt: if True, the prompt of a group is computed once for all its
      completions; None does so if the models can.
    exact_tile_rows: number of rows of a fixed tile for scoring. The bits of a
      log-probability then depend only on its row, and the ratio of the first update is
      exactly 1. None scores whole batches. Excludes shared prompts.
    eval_num_generations: completions of each prompt in evaluations.
    pass_threshold: reward from which a completion passes; None reports no pass@k.
    curriculum: chances of prompts by how often the policy solved them before; it needs
      `pass_threshold`. None: all prompts of the data are sampled.
  """

  # True: the KL divergence is a part of the loss. False: it is subtracted from rewards.
  kl_in_loss: ClassVar[bool] = True

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
  observation_weight: float = 0.0
  rollout_correction: RolloutCorrection | None = setting(None, may_change=True)
  mask_truncated: bool = False
  shared_prompt: bool | None = None
  exact_tile_rows: int | None = None
  eval_num_generations: int = 1
  pass_threshold: float | None = None
  curriculum: CurriculumConfig | None = None

  def __post_init__(self):
    counts = "num_generations num_iterations eval_num_generations exact_tile_rows"
    weights = "beta epsilon epsilon_low epsilon_high entropy_coef observation_weight"
    checks.fields(
      self,
      **dict.fromkeys(counts.split(), checks.COUNT),
      **dict.fromkeys(weights.split(), checks.NOT_NEGATIVE),
    )
    if self.clip_low > 1:
      name = "epsilon" if self.epsilon_low is None else "epsilon_low"
      raise ValueError(
        f"{name} is {self.clip_low}: expected at most 1.0, which clips nothing because "
        "a ratio is never below 0"
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
        f'loss_agg_mode is {self.loss_agg_mode!r} and loss_algo "rloo", in which every '
        f"token has the ratio of its whole row: set loss_agg_mode to {mode!r}"
      )
    if self.loss_algo == "reinforce" and self.num_iterations > 1:
      raise ValueError(
        f'num_iterations is {self.num_iterations} and loss_algo is "reinforce", which '
        "has no ratio to correct later updates. Set num_iterations to 1, or choose "
        "another loss_algo"
      )
    if self.loss_algo in ("cispo", "sapo", "reinforce") and self.epsilon_c is not None:
      raise ValueError(
        f"epsilon_c is {self.epsilon_c} and loss_algo {self.loss_algo!r} has no dual "
        "clip: leave epsilon_c out"
      )
    if self.curriculum is not None and self.pass_threshold is None:
      raise ValueError(
        "curriculum is set and pass_threshold is None, so no prompt counts as solved: "
        "set pass_threshold to the reward of a right answer"
      )
    self._check_correction()
    if self.exact_tile_rows is not None and self.shared_prompt:
      raise ValueError(
        f"exact_tile_rows is {self.exact_tile_rows} and shared_prompt is True: the "
        "first scores each row separately, the second in groups; set one of them"
      )
    resolve("kl_method", self.kl_method, kl.ESTIMATORS)
    if self.kl_corrected and not (self.beta and self.kl_in_loss):
      why = "beta is 0" if self.kl_in_loss else "the KL is a part of the rewards"
      raise ValueError(
        f"kl_corrected is True and {why}, so the loss has no KL: leave kl_corrected out"
      )
    self._check_advantages()

  def _check_correction(self) -> None:
    if self.correction is None or not self.correction.is_loss:
      return
    kind = self.correction.kind
    if self.loss_algo != "grpo":
      raise ValueError(
        f"rollout_correction.kind is {kind!r}, which takes the place of the loss, and "
        f'loss_algo is {self.loss_algo!r}: set loss_algo to "grpo", or choose a weight '
        "on the loss as the kind: decoupled, truncate or mask"
      )
    if self.epsilon_c is not None:
      raise ValueError(
        f"epsilon_c is {self.epsilon_c} and rollout_correction.kind is {kind!r}, which "
        "has no dual clip: leave epsilon_c out"
      )

  @property
  def correction(self) -> RolloutCorrection | None:
    """The correction that the loss applies; None for none."""
    rule = self.rollout_correction
    return None if rule is None or rule.kind == "off" else rule

  @property
  def collects_batches(self) -> bool:
    """True if a step samples batches until it has enough of them."""
    return False

  @property
  def wastes_equal_groups(self) -> bool:
    """True if a step takes groups with equal rewards although they teach nothing."""
    is_grouped = self.advantage_estimator in advantages.GROUPED
    return is_grouped and not self.collects_batches

  def for_staleness(self, staleness: int, *, is_rounded: bool = False) -> Self:
    """Returns the config for rollouts by another policy; see `safe_correction`.

    A correction that is set stays, and so does the kind "off".
    """
    if self.rollout_correction is not None:
      return self
    rule = safe_correction(staleness, is_rounded=is_rounded)
    return dataclasses.replace(self, rollout_correction=rule)

  def _check_advantages(self) -> None:
    """Checks the estimator; algorithms without group advantages override it."""
    resolve("advantage_estimator", self.advantage_estimator, advantages.ADVANTAGES)

  @property
  def gate_temperatures(self) -> dict[str, float]:
    """The temperatures of `ops.policy_gradient.sapo_loss` that are not its defaults."""
    return {}

  @property
  def clip_low(self) -> float:
    """The lower clip, as a distance from 1."""
    return self.epsilon if self.epsilon_low is None else self.epsilon_low

  @property
  def clip_high(self) -> float:
    """The upper clip, as a distance from 1."""
    return self.epsilon if self.epsilon_high is None else self.epsilon_high


def resolve(field: str, value: Any, table: Mapping[str, Callable[..., Any]]) -> Any:
  """Returns `value` if it is a function, else the function of that name in `table`.

  Raises:
    ValueError: `table` has no such name.
  """
  if callable(value):
    return value
  _choose(field, value, table)
  return table[value]


def _choose(field: str, value: object, choices: Any) -> None:
  if value not in choices:
    raise ValueError(f"{field} is {value!r}: choose one of {', '.join(choices)}")
