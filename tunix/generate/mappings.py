"""The names that other engines know a model's weights by, from the family's one table.

For code that moves weights into an engine by itself; ours does it through folders
(`VllmSampler.update_weights`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from flax import nnx

from tunix.models import families
from tunix.models.families import Family
from tunix.models.transformer import params
from tunix.utils import tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappingConfig:
  """Where each parameter of a model goes in a Hugging Face checkpoint.

  Attributes:
    to_hf_mappings: dotted parameter path -> the tensors it is made of, one, or one a
      layer (and expert) of a stacked parameter, in the order of its leading axes.
    to_hf_transpose_keys: path -> the order of a tensor's two axes, where it is the
      other way round.
    lora_to_hf_mappings: path of a LoRA parameter -> the tensors that it adapts.
  """

  to_hf_mappings: dict[str, tuple[str, ...]]
  to_hf_transpose_keys: dict[str, tuple[int, int]]
  lora_to_hf_mappings: dict[str, tuple[str, ...]]

  @classmethod
  def from_model(cls, model: Any, family: Family | None = None) -> Self:
    """The mappings of a model of ours, or of a family of one's own.

    Args:
      model: has a `config`.
      family: None: found by the config's class.

    Raises:
      ValueError: a parameter has no name in the family's table.
    """
    family = family or families.of_config(model.config)
    names, transposed, adapters = {}, {}, {}
    for path in tree.flatten(nnx.state(model, nnx.Param)):
      module, _, field = path.rpartition(".")
      is_lora = field.startswith("lora_")
      base = f"{module}.kernel" if is_lora else path
      place = params.place(family.names, base, model.config)
      (adapters if is_lora else names)[path] = place.keys
      if place.transpose and not is_lora:
        transposed[path] = (1, 0)
    return cls(
      to_hf_mappings=names,
      to_hf_transpose_keys=transposed,
      lora_to_hf_mappings=adapters,
    )
