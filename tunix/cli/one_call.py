"""The jobs of `tunix train` as Python functions: `tunix.sft(model=..., data=...)`.

Each function takes the keys of `tunix train`, runs the code of the command, and accepts
objects where the command has paths: a model, a tokenizer, records, reward functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from tunix.cli import config as config_lib
from tunix.cli.commands import train
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import objects
from tunix.cli.run.result import JobResult
from tunix.cli.settings import keys
from tunix.cli.settings.convert import Choice, plain, section_of
from tunix.cli.settings.run import RunSettings
from tunix.models import lora
from tunix.models.transformer.model import Transformer
from tunix.utils import attributes, mesh as mesh_lib
from tunix.utils.setting import facts_of

# Names of keys that are usual in Python.
_NAMES = {
  "eval_data": "data.eval",
  "rewards": "reward.functions",
  "quantise": "model.quantize",
}

# Sections about the files of a run.
_OF_FILES = ("export", "checkpoint", "samples", "logging")


class JobFunction:
  """A job of `tunix train` as a function; `tunix.sft`, `tunix.grpo`, ... are instances.

  Attributes:
    job: name of the job.
  """

  def __init__(self, job: str):
    self.job = job
    self.__name__ = self.__qualname__ = job
    self.__doc__ = f"Runs the job {job}: {JOBS[job].summary}.\n\n{_DOC}"

  def __repr__(self) -> str:
    return f"<function tunix.{self.job}(*, model, data, **settings)>"

  def __call__(self, *, model: object, data: object, **settings: object) -> JobResult:
    with contextlib.ExitStack() as stack:
      stack.enter_context(objects.holding())
      folder = settings.get("output_dir")
      if folder is None:
        given = [leaf for _, layer in self._layers(settings) for leaf in _leaves(layer)]
        _check_without_folder(settings, given)
        scratch = tempfile.TemporaryDirectory(prefix="tunix-")
        settings["output_dir"] = stack.enter_context(scratch)
        settings["export"] = {"kind": "none"}
      config = self.settings(model=model, data=data, **settings)
      return train.run(config, keeps=folder is not None)

  def settings(self, **settings: Any) -> RunSettings:
    """Returns the settings of a call, as `tunix train` would read them from a file."""
    layers = self._layers(settings)
    _check_once(layers)
    first = [("", {"job": self.job}), *_of_model(settings.get("model"), settings)]
    return config_lib.from_layers([*first, *layers])

  def _layers(self, settings: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns (origin, nested values) of each keyword that is not None."""
    layers: list[tuple[str, dict[str, Any]]] = []
    for name, value in settings.items():
      if value is None:
        continue
      key = self._key(name)
      nested = _values(key, value, JOBS[self.job].settings)
      for part in reversed(key.split(".")):
        nested = {part: nested}
      layers.append((f"tunix.{self.job}({name}=...)", nested))
    return layers

  def _key(self, name: str) -> str:
    """Returns the dotted key of a keyword.

    A keyword is a section or key of the job (`lora`, `seed`), the last part of a key of
    the section `training`, or the last part of a key that only one section has besides
    `eval`, whose episodes repeat keys of the training.

    Raises:
      TypeError: several sections have the key.
    """
    section = JOBS[self.job].settings
    if name in _NAMES or name in keys.of(section):
      return _NAMES.get(name, name)
    names = [dotted for dotted, _, _ in keys.walk(section)]
    if f"training.{name}" in names:
      return f"training.{name}"
    matches = list(dict.fromkeys(d for d in names if d.rpartition(".")[2] == name))
    matches = [d for d in matches if not d.startswith("eval.")] or matches
    if len(matches) > 1:
      sections = " or ".join(f"{d.partition('.')[0]}=dict({name}=...)" for d in matches)
      raise TypeError(f"{name} is a key of several sections; give {sections}")
    return matches[0] if matches else name  # an unknown key is refused with advice


_DOC = """\
The same code as `tunix train`, with its checks, messages and files.

Args:
  model: folder or hub id, {"name": preset, "args": {...}}, or a model of AutoModel. A
    model is trained in place; with `lora` it is unchanged and shares its weights.
  data: file, other source of `data.train`, a list of records, or any object with a
    length and items; or a dict of keys of the section `data`.
  eval_data: records for evaluations, as for `data`, and no dict.
  tokenizer: folder, hub id, TokenizerAdapter or any tokenizer that it wraps. Needed if
    `model` is an object.
  output_dir: folder of the run, which the same call resumes; a model that is an object
    must then be loaded again, because training changes it. Without it nothing is kept
    on disk: no checkpoints, no logs, no export.
  **settings: keys of `tunix train --help`. A section is a dict, a dataclass
    (`lora=LoraConfig(rank=8)`), or the value of its first key (`lora=8`,
    `algorithm="dapo"`). A key may be given by its last part: `max_steps=20`,
    `num_generations=8`. `rewards` is `reward.functions`, a function or several.

Returns:
  A JobResult: steps, metrics, history, trainer, model, tokenizer, export.

Raises:
  TypeError: a keyword that several sections have, or two keywords for one key.
  ValueError, FileNotFoundError: wrong settings, data or model; nothing was trained.
"""


def _check_without_folder(
  settings: Mapping[str, Any], given: Iterable[tuple[str, Any]]
) -> None:
  """Refuses settings that need a folder if there is none.

  Args:
    settings: keywords of the call.
    given: (dotted key, value) of all of them.

  Raises:
    ValueError: several processes, or the first key about files.
  """
  if settings.get("distributed") or jax.distributed.is_initialized():
    raise ValueError(
      "output_dir is not set and the run has several processes. Give a folder that all "
      "of them share"
    )
  for key, value in given:
    is_unwritten = key == "logging.progress_bar" or (key, value) == (
      "export.kind",
      "none",
    )
    if key.partition(".")[0] in _OF_FILES and not is_unwritten:
      raise ValueError(
        f"{key} is set and output_dir is not, so nothing is written. Give output_dir, "
        f"or leave {key} out"
      )


def _check_once(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
  """Refuses two keywords that set one key to different values.

  Raises:
    TypeError: names the keywords and the key.
  """
  origins: dict[str, tuple[str, Any]] = {}
  for origin, nested in layers:
    for key, value in _leaves(nested):
      first, before = origins.setdefault(key, (origin, value))
      if before != value:
        raise TypeError(f"{first} and {origin} both set {key}; give it once")


def _leaves(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  for name, value in nested.items():
    if isinstance(value, Mapping) and value:
      yield from _leaves(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value


def _of_model(model: object, settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
  """Returns layers with the mesh and the adapters of a model in memory.

  Raises:
    ValueError: the model has adapters and `lora` is set.
  """
  model = model.get("path") if isinstance(model, Mapping) else model
  layers: list[tuple[str, Any]] = []
  if not isinstance(model, nnx.Module):
    return layers
  mesh = mesh_lib.mesh_of(nnx.state(model))
  # The axes of two layers would be joined.
  if mesh is not None and settings.get("mesh") is None:
    axes = {str(name): size for name, size in mesh.shape.items()}
    layers.append(("the mesh of the model", {"mesh": axes}))
  if isinstance(model, Transformer) and (adapters := lora.config_of(model)) is not None:
    if settings.get("lora") is not None:
      raise ValueError(
        "lora is set and the model has adapters already. Leave lora out to train them, "
        "or give tunix.models.lora.merge(model)"
      )
    layers.append(("the model", {"lora": keys.as_plain(adapters)}))
  return layers


def _values(key: str, value: object, section: Any) -> Any:
  """Returns a value as a file would hold it; names stand for objects.

  Args:
    key: dotted key of the value.
    value: value of a keyword.
    section: dataclass of the whole configuration.
  """
  entry = next((e for dotted, _, e in keys.walk(section) if dotted == key), None)
  inner = None if entry is None else section_of(entry.hint)
  if entry is None or value is None:
    return value
  if inner is None:
    return _objects(key, value) if entry.facts.takes_object else _plain(value)
  if hasattr(value, "init") and hasattr(value, "update"):
    raise TypeError(
      f'{key} is an optax transformation; expected a name, as in optimizer="adamw" or '
      "optimizer=dict(name=..., args=...). Trainer classes take transformations"
    )
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = _changed(inner, value)
  if not isinstance(value, Mapping):
    first = "name" if isinstance(inner, Choice) else next(iter(keys.of(inner)))
    value = {first: value}
  return {name: _values(f"{key}.{name}", v, section) for name, v in value.items()}


def _changed(section: object, value: Any) -> dict[str, Any]:
  """Returns the fields of a dataclass that differ from their defaults."""
  changed, values = {}, attributes.of_fields(value)
  if isinstance(section, Choice):
    changed["name"] = section.name_of(value)
  for field in dataclasses.fields(value):
    factory, default = field.default_factory, field.default
    if factory is not dataclasses.MISSING:
      default = factory()
    current = values[field.name]
    if not facts_of(field).python_only and (
      default is dataclasses.MISSING or current != default
    ):
      changed[field.name] = current
  return changed


def _objects(key: str, value: object) -> Any:
  """Returns a path or source, or several; each object is replaced by its name."""
  if isinstance(value, str | os.PathLike):
    return os.fspath(value)
  if isinstance(value, list | tuple) and value and all(map(_is_source, value)):
    return [_objects(key, entry) for entry in value]
  return objects.name_of(value, key)


def _is_source(entry: object) -> bool:
  """Returns True for an entry of a list of sources, False for a record."""
  is_sequence = hasattr(entry, "__len__") and not isinstance(entry, Mapping)
  return is_sequence or callable(entry) or isinstance(entry, os.PathLike)


def _plain(value: object) -> Any:
  return os.fspath(value) if isinstance(value, os.PathLike) else plain(value)


JobFunction.__call__.__doc__ = f"Runs the job.\n\n{_DOC}"
sft, dpo, orpo, kto = map(JobFunction, ("sft", "dpo", "orpo", "kto"))
reward, distill, grpo, ppo = map(JobFunction, ("reward", "distill", "grpo", "ppo"))
