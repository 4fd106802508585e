"""The description of one model family: its classes, tensor names and sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.params import DECODER, HARMLESS, MTPNames, NameTable

Preset = Callable[..., TransformerConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """The properties of one kind of model that loading and saving use.

  Each family of this package is a `Family`, and users can define further ones. The
  model can be any module whose configuration is a dataclass.

  Attributes:
    name: the family's name in messages and on the command line.
    model_types: values of `model_type` in `config.json` that select this family.
    config_class: the configuration, a dataclass. If it has the fields `dtype` and
      `param_dtype`, loading sets them to the checkpoint's dtype.
    model_class: called as `model_class(config, rngs=...)`.
    names: maps a parameter path to its Hugging Face tensor, see
      `transformer.params.place`.
    config_from_hf: makes a configuration from a parsed `config.json`. It raises
      ValueError for settings that the family does not support.
    config_to_hf: makes the contents of `config.json` from a configuration.
    harmless: regular expressions of tensor names that a checkpoint may hold and that
      loading ignores.
    presets: named sizes. Each preset accepts fields of the configuration to override.
    canonical_key: maps a tensor's name in a checkpoint to its name in `names`, for
      families whose checkpoints come in several spellings.
    module_key: maps a name in `names` to its name among the modules of transformers, if
      checkpoints are spelled otherwise; PEFT's folders have the names of modules.
    hub_names: maps the name of a hub repository, in lower case and without its owner,
      to a preset, where `naming` cannot derive the preset from the name.
    text_only: for a family of images and text, the family that loads the text model of
      the same folders without the tower; None for a family of text.
    mtp: names of the layer that predicts further tokens; None: there is none. A model
      is loaded and saved without this layer, which can draft its tokens.
  """

  name: str
  model_types: tuple[str, ...]
  config_class: type[Any]
  model_class: Callable[..., Any]
  names: NameTable = dataclasses.field(default_factory=lambda: DECODER)
  config_from_hf: Callable[[Mapping[str, Any]], Any]
  config_to_hf: Callable[[Any], dict[str, Any]]
  harmless: tuple[str, ...] = HARMLESS
  presets: Mapping[str, Preset] = dataclasses.field(default_factory=dict)
  canonical_key: Callable[[str], str] = lambda key: key
  module_key: Callable[[str], str] = lambda key: key
  hub_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  text_only: Family | None = None
  mtp: MTPNames | None = None


def presets_of(config_class: type, *prefixes: str) -> dict[str, Preset]:
  """Returns the class methods of a configuration by name, sorted by name.

  Args:
    config_class: the configuration, whose class methods are its presets.
    prefixes: beginnings of the names to return; none returns all of them.
  """
  methods = inspect.getmembers(config_class, inspect.ismethod)
  return {name: make for name, make in methods if name.startswith(prefixes or "")}
