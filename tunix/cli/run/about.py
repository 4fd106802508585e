"""Describes a run: lines for the user before it starts, and JSON for its page."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

import tunix
from tunix.cli.jobs.table import JOBS
from tunix.cli.make.export import describe_precision
from tunix.cli.run.prepare import Prepared
from tunix.cli.settings import rates
from tunix.models import lora
from tunix.models.transformer.model import Transformer
from tunix.utils import terminal

_FACTOR = 10  # beyond the usual rates from which on a rate is noted
_LEAST_PARAMETERS = 10**8  # of models that the usual rates are for
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe_run(
  run: Prepared, model: Transformer, *, is_dry: bool = False, keeps: bool = True
) -> str:
  """Describes model, data, steps and devices, for the user to check.

  Args:
    run: the prepared run.
    model: the model, or its shapes.
    is_dry: True if nothing is trained or written.
    keeps: False if the run writes nothing that stays.
  """
  config, data = run.config, run.data
  steps = "until the data ends"
  if data.num_steps is not None:
    steps = terminal.counted(data.num_steps, "step")
  lines = [
    _model(run, model),
    *(f"{name} data: {report}" for name, report in data.reports.items()),
    f"{JOBS[config.job].batch(config)}; {steps}",
    *(f"{name} rows: {widths}" for name, widths in data.widths.items()),
    _devices(run),
    f"everything {'would be' if is_dry else 'is'} written to {config.output_dir}"
    if keeps
    else "nothing is written: no output_dir is given",
    *(f"note: {note}" for note in notes(run, model)),
  ]
  return "\n".join(lines)


def notes(run: Prepared, model: Transformer) -> list[str]:
  """Returns notes about the settings and the data; see `describe_run`."""
  config = run.config
  return [*_unusual(run, model), *JOBS[config.job].notes(config, run.data)]


def _unusual(run: Prepared, model: Transformer) -> Iterator[str]:
  """Yields notes about values that are possible and rarely meant."""
  config, report = run.config, run.data.reports["train"]
  rate, rows = config.training.learning_rate, config.training.global_batch_size
  usual = rates.rate_of(config)
  assert isinstance(rate, float | int)
  is_usual = usual.low / _FACTOR <= rate <= usual.high * _FACTOR
  if not is_usual and (rate > 1 or _size(model) >= _LEAST_PARAMETERS):
    kind = "all weights" if config.lora is None else "adapters"
    yield (
      f"training.learning_rate is {rate:g}; expected for {kind} in the job "
      f"{config.job}: {usual}"
    )
  if config.lora is not None and config.lora.rank > model.config.embed_dim:
    yield (
      f"lora.rank is {config.lora.rank}, above the {model.config.embed_dim} "
      "dimensions of the hidden states (embed_dim); a higher rank adds memory only"
    )
  size = report.kept if report.is_whole else report.records
  if size is not None and rows > size:
    yield (
      f"training.global_batch_size is {rows}, and the train data has only "
      f"{terminal.counted(size, 'record')}; lower it to take several steps in each "
      "epoch"
    )
  if report.blank:
    yield (
      f"the train data has {terminal.counted(report.blank, 'record')} with an empty "
      "answer, of which only the end is trained. Remove records with empty answers"
    )
  if report.unknown:
    yield (
      f"the train data has {terminal.counted(report.unknown, 'token')} for text that "
      "the tokenizer does not know; the model cannot read or write this text. `tunix "
      "data show` shows the tokens. Use another model, or set tokenizer.path if it is "
      "wrong"
    )
  positions, (key, length) = model.config.max_position, run.row_length
  if positions is not None and length > positions:
    yield (
      f"a row of {length} tokens ({key}) is beyond the {positions} positions that the "
      "model was made for"
    )


def as_json(run: Prepared, model: Transformer) -> dict[str, Any]:
  """Describes model, data, devices and versions as JSON types, for the run's page."""
  kinds = sorted({device.device_kind for device in jax.devices()})
  used = 1 if run.mesh is None else run.mesh.size
  used += 0 if run.rollout_mesh is None else run.rollout_mesh.size
  axes = {} if run.mesh is None else run.mesh.shape
  versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
  return {
    "data": {name: str(report) for name, report in run.data.reports.items()},
    "model": _model(run, model),
    "step": JOBS[run.config.job].batch(run.config),
    "devices": f"{used} of {jax.device_count()}, {', '.join(kinds)}",
    "mesh": {str(axis): size for axis, size in axes.items()},
    "processes": jax.process_count(),
    "tunix": tunix.__version__,
    "python": platform.python_version(),
    "packages": ", ".join(versions),
    "machine": platform.platform(),
  }


def _model(run: Prepared, model: Transformer) -> str:
  if run.config.lora is not None:
    parameters = f"LoRA on:\n{lora.describe(model)}"
  else:
    total = _size(model)
    parameters = f"trainable {total:,} of {total:,} parameters"
  return f"{parameters}\n{describe_precision(run.config, model)}"


def _size(model: Transformer) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def _axes(mesh: Mesh) -> str:
  return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def _devices(run: Prepared) -> str:
  kind, count = jax.devices()[0].platform, jax.device_count()
  if run.mesh is not None:
    meshes = (
      _axes(run.mesh),
      run.rollout_mesh and f"{_axes(run.rollout_mesh)} samples",
    )
    return f"devices: {count} {kind} ({'; '.join(filter(None, meshes))})"
  unused = f"; idle: {count - 1}, `mesh` spreads the run" if count > 1 else ""
  return f"devices: 1 {kind}{unused}"
