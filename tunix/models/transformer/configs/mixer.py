"""The sizes of recurrent mixers."""

from __future__ import annotations

import dataclasses

from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config:
  """The recurrent mixer of Mamba-2, see recurrences/mamba2.py.

  Attributes:
    num_heads: number of heads H.
    head_dim: size P of a head.
    state_dim: size N of the vectors b and c; a head's state is [P, N].
    groups: number G of groups of heads that share b and c.
    conv_taps: number K of taps of the short convolution.
    conv_bias: if True, the convolution has a bias.
    least_step: lower bound of the steps dt.
  """

  num_heads: int
  head_dim: int
  state_dim: int
  groups: int = 1
  conv_taps: int = 4
  conv_bias: bool = True
  least_step: float = 0.0

  def __post_init__(self):
    counts = "num_heads head_dim state_dim groups conv_taps"
    checks.fields(
      self,
      **dict.fromkeys(counts.split(), checks.COUNT),
      least_step=checks.NOT_NEGATIVE,
    )
    if self.num_heads % self.groups:
      raise ValueError(
        f"groups is {self.groups}; expected a divisor of num_heads {self.num_heads}"
      )

  @property
  def inner_dim(self) -> int:
    """Number of outputs H P."""
    return self.num_heads * self.head_dim

  @property
  def channels(self) -> int:
    """Number of channels of the convolution, H P + 2 G N."""
    return self.inner_dim + 2 * self.groups * self.state_dim

  @property
  def state_shape(self) -> tuple[int, int]:
    """Shape of a head's state, [P, N]."""
    return self.head_dim, self.state_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
  """The recurrent mixer of gated delta nets, see recurrences/delta_net.py.

  Attributes:
    num_heads: number of heads H, the value heads.
    num_key_heads: number G of key heads; the H / G heads of a group share queries and
      keys.
    head_dim: size V of a value.
    key_dim: size K of a key; a head's state is [K, V].
    conv_taps: number of taps of the short convolution.
  """

  num_heads: int
  num_key_heads: int
  head_dim: int = 128
  key_dim: int = 128
  conv_taps: int = 4

  def __post_init__(self):
    counts = "num_heads num_key_heads head_dim key_dim conv_taps"
    checks.fields(self, **dict.fromkeys(counts.split(), checks.COUNT))
    if self.num_heads % self.num_key_heads:
      raise ValueError(
        f"num_key_heads is {self.num_key_heads}; expected a divisor of num_heads "
        f"{self.num_heads}"
      )

  @property
  def inner_dim(self) -> int:
    """Number of outputs H V."""
    return self.num_heads * self.head_dim

  @property
  def channels(self) -> int:
    """Number of channels of the convolution, 2 G K + H V."""
    return 2 * self.num_key_heads * self.key_dim + self.inner_dim

  @property
  def state_shape(self) -> tuple[int, int]:
    """Shape of a head's state, [K, V]."""
    return self.key_dim, self.head_dim
