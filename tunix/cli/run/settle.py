"""Settles a configuration: fills in every value that the run decides for itself.

`config.yaml` of a run holds the settled configuration, and a resumed run is compared
with it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from tunix.cli.jobs.table import JOBS
from tunix.cli.make import data as build_data, data_sources, objects, optimizer
from tunix.cli.make.data import RunData
from tunix.cli.make.loading import ModelLoader
from tunix.cli.settings import keys
from tunix.cli.settings.run import RunSettings, StreamRun
from tunix.cli.utils import call_strings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import hub


def settle(
  config: RunSettings, known_scans: Mapping[str, Any] | None = None
) -> tuple[RunSettings, TokenizerAdapter, RunData]:
  """Settles a configuration, and loads the tokenizer and the data on the way.

  Eight values are filled in, in this order:
    1. paths: absolute, so that the run can be resumed from any folder;
    2. model.revision: the commit of a hub id, because a branch may move while the run
       is stopped;
    3. data.num_epochs, 4. data.pad_to, 5. lora.modules_to_save, 6. model.param_dtype,
       7. optimizer.decay_targets and 8. the learning rate with the schedule: see
       `settle_values`. The length of the schedule needs the number of steps, and so the
       data.

  Args:
    config: settings of the run.
    known_scans: `RunData.scans` of an earlier start, whose records are not scanned
      again.

  Returns:
    The settled configuration, the tokenizer and the checked data.

  Raises:
    ValueError, FileNotFoundError: something about model, tokenizer or data is wrong.
  """
  config = absolute_paths(config)
  ModelLoader(config).check()
  if _names_hub_id(config.model.path):
    commit = hub.commit_of(ModelLoader(config).folder())
    config = keys.with_value(config, "model.revision", commit)
  job = JOBS[config.job]
  job.check(config)
  tokenizer = ModelLoader(config).tokenizer()
  data = job.data(config, tokenizer, known_scans)
  return settle_values(config, data.num_steps), tokenizer, data


def _names_hub_id(path: str | None) -> bool:
  if path is None or objects.is_name(path):
    return False
  return not pathlib.Path(path).expanduser().exists()


def settle_values(config: RunSettings, num_steps: int | None) -> RunSettings:
  """Fills in the values that depend on the number of steps and on other values only.

  Args:
    config: settings of the run.
    num_steps: optimizer steps of the run; None if not known in advance.

  Raises:
    ValueError: an unknown schedule, or an argument of it without a default.
  """
  # Without max_steps the data is read once.
  config = keys.with_value(config, "data.num_epochs", build_data.epochs(config))
  if isinstance(config, StreamRun):
    config = keys.with_value(config, "data.pad_to", config.pad_to)
  config = settle_model(config)
  targets = optimizer.settle_decay(config)
  config = keys.with_value(config, "optimizer.decay_targets", targets)
  rate, args = optimizer.settle_rate(config, num_steps)
  config = keys.with_value(config, "training.learning_rate", rate)
  return keys.with_value(config, "schedule.args", args)


def settle_model(config: RunSettings) -> RunSettings:
  """Fills in the values that decide the parameters of the model that is trained."""
  if config.lora is not None and config.lora.modules_to_save is None:
    # The head of scores is drawn at random, and would stay so if it were frozen.
    names = () if config.fits_adapter else ("score",)
    config = keys.with_value(config, "lora.modules_to_save", names)
  if config.lora is None and config.model.param_dtype is None:
    # A bfloat16 weight has 8 bits: an update below 1/256 of it is rounded away, as
    # nearly all are at the usual learning rates. Frozen weights below adapters keep
    # null, the checkpoint's dtype.
    config = keys.with_value(config, "model.param_dtype", "float32")
  return config


def absolute_paths(config: RunSettings) -> RunSettings:
  """Returns the settings with absolute paths.

  A path that is read and does not exist stays as it is, because it may be a hub id.
  """
  values = keys.flatten(config)
  for dotted, key in keys.of_config(config).items():
    value, path = values.get(dotted), key.facts.path
    if path is not None and value is not None:
      config = keys.with_value(config, dotted, _ABSOLUTE[path](value))
  return config


def _read(value: str) -> str:
  path = pathlib.Path(value).expanduser()
  return str(path.absolute()) if path.exists() else value


def _written(value: str) -> str:
  return str(pathlib.Path(value).expanduser().absolute())


def _functions(value: Any) -> tuple[str, ...]:
  entries = [value] if isinstance(value, str) else value
  return tuple(call_strings.with_absolute_path(entry) for entry in entries)


# `Facts.path` of a field -> how its value becomes absolute.
_ABSOLUTE = {
  "read": _read,
  "written": _written,
  "data": data_sources.with_absolute_paths,
  "function": call_strings.with_absolute_path,
  "functions": _functions,
}
