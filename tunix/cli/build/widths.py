"""Chooses the widths of rows for a run."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from tunix.cli.settings.run import RunSettings, StreamRun
from tunix.data import widths
from tunix.data.scan import Report, scan
from tunix.data.source import Source
from tunix.data.widths import Widths


def choose(
  config: RunSettings, source: Source, report: Report | None, *, training: bool
) -> Widths | None:
  """Returns the widths of rows; None if the settings decide them.

  Args:
    config: settings of the run.
    source: records and their settings.
    report: report of the records' scan; None scans them here.
    training: True for training, False for evaluation.
  """
  if not isinstance(config, StreamRun) or config.pad_to != "longest":
    return None
  report = scan(source, config.data.scan_limit) if report is None else report
  sizes = config.training
  rows = sizes.global_batch_size if training else sizes.eval_rows
  return widths.choose(source.layout, report, rows, _shards(config.mesh))


def _shards(mesh: Mapping[str, int]) -> int:
  """Returns a number of shards that the tokens of a row must divide over."""
  shards = mesh.get("cp", 1)
  # -1 is one of the divisors of the number of devices.
  return jax.device_count() if shards == -1 else shards
