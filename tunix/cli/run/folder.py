"""The folder of a run: what it was started with, whether it may go on, how it ended."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from tunix.cli import config as config_lib
from tunix.cli.build import build
from tunix.cli.settings import keys, yaml_text
from tunix.cli.settings.run import RunSettings
from tunix.models import automodel
from tunix.utils import io

# What may change between a run and its continuation: where things lie, how long and
# how often, how fast, what is written. All else changes what is computed.
FREE = (
  "output_dir",
  "compilation_cache",
  "data.train",  # the files are compared by content
  "data.eval",
  "model.path",
  "model.revision",
  "tokenizer.path",
  "tokenizer.chat_template",
  "data.scan_limit",
  "data.num_threads",
  "training.max_steps",
  "training.eval_batch_size",
  "training.eval_every_n_steps",
  "training.max_inflight_computations",
  "training.offload_optimizer",
  "model.remat",
  "model.scan_layers",
  "model.attention",
  "rl.reference",
  "rl.critic",
  "rl.rollout_micro_batch_size",
  "rl.offload_to_cpu",
  "reward.model",
  "preference.reference",
  "preference.reference_logps",
  "distill.teacher",
  "distill.cache",
  "reward.workers",
  "reward.timeout_s",
  "mesh",
)
FREE_SECTIONS = (
  "checkpoint",
  "logging",
  "export",
  "distributed",
  "samples",
  "training.best",
  "training.profiler_options",
  "training.perf_metrics_options",
)

# Fingerprints that must not change, and what they are of.
_CONTENTS = {
  "train": "the content of data.train",
  "eval": "the content of data.eval",
  "chat_template": "the content of the chat template",
  "tokenizer": "the tokenizer",
  "model": "the model in model.path",
  "reward_functions": "the source of reward.functions",
  "reference": "the reference model",
  "teacher": "the model in distill.teacher",
  "reward": "the model in reward.model",
  "critic": "the model in rl.critic",
}

_HEADER = (
  "# Every key of this run as it was used; pass it to --config to run the same.\n"
)


def check_writable(name: str, folder: pathlib.Path, *, is_read: bool = False) -> None:
  """Refuses a folder that is none, or that cannot be made or written; changes nothing.

  Args:
    name: of the setting, for the message.
    folder: is there, or is to be made.
    is_read: whether it may be there without being writable: it holds something.

  Raises:
    ValueError: says what stands in the way.
  """
  problem = None
  try:
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    is_open = os.access(nearest, os.W_OK | os.X_OK) or (is_read and nearest == folder)
    if not nearest.is_dir():
      problem = f"{nearest} is a file"
    elif not is_open:
      problem = f"{nearest} cannot be written"
  except OSError as error:  # a name that is too long
    problem = (error.strerror or str(error)).lower()
  if problem is not None:
    raise ValueError(
      f"{name} is {str(folder)!r}, and {problem}: name a folder that can be written"
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
    """SHA-256 of data, model, tokenizer and chat template."""
    return self.path / "data.json"

  @property
  def scan_file(self) -> pathlib.Path:
    """What the scan of the data found, so that a resumed run need not scan again."""
    return self.path / "scan.json"

  @property
  def about_file(self) -> pathlib.Path:
    """What the newest start was on (model, data, devices, versions), in words."""
    return self.path / "about.json"

  @property
  def result_file(self) -> pathlib.Path:
    """How the run ended; there only when it did."""
    return self.path / "result.json"

  @property
  def failure_file(self) -> pathlib.Path:
    """What ended the newest start, in its own words; there only when it failed."""
    return self.path / "failure.json"

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

  def read_config(self) -> RunSettings:
    """The settings that the run was started with.

    Raises:
      FileNotFoundError: the folder holds no run.
    """
    if not self.config_file.is_file():
      raise FileNotFoundError(
        f"{self.path} has no config.yaml: give the output_dir of a `tunix train`"
      )
    name = str(self.config_file)
    config = config_lib.from_layers([(name, _known(yaml_text.read_file(name)))])
    if config.lora is None or config.lora.modules_to_save is not None:
      return config
    # Written before there was such a key: only adapters were trained.
    bare = dataclasses.replace(config.lora, modules_to_save=())
    return dataclasses.replace(config, lora=bare)

  def start(
    self,
    config: RunSettings,
    fingerprints: Mapping[str, str],
    scans: Mapping[str, Any],
  ) -> None:
    """Records settings and data, each file whole; the run counts as not ended.

    Raises:
      OSError: the folder cannot be written.
    """
    io.write_atomic(self.config_file, (_HEADER + config_lib.dump(config)).encode())
    io.write_json(self.data_file, {"sha256": dict(fingerprints)})
    io.write_json(self.scan_file, dict(scans))
    self.result_file.unlink(missing_ok=True)
    self.failure_file.unlink(missing_ok=True)

  def scans(self) -> dict[str, Any]:
    """What `start` was given; empty when the file is missing or damaged, which costs
    a scan and nothing else."""
    try:
      return dict(json.loads(self.scan_file.read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
      return {}

  def check_resume(self, config: RunSettings, fingerprints: Mapping[str, str]) -> None:
    """Refuses to go on with other settings or data than the checkpoints were made with.

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
          f"{where}: its {file.name} is gone, so what it was started with cannot be "
          "compared; use another output_dir"
        )
    now = build.settle_lora(config)
    changed = _differences(self.read_config(), now) + self._other_data(fingerprints)
    if changed:
      raise ValueError(
        f"{where}: {'; '.join(changed)}. Use what the run was started with, or another "
        "output_dir"
      )

  def _other_data(self, fingerprints: Mapping[str, str]) -> list[str]:
    before = json.loads(self.data_file.read_text())["sha256"]
    # Evaluation may be added or left out on the way; a model may be one from scratch.
    both = before.keys() & fingerprints.keys()
    return [
      f"{what} is another"
      for name, what in _CONTENTS.items()
      if name in both and before[name] != fingerprints[name]
    ]

  def result(self, config: RunSettings) -> dict[str, Any] | None:
    """How the run ended, if it did under exactly these settings."""
    if not self.result_file.is_file() or not self.steps():
      return None
    same = _shared(self.read_config()) == _shared(build.settle_lora(config))
    return json.loads(self.result_file.read_text()) if same else None

  def write_result(self, result: dict[str, Any]) -> None:
    """Marks the run as ended."""
    io.write_json(self.result_file, result)


def _shared(config: RunSettings) -> dict[str, Any]:
  """The settings that all processes of a run have. The revision is left to the model's
  fingerprint: a branch of the hub moves on where no weight changes."""
  flat = keys.flatten(config)
  return {
    key: value
    for key, value in flat.items()
    if not key.startswith("distributed") and key != "model.revision"
  }


def _differences(before: RunSettings, now: RunSettings) -> list[str]:
  old, new = keys.flatten(before), keys.flatten(now)
  return [
    f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
    for key in _fixed(old, new)
    if old.get(key) != new.get(key)
  ]


def _fixed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """The keys to compare. Where one side lacks a section (lora), its first key says so
  for all of them."""
  known = list(dict.fromkeys((*new, *old)))
  fixed = [
    key
    for key in known
    if key not in FREE
    and not f"{key}.".startswith(tuple(f"{s}." for s in FREE_SECTIONS))
  ]
  compared: list[str] = []
  for key in fixed:
    section = key.rpartition(".")[0]
    whole = section and (section in old or section in new)
    if any(other.startswith(f"{key}.") for other in fixed):
      continue  # null on one side, a section on the other
    if not whole or not any(f.rpartition(".")[0] == section for f in compared):
      compared.append(key)
  return compared


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
  """Settings of a file without the empty sections in it: those that are left out were
  once written so, and `{}` asks for a section's defaults now."""
  return {
    name: _known(value) if isinstance(value, dict) else value
    for name, value in values.items()
    if value != {}
  }


def export_of(folder: str, adapter: str | None) -> tuple[str, str | None]:
  """(model, adapter): those of the export where `folder` is that of a run.

  Raises:
    FileNotFoundError: the run has exported nothing.
  """
  run = RunFolder(pathlib.Path(folder).expanduser())
  if not run.config_file.is_file() or (run.path / "config.json").is_file():
    return folder, adapter
  if (run.export / "config.json").is_file():
    return str(run.export), adapter
  source = run.read_config().model
  if source.path is None or not (run.export / "adapter_config.json").is_file():
    raise FileNotFoundError(
      f"{folder} is a run's folder and has no export: `tunix export --run {folder} "
      "--to FOLDER` writes the model of a checkpoint"
    )
  base = source.path
  if source.revision is not None:
    base = str(automodel.resolve_folder(base, source.revision))
  return base, str(run.export) if adapter is None else adapter
