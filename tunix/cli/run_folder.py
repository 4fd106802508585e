"""The folder of a run: what it was started with, whether it may go on, how it ended."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

from tunix.cli import config as config_lib
from tunix.cli.schema import Config
from tunix.utils import io

# What may change between a run and its continuation: where things lie, how long and
# how often, how fast, what is written. All else changes what is computed.
FREE = (
  "output_dir",
  "compilation_cache",
  "data.train",  # compared by content
  "data.eval",
  "data.scan_limit",
  "data.num_threads",
  "training.max_steps",
  "training.eval_batch_size",
  "training.eval_every_n_steps",
  "model.remat",
  "model.scan_layers",
  "mesh",
)
FREE_SECTIONS = ("checkpoint", "logging", "export")

_HEADER = (
  "# Every key of this run as it was used; pass it to --config to run the same.\n"
)


@dataclasses.dataclass(frozen=True)
class RunFolder:
  """Names and contents of an output folder.

  Attributes:
    path: the folder.
  """

  path: pathlib.Path

  @property
  def config_file(self) -> pathlib.Path:
    """The settings, resolved."""
    return self.path / "config.yaml"

  @property
  def data_file(self) -> pathlib.Path:
    """SHA-256 of the data and of the chat template."""
    return self.path / "data.json"

  @property
  def result_file(self) -> pathlib.Path:
    """How the run ended; there only when it did."""
    return self.path / "result.json"

  @property
  def checkpoints(self) -> pathlib.Path:
    """The checkpoints' folder."""
    return self.path / "checkpoints"

  @property
  def export(self) -> pathlib.Path:
    """The exported model's folder."""
    return self.path / "export"

  def steps(self) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    if not self.checkpoints.is_dir():
      return []
    names = [file.name for file in self.checkpoints.iterdir() if file.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch(r"\d+", name))

  def read_config(self) -> Config:
    """The settings that the run was started with.

    Raises:
      FileNotFoundError: the folder holds no run.
    """
    if not self.config_file.is_file():
      raise FileNotFoundError(
        f"{self.path} has no config.yaml: give the output_dir of a `tunix train`"
      )
    name = str(self.config_file)
    return config_lib.from_layers([(name, config_lib.read_file(name))])

  def start(self, config: Config, fingerprints: dict[str, str]) -> None:
    """Records settings and data, each file whole; the run counts as not ended.

    Raises:
      OSError: the folder cannot be written.
    """
    io.write_atomic(self.config_file, (_HEADER + config_lib.dump(config)).encode())
    io.write_json(self.data_file, {"sha256": fingerprints})
    self.result_file.unlink(missing_ok=True)

  def check_resume(self, config: Config, fingerprints: dict[str, str]) -> None:
    """Refuses to go on with other settings or data than the checkpoints were made with.

    Raises:
      ValueError: names every key that differs, with both values.
    """
    steps = self.steps()
    if not steps:
      return
    where = f"cannot resume {self.path} at step {steps[-1]}"
    if not self.config_file.is_file():
      raise ValueError(
        f"{where}: its config.yaml is gone, so its settings cannot be compared; use "
        "another output_dir"
      )
    changed = _differences(self.read_config(), config) + self._other_data(fingerprints)
    if changed:
      raise ValueError(
        f"{where}: {'; '.join(changed)}. Use what the run was started with, or another "
        "output_dir"
      )

  def _other_data(self, fingerprints: dict[str, str]) -> list[str]:
    if not self.data_file.is_file():
      return []
    before = json.loads(self.data_file.read_text())["sha256"]
    names = {"train": "data.train", "chat_template": "the chat template"}
    return [
      f"the content of {what} is another"
      for name, what in names.items()
      if before.get(name) != fingerprints[name]
    ]

  def result(self, config: Config) -> dict[str, Any] | None:
    """How the run ended, if it did under exactly these settings."""
    if not self.result_file.is_file() or not self.steps():
      return None
    same = self.read_config() == config
    return json.loads(self.result_file.read_text()) if same else None

  def write_result(self, result: dict[str, Any]) -> None:
    """Marks the run as ended."""
    io.write_json(self.result_file, result)


def _differences(before: Config, now: Config) -> list[str]:
  old, new = config_lib.flatten(before), config_lib.flatten(now)
  fixed = [
    key for key in new if key not in FREE and key.split(".")[0] not in FREE_SECTIONS
  ]
  return [
    f"{key} was {old[key]!r} and is {new[key]!r}"
    for key in fixed
    if old[key] != new[key]
  ]
