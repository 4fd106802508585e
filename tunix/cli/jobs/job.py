"""What a job of `tunix train` is: its settings, and the functions that run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tunix.cli import build_data
from tunix.cli.build_data import RunData
from tunix.cli.settings import RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One job.

  Attributes:
    settings: the dataclass of its keys.
    check: refuses settings, before anything is loaded.
    data: (config, tokenizer, earlier scans) -> the checked data.
    count_steps: (config, report of the training data) -> optimizer steps, or None.
    build: (config, model, tokenizer, optimizer, mesh=, output_dir=, learning_rate=) ->
      what trains, put back where its checkpoints stand.
    results: {name in the result: metric}, first and last value of which are told.
    batch: what a step computes, in words.
    length: (keys that make it up, most tokens of a row).
    notes: (config, data) -> further lines for the user.
  """

  settings: type[RunSettings]
  check: Callable[[Any], None] = lambda config: None
  data: Callable[..., RunData] = build_data.build_data
  count_steps: Callable[[Any, Any], int | None] = build_data.count_steps
  build: Callable[..., Any]
  results: Mapping[str, str]
  batch: Callable[[Any], str]
  length: Callable[[Any], tuple[str, int]]
  notes: Callable[[Any, RunData], list[str]] = lambda config, data: []
