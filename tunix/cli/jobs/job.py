"""What a job of `tunix train` is: its settings, and the functions that run it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh

from tunix.cli.build import build, data as build_data
from tunix.cli.build.data import RunData
from tunix.cli.settings.run import RunSettings
from tunix.data.records import Kind
from tunix.models.transformer.model import Transformer
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.config import Schedule
from tunix.sft.metrics_logger import MetricsLogger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
  """A run whose model is loaded: what its trainer is made of.

  Attributes:
    config: settled; of the class that the job has.
    model: what is trained.
    tokenizer: of all models, a TokenizerAdapter; in a plan one that knows no text.
    optimizer: the model's.
    mesh: of all models; None: one device.
    output_dir: of the run; None: nothing is written (a plan).
    learning_rate: for the metric of that name.
    of_shapes: the model is one of shapes, and so are all others (a plan).
  """

  config: Any
  model: Transformer
  tokenizer: Any = None
  optimizer: optax.GradientTransformation
  mesh: Mesh | None
  output_dir: pathlib.Path | None
  learning_rate: float | Schedule
  of_shapes: bool = False

  def training_options(self) -> dict[str, Any]:
    """The arguments of a TrainingConfig."""
    return build.training_options(self.config, self.output_dir, self.learning_rate)

  def logger(self) -> MetricsLogger:
    """The metrics of the run."""
    return build.build_logger(self.config, self.output_dir)

  def reference(self, path: str | None) -> Any:
    """What the model is compared with, see `build.build_reference`."""
    return build.build_reference(self.config, path, self.mesh, of_shapes=self.of_shapes)

  def scores(self, path: str, **dtypes: Any) -> Any:
    """A critic or reward model of a folder: one score a position."""
    return build.load(path, self.mesh, of_shapes=self.of_shapes, num_scores=1, **dtypes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One job of `tunix train`.

  Attributes:
    summary: what the job trains, as a phrase for help texts.
    records: kinds of record that the job trains on.
    first_values: {key: value} that a person sets first, with values to start from, for
      `tunix init`. Keys that every job has are in `tunix.cli.commands.init`.
    settings: the dataclass of its keys.
    check: refuses settings, before anything is loaded.
    data: (config, tokenizer, earlier scans) -> the checked data.
    count_steps: (config, report of the training data) -> optimizer steps, or None.
    build: what trains, put back where its checkpoints stand. Raises FileNotFoundError,
      ImportError or ValueError for models and functions that do not fit.
    results: {name in the result: metric}, first and last value of which are told.
    batch: what a step computes, in words.
    length: (keys that make it up, most tokens of a row).
    rollout: how the model that is trained writes rows itself; None: it writes none.
    notes: (config, data) -> further lines for the user.
    example: config -> a global batch as large as the data may give one, for
      `tunix plan`.
    shorter: config -> batches of prompts so short that rollouts are of another shape,
      one for each shape, for `tunix plan --ship`.
    sequences: config -> sequences of a step.
  """

  summary: str
  records: tuple[Kind, ...]
  first_values: Mapping[str, Any]
  settings: type[RunSettings]
  check: Callable[[Any], None] = lambda config: None
  data: Callable[..., RunData] = build_data.build_data
  count_steps: Callable[[Any, Any], int | None] = build_data.count_steps
  build: Callable[[Loaded], Any]
  results: Mapping[str, str]
  batch: Callable[[Any], str]
  length: Callable[[Any], tuple[str, int]]
  rollout: Callable[[Any], RolloutConfig | None] = lambda config: None
  notes: Callable[[Any, RunData], list[str]] = lambda config, data: []
  example: Callable[[Any], Any]
  shorter: Callable[[Any], list[Any]] = lambda config: []
  sequences: Callable[[Any], int] = lambda config: config.training.global_batch_size


def length_of(section: str, *names: str) -> Callable[[Any], tuple[str, int]]:
  """`Job.length` where a row is as long as these keys of a section say together."""

  def length(config: Any) -> tuple[str, int]:
    limits = getattr(config, section)
    return f"{section}.{' + '.join(names)}", sum(getattr(limits, n) for n in names)

  return length
