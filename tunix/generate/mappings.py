"""Hugging Face names of a model's parameters, from the name table of its family.

They are for user code that copies weights into an engine. Our samplers write a folder
instead (`VllmSampler.update_weights`).
"""

from __future__ import annotations

import dataclasses
from typing import Self

from flax import nnx

from tunix.models import families
from tunix.models.families import Family
from tunix.models.transformer import params
from tunix.utils import tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappingConfig:
  """The Hugging Face tensors of each parameter of a model.

  Attributes:
    to_hf_mappings: dotted parameter path -> names of its tensors. A parameter is one
      tensor; a stacked one is a tensor for each layer (and expert), in the order of
      its leading axes.
    to_hf_transpose_keys: path -> order of a tensor's axes, for parameters that are
      stored transposed.
    lora_to_hf_mappings: path of a LoRA parameter -> names of the tensors it adapts.
  """

  to_hf_mappings: dict[str, tuple[str, ...]]
  to_hf_transpose_keys: dict[str, tuple[int, int]]
  lora_to_hf_mappings: dict[str, tuple[str, ...]]

  @classmethod
  def from_model(cls, model: nnx.Module, family: Family | None = None) -> Self:
    """Returns the mappings of a model.

    Args:
      model: a model with a `config`.
      family: family of the model. None: the one of the config's class.

    Raises:
      ValueError: a parameter has no name in the family's table.
    """
    family = family or families.of_config(model.config)
    names, transposed, adapters = {}, {}, {}
    for path, value in tree.flatten(nnx.state(model, nnx.Param)).items():
      module, _, field = path.rpartition(".")
      is_lora = field.startswith("lora_")
      base = f"{module}.kernel" if is_lora else path
      place = params.place(family.names, base, model.config)
      (adapters if is_lora else names)[path] = place.keys
      if place.transpose and not is_lora:
        transposed[path] = params.axes_of(value.ndim - len(place.lead))
    return cls(
      to_hf_mappings=names,
      to_hf_transpose_keys=transposed,
      lora_to_hf_mappings=adapters,
    )
