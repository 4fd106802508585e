"""Chooses the widths of rows for a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from tunix.cli.settings import mesh as mesh_axes
from tunix.data import widths
from tunix.data.records import ANSWERED, PROMPT_ROWS, PROMPTS
from tunix.data.rows import SideBySide
from tunix.data.scan import Report, scan
from tunix.data.source import Source
from tunix.data.widths import Widths


def choose(
  config: Any, source: Source, report: Report | None, *, training: bool
) -> Widths | None:
  """Returns the widths of rows; None if the settings decide them.

  Args:
    config: settings of the run, of the class of its job.
    source: records and their settings.
    report: report of the records' scan; None scans them here.
    training: True for training, False for evaluation.
  """
  if config.pad_to == "max_length":
    return None
  if report is None:
    report = scan(source, getattr(config.data, "scan_limit", None))
  shards = _shards(config.mesh)
  if source.kind.name in (PROMPT_ROWS.name, PROMPTS.name, ANSWERED.name):
    # The model writes the completions, whose lengths no scan sees.
    layout: Any = source.layout
    limits = SideBySide(
      max_prompt_length=layout.max_prompt_length,
      max_completion_length=config.rollout.max_tokens_to_generate,
      max_teacher_prompt_length=getattr(layout, "max_teacher_prompt_length", None),
    )
    names = [name for name in report.lengths if "prompt" in name]
    lengths = {name: report.lengths[name] for name in names}
    prompts = dataclasses.replace(report, lengths=lengths)
    return Widths(layout=widths.bounded(limits, prompts, shards))
  sizes, layout = config.training, source.layout
  rows, batches = sizes.eval_rows, 1
  if training:
    rows, batches = sizes.micro_rows, sizes.micro_batches
  if config.shares_rows and not source.has_images:
    row_unit = mesh_axes.data_shards(config.mesh)
    shared_prompt = getattr(getattr(config, "preference", None), "shared_prompt", False)
    once = shared_prompt is None and jax.default_backend() == "cpu"
    once = once and not config.model.batch_invariant  # which computes each prompt again
    return widths.share(layout, report, rows, batches, shards, row_unit, once)
  return widths.choose(layout, report, rows * batches, shards)


def _shards(mesh: Mapping[str, int]) -> int:
  """Returns a number of shards that the tokens of a row must divide over."""
  shards = mesh.get("cp", 1)
  # -1 is one of the divisors of the number of devices.
  return jax.device_count() if shards == -1 else shards
