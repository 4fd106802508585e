"""Formats of fewer bits that published folders store weights in.

`quantization_config.quant_method` of `config.json` names the format. The weights are
decoded when they are read, so that the rest of loading sees plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunix.models import fp8, mxfp4
from tunix.models.stored_tensor import StoredTensor

_FIELD = "quantization_config"
Tensors = dict[str, StoredTensor]
_FORMATS: Mapping[str, Callable[[Tensors, Mapping[str, Any]], Tensors]] = {
  "fp8": fp8.joined,
  "mxfp4": lambda tensors, settings: mxfp4.joined(tensors),
}


def _method(hf: Mapping[str, Any]) -> str | None:
  """Returns the format of a folder, or None if it is not one that is decoded."""
  settings = hf.get(_FIELD)
  method = settings.get("quant_method") if isinstance(settings, Mapping) else None
  return method if isinstance(method, str) and method in _FORMATS else None


def plain(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `config.json` of a folder as if its weights were stored as plain numbers.

  Settings of other formats stay, and the families refuse them.
  """
  dropped = _FIELD if _method(hf) else None
  return {name: value for name, value in hf.items() if name != dropped}


def decoded(hf: Mapping[str, Any], tensors: Tensors) -> Tensors:
  """Returns a folder's tensors, those in a format of fewer bits as decoded ones.

  Args:
    hf: the parsed `config.json`.
    tensors: the tensors by name.

  Raises:
    ValueError: the tensors do not have the format, see `fp8.joined`, `mxfp4.joined`.
  """
  method = _method(hf)
  return tensors if method is None else _FORMATS[method](tensors, hf[_FIELD])
