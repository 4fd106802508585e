"""The configuration of rotary position embedding."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from tunix.utils import attributes, checks

Scaling = Literal["linear", "llama3", "yarn", "longrope", "proportional"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding and the scaling of its frequencies.

  Attributes:
    theta: base of the frequencies.
    scaling: None for no scaling; "linear" divides all frequencies by `factor`; "llama3"
      (Llama 3.1) divides low frequencies, keeps high ones and blends between them;
      "yarn" blends by the number of turns within the original context, and scales
      queries and keys too (arXiv:2309.00071); "longrope" divides each frequency by a
      number of its own, and scales queries and keys too (arXiv:2402.13753);
      "proportional" divides all frequencies by `factor` and leaves the slowest ones
      out, see `partial` (Gemma 4).
    factor: ratio of the new context length to the original one.
    low_freq_factor: "llama3" divides frequencies whose wavelength exceeds
      original_max_position / low_freq_factor.
    high_freq_factor: "llama3" keeps frequencies whose wavelength is below
      original_max_position / high_freq_factor.
    original_max_position: context length before scaling in tokens, for "llama3",
      "yarn", "longrope" and `query_beta`.
    beta_fast: "yarn" keeps frequencies with more turns than this.
    beta_slow: "yarn" divides frequencies with fewer turns than this.
    attention_factor: "yarn" and "longrope" multiply queries and keys by this. None
      means for "yarn" 0.1 ln(factor) + 1, or see `mscale`; for "longrope"
      sqrt(1 + ln(factor) / ln(original_max_position)).
    mscale, mscale_all_dim: two numbers m and n of "yarn", or None. If both are given,
      the default of `attention_factor` is
      (0.1 m ln(factor) + 1) / (0.1 n ln(factor) + 1).
    truncate: if True, "yarn" rounds the ends of its ramp to whole dimensions.
    short_factors, long_factors: the divisors of "longrope", one per frequency: those of
      sequences up to original_max_position, and those of longer ones.
    partial: share of the dimensions of a head that are rotated, the first ones. With
      "proportional" it is the share of the pairs (x[i], x[i + H/2]) that are rotated,
      and the frequencies are those of the whole head.
    query_beta: a number b; queries are multiplied by
      1 + b ln(1 + floor(position / original_max_position)) (Llama 4, Ministral 3). None
      for no factor.
  """

  theta: float = 10_000.0
  scaling: Scaling | None = None
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
  partial: float = 1.0
  query_beta: float | None = None

  def __post_init__(self):
    if self.scaling is not None and self.scaling not in typing.get_args(Scaling):
      names = ", ".join(map(repr, typing.get_args(Scaling)))
      raise ValueError(
        f"rope scaling {self.scaling!r} is not supported: use None, or one of {names}"
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
      query_beta=checks.POSITIVE,
      short_factors=checks.POSITIVE,
      long_factors=checks.POSITIVE,
    )
    if self.partial > 1:
      raise ValueError(
        f"rope partial is {self.partial}; expected at most 1. Give the rotated share "
        "of a head's dimensions"
      )
    if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f"rope high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
        f"{self.low_freq_factor}"
      )
    if self.scaling == "longrope":
      self._check_divisors()
    if self.scaling == "yarn" and self.beta_fast <= self.beta_slow:
      raise ValueError(
        f"rope beta_fast {self.beta_fast} must exceed beta_slow {self.beta_slow}"
      )

  def _check_divisors(self):
    tables = attributes.of(self, ("short_factors", "long_factors"))
    for name, values in tables.items():
      if not values or len(values) != len(self.long_factors):
        raise ValueError(
          f"rope {name} has {len(values)} numbers and long_factors "
          f"{len(self.long_factors)}; expected one number per frequency in both"
        )

  def rotated(self, head_dim: int) -> int:
    """Returns the number of rotated dimensions of a head, as transformers rounds it.

    With "proportional" it is the whole head: its last pairs have the frequency 0.
    """
    if self.scaling == "proportional":
      return head_dim
    return int(head_dim * self.partial)
