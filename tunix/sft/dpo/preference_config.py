"""Settings of DPO and ORPO, and the settings that all preference trainers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tunix.data.batches import BadRows, TextOptions
from tunix.data.rows import SideBySide
from tunix.generate import tokenizer_adapter
from tunix.ops import preference
from tunix.sft.config import TrainingConfig
from tunix.utils import checks

Algorithm = Literal["dpo", "orpo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionsConfig(TrainingConfig):
  """Settings that all trainers on prompts with completions share.

  Attributes:
    max_prompt_length: maximum number of tokens of a prompt. A longer prompt keeps its
      end, and BOS in front of it if the prompt began with BOS. Required for batches of
      text; batches of token ids are not cut.
    max_response_length: maximum number of tokens of a completion. A longer completion
      loses its end, and with it the EOS token.
    bad_rows: treatment of a row with an empty completion, or with equal chosen and
      rejected completions. "error" raises a ValueError that names the row; "skip" gives
      the row weight 0 and logs a warning with the count.
  """

  max_prompt_length: int | None = None
  max_response_length: int | None = None
  bad_rows: BadRows = "error"

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self, max_prompt_length=checks.COUNT, max_response_length=checks.COUNT
    )
    if (self.max_prompt_length is None) != (self.max_response_length is None):
      raise ValueError(
        f"max_prompt_length is {self.max_prompt_length} and max_response_length "
        f"{self.max_response_length}; expected two numbers, or None twice. Set both "
        "for batches of text, and neither for token ids."
      )
    if self.bad_rows not in get_args(BadRows):
      raise ValueError(
        f"bad_rows is {self.bad_rows!r}; expected one of {list(get_args(BadRows))}"
      )

  def text_options(self, tokenizer: object) -> TextOptions:
    """Returns the options that turn batches of text into rows of tokens.

    Args:
      tokenizer: a TokenizerAdapter, an object that it can wrap, or None for batches of
        token ids.
    """
    limits = None
    if self.max_prompt_length is not None and self.max_response_length is not None:
      limits = SideBySide(
        max_prompt_length=self.max_prompt_length,
        max_completion_length=self.max_response_length,
      )
    adapted = None if tokenizer is None else tokenizer_adapter.adapted(tokenizer)
    return TextOptions(tokenizer=adapted, limits=limits, bad_rows=self.bad_rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOTrainingConfig(CompletionsConfig):
  """Settings of DPOTrainer.

  Attributes:
    algorithm: "dpo" trains `loss`, by default the loss of Rafailov et al. 2023,
      arXiv:2305.18290. "orpo" is short for `loss="orpo"` (Hong et al. 2024,
      arXiv:2403.07691).
    loss: a name of `tunix.ops.preference.PAIR_LOSSES`, a PairLossSpec, or a function
      (PairScores, *, options) -> values [B].
    beta: strength of the pull toward the reference.
    label_smoothing: probability that a preference label is wrong, for losses that
      take it.
    lambda_orpo: weight of the odds ratio in the loss "orpo"; other losses ignore it.
    options: further options of the loss, such as {"gamma": 1.0} of simpo. A field of
      this class must not be repeated here.
    reference_free: replace the reference's log-probabilities by 0 in a loss that has a
      reference.
    shared_prompt: compute a pair's prompt once for both completions. The gradient is
      the same up to rounding. Only for our decoder. None: on CPUs, if the models can;
      elsewhere the kernels of attention take no such rows.
  """

  algorithm: Algorithm = "dpo"
  loss: preference.Loss = "sigmoid"
  beta: float = 0.1
  label_smoothing: float = 0.0
  lambda_orpo: float = 0.1
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reference_free: bool = False
  shared_prompt: bool | None = None

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, lambda_orpo=checks.POSITIVE)
    if self.algorithm not in get_args(Algorithm):
      raise ValueError(
        f"algorithm is {self.algorithm!r}; expected one of "
        f"{list(get_args(Algorithm))}. Choose any other loss with loss=."
      )
    if self.algorithm == "orpo" and self.loss not in ("sigmoid", "orpo"):
      raise ValueError(
        f"algorithm is 'orpo' and loss is {self.loss!r}; expected one of them. Leave "
        "the other one out."
      )
    fields = {field.name for field in dataclasses.fields(self)}
    if repeated := sorted(fields & self.options.keys()):
      raise ValueError(
        f"options hold {repeated[0]!r}, which is a setting of its own. Set "
        f"{repeated[0]}={self.options[repeated[0]]!r} instead."
      )
    for name, value in self.options.items():
      if not isinstance(value, bool):
        checks.number(f"options.{name}", value)
    preference.check_pair_loss(self.chosen_loss, **self.loss_options)
    spec = preference.pair_loss_spec(self.chosen_loss)
    if self.reference_free and not spec.needs_reference:
      raise ValueError(
        f"reference_free is True and loss is {self.chosen_loss!r}, which has no "
        "reference. Leave reference_free out."
      )

  @property
  def chosen_loss(self) -> preference.Loss:
    """The loss that is trained: "orpo" for that algorithm, else `loss`."""
    return "orpo" if self.algorithm == "orpo" else self.loss

  @property
  def loss_options(self) -> dict[str, Any]:
    """The keyword arguments of the loss."""
    orpo = {"lambda_orpo": self.lambda_orpo} if self.chosen_loss == "orpo" else {}
    return {
      **orpo,
      "beta": self.beta,
      "label_smoothing": self.label_smoothing,
      **self.options,
    }

  @property
  def spec(self) -> preference.PairLossSpec:
    """The loss function with its needs: a reference, other pairs of the batch."""
    spec = preference.pair_loss_spec(self.chosen_loss)
    return spec._replace(needs_reference=False) if self.reference_free else spec


PreferenceConfig = DPOTrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPOTrainingConfig(DPOTrainingConfig):
  """A DPOTrainingConfig whose `algorithm` is "orpo": a name that users rely on."""

  algorithm: Algorithm = "orpo"
