"""The folder of a run: its files, the check before it is resumed, its result."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from tunix.cli import config as config_lib
from tunix.cli.make import former, objects
from tunix.cli.settings import keys, yaml_text
from tunix.cli.settings.run import RunSettings
from tunix.models import automodel
from tunix.utils import io

_log = logging.getLogger(__name__)

_HEADER = (
  "# Every key of this run as it was used; pass it to --config to run the same.\n"
)


def check_writable(name: str, folder: pathlib.Path, *, is_read: bool = False) -> None:
  """Refuses a folder that cannot be created or written; changes nothing.

  Args:
    name: setting that names the folder, for the message.
    folder: folder that exists or will be created.
    is_read: if True, an existing folder passes without write permission.

  Raises:
    ValueError: gives the obstacle.
  """
  problem = None
  try:
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
      problem = f"{nearest} is a file"
    elif not (is_read and nearest == folder) and not _is_open(nearest):
      problem = f"{nearest} cannot be written"
  except OSError as error:  # a name that is too long
    problem = (error.strerror or str(error)).lower()
  if problem is not None:
    raise ValueError(
      f"{name} is {str(folder)!r}, and {problem}: name a folder that can be written"
    )


def open_folder(config: RunSettings) -> RunFolder:
  """Returns the folder of a run; creates nothing.

  Raises:
    ValueError: output_dir is not set, or is no folder that can be used.
  """
  if config.output_dir is None:
    raise ValueError(
      "output_dir is not set. Give --output_dir=FOLDER for the run's files"
    )
  folder = RunFolder(pathlib.Path(config.output_dir).expanduser().absolute())
  # A finished run is shown from a folder that cannot be written.
  check_writable("output_dir", folder.path, is_read=True)
  return folder


def _is_open(folder: pathlib.Path) -> bool:
  """Returns True if files can be created in a folder.

  Permissions alone do not tell: root may write everywhere, but not in /proc.
  """
  if not os.access(folder, os.W_OK | os.X_OK):
    return False
  try:
    with tempfile.TemporaryFile(dir=folder):  # removed at once
      return True
  except OSError:
    return False


@dataclasses.dataclass(frozen=True)
class RunFolder:
  """Names and contents of the folder of a run.

  Attributes:
    path: the folder.
  """

  path: pathlib.Path

  @property
  def config_file(self) -> pathlib.Path:
    """Settled settings of the run."""
    return self.path / "config.yaml"

  @property
  def data_file(self) -> pathlib.Path:
    """SHA-256 of data, models, tokenizer and chat template."""
    return self.path / "data.json"

  @property
  def scan_file(self) -> pathlib.Path:
    """Reports of the data's scan, so that a resumed run does not scan again."""
    return self.path / "scan.json"

  @property
  def about_file(self) -> pathlib.Path:
    """Description of the last start: model, data, devices, versions."""
    return self.path / "about.json"

  @property
  def result_file(self) -> pathlib.Path:
    """Result of the run; exists only if the run has finished."""
    return self.path / "result.json"

  @property
  def failure_file(self) -> pathlib.Path:
    """Error of the last start; exists only if the last start failed."""
    return self.path / "failure.json"

  @property
  def logs(self) -> pathlib.Path:
    """Folder of the metrics."""
    return self.path / "logs"

  @property
  def checkpoints(self) -> pathlib.Path:
    """Folder of the checkpoints."""
    return self.path / "checkpoints"

  @property
  def export(self) -> pathlib.Path:
    """Folder of the exported model or adapter."""
    return self.path / "export"

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, in order."""
    if not self.checkpoints.is_dir():
      return []
    names = [file.name for file in self.checkpoints.iterdir() if file.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch(r"\d+", name))

  def read_config(self) -> RunSettings:
    """Reads the settings of the last start.

    Raises:
      FileNotFoundError: the folder holds no run.
    """
    if not self.config_file.is_file():
      raise FileNotFoundError(
        f"{self.path} has no config.yaml: give the output_dir of a `tunix train`"
      )
    name = str(self.config_file)
    written = _known(yaml_text.read_file(name))
    config = former.restore(config_lib.from_layers([(name, written)]), written)
    if config.lora is None or config.lora.modules_to_save is not None:
      return config
    # The folder is older than this key: then only adapters were trained.
    bare = dataclasses.replace(config.lora, modules_to_save=())
    return dataclasses.replace(config, lora=bare)

  def with_former(self, config: RunSettings) -> RunSettings:
    """Returns settings with the defaults that the run in the folder began with.

    They apply to keys that are null in `config`, if the version that began the run did
    not have them. A warning lists them, because a value that is given and equals the
    default of today is no exception. A folder without checkpoints changes nothing.
    """
    if not self.steps() or not self.config_file.is_file():
      return config
    former_config = former.restore(config, yaml_text.read_file(str(self.config_file)))
    now, then = keys.flatten(config), keys.flatten(former_config).items()
    if text := ", ".join(f"{key}={x}" for key, x in then if now[key] != x):
      _log.warning(
        "%s was begun by an older version and keeps its defaults: %s. Use another "
        "output_dir for other values",
        *(self.path, text),
      )
    return former_config

  def start(
    self,
    config: RunSettings,
    fingerprints: Mapping[str, str],
    scans: Mapping[str, Any],
  ) -> None:
    """Writes the settings and the fingerprints, and deletes the result of before.

    Args:
      config: settled settings.
      fingerprints: SHA-256 of what the run reads, by name.
      scans: `RunData.scans`.

    Raises:
      OSError: the folder cannot be written.
    """
    io.write_atomic(self.config_file, (_HEADER + config_lib.dump(config)).encode())
    io.write_json(self.data_file, {"sha256": dict(fingerprints)})
    io.write_json(self.scan_file, dict(scans))
    self.result_file.unlink(missing_ok=True)
    self.failure_file.unlink(missing_ok=True)

  def scans(self) -> dict[str, Any]:
    """Reads the scans of `start`; {} if the file is missing or damaged.

    Without them the data is scanned again.
    """
    try:
      return dict(json.loads(self.scan_file.read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
      return {}

  def check_resume(self, config: RunSettings, fingerprints: Mapping[str, str]) -> None:
    """Refuses settings or data other than those of the checkpoints in the folder.

    Keys that are declared `may_change` may differ.

    Args:
      config: settled settings.
      fingerprints: SHA-256 of what the run reads, by name.

    Raises:
      ValueError: names every key that differs, with both values.
    """
    steps = self.steps()
    if not steps:
      return
    where = f"cannot resume {self.path} at step {steps[-1]}"
    for file in (self.config_file, self.data_file):
      if not file.is_file():
        raise ValueError(
          f"{where}: its {file.name} is missing, so that the settings cannot be "
          "compared. Use another output_dir"
        )
    changed = _differences(self.read_config(), config)
    changed += self._changed_contents(config, fingerprints)
    if changed:
      raise ValueError(
        f"{where}: {'; '.join(changed)}. Use the settings and files of the first "
        "start, or another output_dir"
      )

  def _changed_contents(
    self, config: RunSettings, fingerprints: Mapping[str, str]
  ) -> list[str]:
    before = json.loads(self.data_file.read_text())["sha256"]
    # Names that both have: evaluation data may be added or left out. A key with several
    # contents has a name for each, such as "teachers.math".
    changed = {
      name.partition(".")[0]
      for name in before.keys() & fingerprints.keys()
      if before[name] != fingerprints[name]
    }
    values = keys.flatten(config)
    return [
      f"the weights of {values[dotted]} have changed (training changes a model in "
      "place; load it again)"
      if key.facts.names_model and objects.is_name(values[dotted])
      else f"the content of {dotted} has changed"
      for dotted, key in keys.of_config(config).items()
      if key.facts.fingerprint in changed
    ]

  def result(self, config: RunSettings) -> dict[str, Any] | None:
    """Returns the result of the run if it finished under exactly these settings."""
    if not self.result_file.is_file() or not self.steps():
      return None
    same = _shared(self.read_config()) == _shared(config)
    return json.loads(self.result_file.read_text()) if same else None

  def write_result(self, result: dict[str, Any]) -> None:
    """Marks the run as finished."""
    io.write_json(self.result_file, result)


def _shared(config: RunSettings) -> dict[str, Any]:
  """Returns the settings that a finished run must share with a new start.

  The section `distributed` differs between processes. The revision is compared by the
  model's fingerprint, because a branch of the hub moves without a change of weights.
  """
  return {
    key: value
    for key, value in keys.flatten(config).items()
    if not key.startswith("distributed") and key != "model.revision"
  }


def _differences(before: RunSettings, now: RunSettings) -> list[str]:
  """Returns a phrase about each key whose value may not change and did."""
  old, new = keys.flatten(before), keys.flatten(now)
  free = _changeable(before) | _changeable(now)
  fixed = [key for key in dict.fromkeys((*new, *old)) if key not in free]
  sections = {key.rpartition(".")[0] for key in fixed}
  differences, reported = [], set()
  for key in fixed:
    section = key.rpartition(".")[0]
    if key in sections:  # null on one side, a section on the other: told by its keys
      continue
    # Where one side lacks a whole section (lora), its first key stands for all of them.
    is_whole = section in old or section in new
    if (is_whole and section in reported) or old.get(key) == new.get(key):
      continue
    differences.append(f"{key} was {old.get(key)!r} and is {new.get(key)!r}")
    reported.add(section)
  return differences


def _changeable(config: RunSettings) -> set[str]:
  """Returns the keys that may change when a run is resumed."""
  entries = keys.of_config(config)
  free = [key for key, entry in entries.items() if entry.facts.may_change]
  return {key for key in entries for f in free if f"{key}.".startswith(f"{f}.")}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of a file without empty sections.

  Older versions wrote `{}` for a section that is left out; today `{}` means the
  section with its defaults.
  """
  return {
    name: _known(value) if isinstance(value, dict) else value
    for name, value in values.items()
    if value != {}
  }


def export_of(folder: str, adapter: str | None) -> tuple[str, str | None]:
  """Returns (model, adapter) of the export if `folder` is the folder of a run.

  Any other folder is returned with `adapter` as given.

  Raises:
    FileNotFoundError: the run has no export.
  """
  run = RunFolder(pathlib.Path(folder).expanduser())
  if not run.config_file.is_file() or (run.path / "config.json").is_file():
    return folder, adapter
  if (run.export / "config.json").is_file():
    return str(run.export), adapter
  source = run.read_config().model
  if objects.is_name(source.path):
    raise FileNotFoundError(
      f"{folder} is the folder of a run whose model was an object of a Python program. "
      f"Give the folder of that model, and {run.export} as the adapter"
    )
  if source.path is None or not (run.export / "adapter_config.json").is_file():
    raise FileNotFoundError(
      f"{folder} is a run's folder and has no export: `tunix export --run {folder} "
      "--to FOLDER` writes the model of a checkpoint"
    )
  base = source.path
  if source.revision is not None:
    base = str(automodel.resolve_folder(base, source.revision))
  return base, str(run.export) if adapter is None else adapter
