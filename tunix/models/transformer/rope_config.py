"""The configuration of rotary position embedding."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding and the scaling of its frequencies.

  Attributes:
    theta: base of the frequencies.
    scaling: None for no scaling; "linear" divides all frequencies by `factor`; "llama3"
      (Llama 3.1) divides low frequencies, keeps high ones and blends between them;
      "yarn" blends by the number of turns within the original context, and scales
      queries and keys too (arXiv:2309.00071); "longrope" divides each frequency by a
      number of its own, and scales queries and keys too (arXiv:2402.13753).
    factor: ratio of the new context length to the original one.
    low_freq_factor: "llama3" divides frequencies whose wavelength exceeds
      original_max_position / low_freq_factor.
    high_freq_factor: "llama3" keeps frequencies whose wavelength is below
      original_max_position / high_freq_factor.
    original_max_position: context length before scaling in tokens, for "llama3",
      "yarn" and "longrope".
    beta_fast: "yarn" keeps frequencies with more turns than this.
    beta_slow: "yarn" divides frequencies with fewer turns than this.
    attention_factor: "yarn" and "longrope" multiply queries and keys by this. None
      means 0.1 ln(factor) + 1 for "yarn", see also `mscale`, and
      sqrt(1 + ln(factor) / ln(original_max_position)) for "longrope".
    mscale, mscale_all_dim: two numbers m and n of "yarn", or None. If both are given,
      the default of `attention_factor` is
      (0.1 m ln(factor) + 1) / (0.1 n ln(factor) + 1).
    truncate: if True, "yarn" rounds the ends of its ramp to whole dimensions.
    short_factors, long_factors: divisors of the frequencies for "longrope", one per
      rotated pair. The long ones serve texts beyond the original context.
    uses_long_factors: if True, "longrope" divides by the long factors in all texts, and
      otherwise by the short ones. One model uses one of the two, so that a token's
      numbers depend neither on later tokens nor on other rows.
    partial: share of the dimensions of a head that are rotated, the first ones.
    query_beta: a number b; queries are multiplied by
      1 + b ln(1 + floor(position / original_max_position)) (Llama 4, Ministral 3). None
      for no factor.
  """

  theta: float = 10_000.0
  scaling: Literal["linear", "llama3", "yarn", "longrope"] | None = None
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True
  short_factors: tuple[float, ...] = ()
  long_factors: tuple[float, ...] = ()
  uses_long_factors: bool = False
  partial: float = 1.0
  query_beta: float | None = None

  def __post_init__(self):
    if self.scaling not in (None, "linear", "llama3", "yarn", "longrope"):
      raise ValueError(
        f"rope scaling {self.scaling!r} is not supported: use None, 'linear', "
        "'llama3', 'yarn' or 'longrope'"
      )
    checks.fields(
      self,
      theta=checks.POSITIVE,
      factor=checks.Range(1),
      original_max_position=checks.NOT_NEGATIVE,
      low_freq_factor=checks.POSITIVE,
      high_freq_factor=checks.POSITIVE,
      beta_fast=checks.POSITIVE,
      beta_slow=checks.POSITIVE,
      attention_factor=checks.POSITIVE,
      mscale=checks.POSITIVE,
      mscale_all_dim=checks.POSITIVE,
      partial=checks.POSITIVE,
      query_beta=checks.NOT_NEGATIVE,
    )
    if self.partial > 1:
      raise ValueError(
        f"rope partial is {self.partial}; expected at most 1. Give the rotated share of "
        "a head's dimensions"
      )
    counts = len(self.short_factors), len(self.long_factors)
    if (self.scaling == "longrope") != bool(counts[0]) or counts[0] != counts[1]:
      raise ValueError(
        f"rope short_factors and long_factors have {counts} numbers and scaling is "
        f"{self.scaling!r}; expected one number per rotated pair in both for "
        "'longrope', and none otherwise"
      )
    if min(self.short_factors + self.long_factors, default=1.0) <= 0:
      raise ValueError("rope short_factors and long_factors must all be above 0")
    if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f"rope high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
        f"{self.low_freq_factor}"
      )
    if self.scaling == "yarn" and self.beta_fast <= self.beta_slow:
      raise ValueError(
        f"rope beta_fast {self.beta_fast} must exceed beta_slow {self.beta_slow}"
      )

  def rotated(self, head_dim: int) -> int:
    """Returns the number of rotated dimensions of a head, as transformers rounds it."""
    return int(head_dim * self.partial)
