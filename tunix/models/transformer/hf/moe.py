"""Reader and writer of settings that families of mixtures share in `config.json`."""

from __future__ import annotations

from typing import Any

from tunix.models.transformer.config import MoEConfig
from tunix.models.transformer.hf.values import HfConfig, flag, number
from tunix.utils import checks

_AUX_DEFAULT = 0.001  # transformers' value of an absent `router_aux_loss_coef`


def read_losses(hf: HfConfig) -> dict[str, Any]:
  """Returns the weight of the load-balancing loss, a field of `MoEConfig`.

  As in transformers, the loss is used only if `output_router_logits` is true.
  """
  if not flag(hf, "output_router_logits"):
    return {}
  weight = number(hf, "router_aux_loss_coef", _AUX_DEFAULT, checks.NOT_NEGATIVE)
  return {"balance_weight": weight}


def write_losses(moe: MoEConfig) -> dict[str, Any]:
  """Returns the fields of the load-balancing loss."""
  if not moe.balance_weight:
    return {"output_router_logits": False}
  return {"output_router_logits": True, "router_aux_loss_coef": moe.balance_weight}
