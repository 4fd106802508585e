"""Settings of preference training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from tunix.data.batches import BadRows
from tunix.data.rows import SideBySide
from tunix.ops import kto, preference
from tunix.sft.config import TrainingConfig
from tunix.utils import checks

Algorithm = Literal["dpo", "orpo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionsConfig(TrainingConfig):
  """Settings of every trainer that reads prompts with completions.

  Attributes:
    max_prompt_length: tokens; a longer prompt keeps its end (behind BOS, if it began
      with one). Needed for text; token ids come as they are.
    max_response_length: tokens; a longer completion loses its end, and learns no EOS.
    bad_rows: an empty completion, or a chosen one equal to the rejected: "error" raises
      ValueError and names the row, "skip" gives it no weight and warns with a count.
  """

  max_prompt_length: int | None = None
  max_response_length: int | None = None
  bad_rows: BadRows = "error"

  def __post_init__(self):
    super().__post_init__()
    lengths = ("max_prompt_length", "max_response_length")
    checks.fields(self, **dict.fromkeys(lengths, checks.COUNT))
    if len({getattr(self, name) is None for name in lengths}) > 1:
      raise ValueError(f"set both of {' and '.join(lengths)}, or neither (token ids)")
    if self.bad_rows not in get_args(BadRows):
      raise ValueError(
        f"bad_rows is {self.bad_rows!r}: use one of {list(get_args(BadRows))}"
      )

  @property
  def limits(self) -> SideBySide | None:
    """The two lengths, None where they are not set."""
    if self.max_prompt_length is None or self.max_response_length is None:
      return None
    return SideBySide(
      max_prompt_length=self.max_prompt_length,
      max_completion_length=self.max_response_length,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceConfig(CompletionsConfig):
  """Settings of PreferenceTrainer.

  Attributes:
    loss: a name of `tunix.ops.preference.PAIR_LOSSES`, a PairLossSpec, or a function
      (PairScores, *, options) -> values [B].
    beta: strength of the reference.
    label_smoothing: chance that a label is wrong, of the losses that take it.
    options: further options of the loss, such as {"gamma": 1.0} of simpo; none that is
      a setting here.
    reference_free: leave the reference out of a loss that has one (all of its
      log-probabilities count as 0).
    shared_prompt: compute a pair's prompt once for both completions. The same gradient
      up to rounding; it pays where prompts are long. Our decoder only.
  """

  loss: preference.Loss = "sigmoid"
  beta: float = 0.1
  label_smoothing: float = 0.0
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reference_free: bool = False
  shared_prompt: bool = False

  def __post_init__(self):
    super().__post_init__()
    fields = {field.name for field in dataclasses.fields(self)}
    if twice := sorted(fields & self.options.keys()):
      raise ValueError(
        f"options hold {twice[0]!r}, which is a setting of its own: set {twice[0]}="
        f"{self.options[twice[0]]!r} instead"
      )
    for name, value in self.options.items():
      if not isinstance(value, bool):
        checks.number(f"options.{name}", value)
    preference.check_pair_loss(self.chosen_loss, **self.loss_options)
    spec = preference.pair_loss_spec(self.chosen_loss)
    if self.reference_free and not spec.needs_reference:
      raise ValueError(
        f"reference_free with loss {self.chosen_loss!r}, which has no reference: "
        "leave it out"
      )

  @property
  def chosen_loss(self) -> preference.Loss:
    """The loss that is trained."""
    return self.loss

  @property
  def loss_options(self) -> dict[str, Any]:
    """Everything that the loss is called with."""
    return {
      "beta": self.beta,
      "label_smoothing": self.label_smoothing,
      **self.options,
    }

  @property
  def spec(self) -> preference.PairLossSpec:
    """What the loss needs."""
    spec = preference.pair_loss_spec(self.chosen_loss)
    return spec._replace(needs_reference=False) if self.reference_free else spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOTrainingConfig(PreferenceConfig):
  """Settings of DPOTrainer.

  Attributes:
    algorithm: "dpo" trains `loss` (Rafailov et al. 2023, arXiv:2305.18290, unless
      another is named); "orpo" Hong et al. 2024, arXiv:2403.07691.
    lambda_orpo: weight of orpo's odds ratio; the other losses do not read it.
  """

  algorithm: Algorithm = "dpo"
  lambda_orpo: float = 0.1

  def __post_init__(self):
    checks.fields(self, lambda_orpo=checks.POSITIVE)
    if self.algorithm not in get_args(Algorithm):
      raise ValueError(
        f"algorithm is {self.algorithm!r}: use one of {list(get_args(Algorithm))}, or "
        "name another loss with loss="
      )
    if self.algorithm == "orpo" and self.loss not in ("sigmoid", "orpo"):
      raise ValueError(
        f"algorithm 'orpo' with loss {self.loss!r}: leave one of them out"
      )
    super().__post_init__()

  @property
  def chosen_loss(self) -> preference.Loss:
    """The loss that is trained."""
    return "orpo" if self.algorithm == "orpo" else self.loss

  @property
  def loss_options(self) -> dict[str, Any]:
    """Everything that the loss is called with."""
    orpo = {"lambda_orpo": self.lambda_orpo} if self.chosen_loss == "orpo" else {}
    return {**orpo, **super().loss_options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPOTrainingConfig(DPOTrainingConfig):
  """DPOTrainingConfig with ORPO for its algorithm."""

  algorithm: Algorithm = "orpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOConfig(CompletionsConfig):
  """Settings of KTOTrainer.

  Attributes:
    beta: strength of the reference.
    desirable_weight, undesirable_weight: of the two kinds of completions. The paper
      wants desirable_weight n_D / (undesirable_weight n_U) between 1 and 4/3.
  """

  beta: float = 0.1
  desirable_weight: float = 1.0
  undesirable_weight: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    row = jax.ShapeDtypeStruct((1,), jnp.float32)
    label = jax.ShapeDtypeStruct((1,), bool)
    jax.eval_shape(  # refuses what the loss would refuse
      lambda x, y: kto.kto_loss(x, x, y, x, kl=0.0, **self.loss_options), row, label
    )

  @property
  def loss_options(self) -> dict[str, float]:
    """What the loss is called with."""
    names = ("beta", "desirable_weight", "undesirable_weight")
    return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(CompletionsConfig):
  """Settings of RewardTrainer.

  Attributes:
    centering: weight of a term that draws a pair's rewards to a sum of 0.
  """

  centering: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, centering=checks.NOT_NEGATIVE)
