"""The sizes of multi-head latent attention."""

from __future__ import annotations

import dataclasses

from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
  """Multi-head latent attention, see attention/mla.py.

  Attributes:
    kv_rank: size of the latent vector that keys and values are made from.
    q_rank: size of the latent vector of the queries; None makes them from the input.
    nope_dim: dimensions of a query and of a key without positions.
    rope_dim: dimensions of a query and of a key with rotary embedding. All heads share
      those of the key.
    value_dim: dimensions of a head's value.
    interleaved: if True, the rotated pairs are (x[2 i], x[2 i + 1]); else
      (x[i], x[i + R/2]), where R is `rope_dim`.
  """

  kv_rank: int
  q_rank: int | None
  nope_dim: int
  rope_dim: int
  value_dim: int
  interleaved: bool = True

  def __post_init__(self):
    names = ("kv_rank", "q_rank", "nope_dim", "rope_dim", "value_dim")
    checks.fields(self, **dict.fromkeys(names, checks.COUNT))
    if self.rope_dim % 2:
      raise ValueError(
        f"rope_dim is {self.rope_dim}; expected an even number, as pairs are rotated"
      )

  @property
  def query_dim(self) -> int:
    """Dimensions of a query and of a key."""
    return self.nope_dim + self.rope_dim

  @property
  def head_dim(self) -> int:
    """Size of a head for attention and cache: keys or values are padded with zeros."""
    return max(self.query_dim, self.value_dim)
