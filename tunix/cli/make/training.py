"""Builds the settings of a trainer and its metrics from a configuration."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from tunix.cli.settings import keys, mesh as mesh_axes
from tunix.cli.settings.run import RunSettings
from tunix.cli.settings.training import MicroBatchSettings
from tunix.perf.metrics import PerfMetricsOptions
from tunix.sft import metrics_logger as metrics
from tunix.sft.config import Schedule, TrainingConfig
from tunix.utils.setting import shared_values


def training_options(
  config: RunSettings, output_dir: pathlib.Path | None, learning_rate: float | Schedule
) -> dict[str, Any]:
  """Returns the fields of a TrainingConfig.

  They are the keys of the section `training`, and the fields that follow from other
  keys.

  Args:
    config: settings of the run.
    output_dir: folder of the run; None: nothing is written.
    learning_rate: rate or schedule, for the metric of that name.
  """
  training, accumulation = config.training, None
  if isinstance(training, MicroBatchSettings):
    accumulation = training.micro_batches
  return shared_values(TrainingConfig, training) | {
    "gradient_accumulation_steps": accumulation,
    "checkpoint_root_directory": output_dir and str(output_dir / "checkpoints"),
    "checkpointing_options": config.checkpoint,
    "perf_metrics_options": output_dir and _perf_options(config, output_dir),
    "data_sharding_axis": mesh_axes.data_axes(config.mesh),
    "pbar_description": "training" if config.logging.progress_bar else None,
    "learning_rate": learning_rate,
  }


def _perf_options(
  config: RunSettings, output_dir: pathlib.Path
) -> PerfMetricsOptions | None:
  """Returns the trace options; the default folder is the folder of the metrics."""
  options = config.training.perf_metrics_options
  if options is None or options.trace_dir:
    return options
  return dataclasses.replace(options, trace_dir=str(output_dir / "logs"))


def build_logger(
  config: RunSettings, output_dir: pathlib.Path | None
) -> metrics.MetricsLogger:
  """Builds the logger of the run, which writes to `output_dir/logs` if it is given."""
  logger = metrics.MetricsLogger(logging_options(config, output_dir))
  if output_dir is not None:
    logger.log_config(keys.flatten(config))
  return logger


def logging_options(
  config: RunSettings, output_dir: pathlib.Path | None
) -> metrics.MetricsLoggerOptions | None:
  """Returns the backends of the run's metrics; None without a folder."""
  if output_dir is None:
    return None
  section = config.logging
  return metrics.MetricsLoggerOptions(
    output_dir / "logs",
    project_name=section.project_name,
    run_name=section.run_name,
    # A backend's key has the backend's name; JSON lines are always written.
    backends={name: getattr(section, name, None) for name in metrics.BACKENDS},
  )
