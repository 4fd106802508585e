"""A job of `tunix train`: its settings, and the functions that run it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh

from tunix.cli.make import data as build_data, training
from tunix.cli.make.data import RunData
from tunix.cli.make.loading import ModelLoader
from tunix.cli.settings.run import RunSettings
from tunix.data.images import ImageReader
from tunix.data.records import Kind
from tunix.models.transformer.model import Transformer
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.config import Schedule
from tunix.sft.metrics_logger import MetricsLogger
from tunix.utils.setting import named_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
  """A run with its model loaded: everything that its trainer is built from.

  Attributes:
    config: settled settings, of the class of the job.
    model: the model that is trained.
    tokenizer: tokenizer of all models; in a plan one without a vocabulary.
    optimizer: optimizer of the model.
    mesh: mesh of all models; None: one device.
    rollout_mesh: mesh of devices that only sample; None: those of `mesh` do.
    output_dir: folder of the run; None: nothing is written (a plan, or a call from
      Python without a folder).
    learning_rate: rate or schedule, for the metric of that name.
    images: reads the images of the records; None: no record has one.
    of_shapes: if True, all models are shapes without weights (a plan).
  """

  config: Any
  model: Transformer
  tokenizer: Any = None
  optimizer: optax.GradientTransformation
  mesh: Mesh | None
  output_dir: pathlib.Path | None
  learning_rate: float | Schedule
  rollout_mesh: Mesh | None = None
  images: ImageReader | None = None
  of_shapes: bool = False

  def training_options(self) -> dict[str, Any]:
    """Returns the fields of a TrainingConfig."""
    return training.training_options(self.config, self.output_dir, self.learning_rate)

  def logger(self) -> MetricsLogger:
    """Builds the logger of the run."""
    return training.build_logger(self.config, self.output_dir)

  @property
  def models(self) -> ModelLoader:
    """The loader of further models: a reference, a teacher, a critic."""
    return ModelLoader(self.config, self.mesh, self.of_shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One job of `tunix train`.

  Attributes:
    summary: what the job trains, as a phrase for help texts.
    records: kinds of record that the job trains on.
    first_values: {key: value} that a person sets first, with values to start from, for
      `tunix init`. Keys that every job has are in `tunix.cli.commands.init`.
    settings: dataclass of the job's keys.
    check: function that refuses settings before anything is loaded.
    data: function from (config, tokenizer, earlier scans) to the checked data.
    build: function that builds the trainer and restores its checkpoint. It raises
      FileNotFoundError, ImportError or ValueError for models and functions that do not
      fit.
    results: {name in result.json: metric} of the metrics whose first and last values
      are reported.
    batch: function that describes the batch of a step in words.
    length: function that returns (keys of a row's length, most tokens of a row).
    rollout: function that returns the sampling settings of rows that the trained model
      writes; None if it writes none.
    notes: function from (config, data) to notes for the user.
    example: function that returns a global batch of the largest shapes, for
      `tunix plan`.
    shorter: function that returns one batch for each shape of rollout that shorter
      prompts have, for `tunix plan --ship`.
    sequences: function that returns the sequences of a step.
  """

  summary: str
  records: tuple[Kind, ...]
  first_values: Mapping[str, Any]
  settings: type[RunSettings]
  check: Callable[[Any], None] = lambda config: None
  data: Callable[..., RunData] = build_data.build_data
  build: Callable[[Loaded], Any]
  results: Mapping[str, str]
  batch: Callable[[Any], str]
  length: Callable[[Any], tuple[str, int]]
  rollout: Callable[[Any], RolloutConfig | None] = lambda config: None
  notes: Callable[[Any, RunData], list[str]] = lambda config, data: []
  example: Callable[[Any], Any]
  shorter: Callable[[Any], list[Any]] = lambda config: []
  sequences: Callable[[Any], int] = lambda config: config.training.global_batch_size


def micro_batches(config: RunSettings) -> str:
  """Describes the parts of a global batch; "" if it is computed at once."""
  count = config.training.micro_batches
  return "" if count == 1 else f", in {count} micro-batches"


def length_of(section: str, *names: str) -> Callable[[Any], tuple[str, int]]:
  """Returns a `Job.length` that adds up these keys of a section."""

  def length(config: RunSettings) -> tuple[str, int]:
    limits = named_values(getattr(config, section), names)
    return f"{section}.{' + '.join(names)}", sum(limits.values())

  return length
