"""Formats of fewer bits that published folders store weights in.

`quantization_config.quant_method` of `config.json` names the format. A model with a
vision tower may have the setting in its `text_config`. The weights are decoded when
they are read, so that the rest of loading sees plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunix.models.files import fp8, mxfp4
from tunix.models.files.stored_tensor import StoredTensor

_FIELD, _TEXT = "quantization_config", "text_config"
Tensors = dict[str, StoredTensor]
_FORMATS: Mapping[str, Callable[[Tensors, Mapping[str, Any]], Tensors]] = {
  "fp8": fp8.joined,
  "mxfp4": lambda tensors, settings: mxfp4.joined(tensors),
}


def _settings(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """Returns the settings of a format that is decoded, or None."""
  settings = hf.get(_FIELD)
  if settings is None and isinstance(text := hf.get(_TEXT), Mapping):
    settings = text.get(_FIELD)
  method = settings.get("quant_method") if isinstance(settings, Mapping) else None
  return settings if isinstance(method, str) and method in _FORMATS else None


def plain(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `config.json` of a folder as if its weights were stored as plain numbers.

  Settings of other formats stay, and the families refuse them.
  """
  out = dict(hf)
  if _settings(hf) is None:
    return out
  out.pop(_FIELD, None)
  if isinstance(text := hf.get(_TEXT), Mapping):
    out[_TEXT] = {name: value for name, value in text.items() if name != _FIELD}
  return out


def decoded(hf: Mapping[str, Any], tensors: Tensors) -> Tensors:
  """Returns a folder's tensors, those in a format of fewer bits as decoded ones.

  Args:
    hf: the parsed `config.json`.
    tensors: the tensors by name.

  Raises:
    ValueError: the tensors do not have the format, see `fp8.joined`, `mxfp4.joined`.
  """
  settings = _settings(hf)
  if settings is None:
    return tensors
  return _FORMATS[settings["quant_method"]](tensors, settings)
