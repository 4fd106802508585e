"""From a configuration to checked records and batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import jax

from tunix.cli.schema import Config
from tunix.data import pipeline
from tunix.data.formats import JsonlRecords
from tunix.data.scan import Report, scan
from tunix.generate.tokenizer_adapter import TokenizerAdapter


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
  """What a run trains and evaluates on.

  Attributes:
    train: yields micro-batches.
    eval: yields batches, anew for every evaluation; None: there is no evaluation.
    reports: what the scan of "train" and "eval" found.
    fingerprints: SHA-256 of the files and of the chat template.
    num_steps: optimizer steps until the run ends; None: not known beforehand.
  """

  train: Iterable[Any]
  eval: Iterable[Any] | None
  reports: dict[str, Report]
  fingerprints: dict[str, str]
  num_steps: int | None


def open_records(config: Config) -> dict[str, JsonlRecords]:
  """The files of `data.train` and `data.eval`, with the structure of every record
  checked.

  Raises:
    FileNotFoundError: no such file.
    ValueError: no file was named, it is empty, or a record is wrong (names its line).
  """
  if config.data.train is None:
    raise ValueError("data.train is not set: give a file of JSON lines")
  files = {"train": config.data.train, "eval": config.data.eval}
  records = {
    name: JsonlRecords(file) for name, file in files.items() if file is not None
  }
  for part in records.values():
    part.validate()
  return records


def scan_records(
  config: Config, tokenizer: TokenizerAdapter, records: dict[str, JsonlRecords]
) -> dict[str, Report]:
  """Renders and tokenises the records, as far as `data.scan_limit` asks for.

  Raises:
    ValueError: a record cannot be trained on (its line is named).
  """
  keys = config.data
  return {
    name: scan(
      part,
      tokenizer,
      max_length=keys.max_length,
      overlong=keys.overlong,
      chat=keys.chat,
      template_kwargs=keys.template_args,
      limit=keys.scan_limit,
    )
    for name, part in records.items()
  }


def build_data(config: Config, tokenizer: TokenizerAdapter) -> RunData:
  """Opens, checks and scans the records, and makes batches of them.

  Raises:
    FileNotFoundError, ValueError: see `open_records` and `scan_records`.
  """
  records = open_records(config)
  reports = scan_records(config, tokenizer, records)
  held_out = None
  if "eval" in records:
    held_out = batches(config, tokenizer, records["eval"], training=False)
  return RunData(
    train=batches(config, tokenizer, records["train"], training=True),
    eval=held_out,
    reports=reports,
    fingerprints={
      **{name: part.fingerprint for name, part in records.items()},
      "chat_template": _digest(tokenizer.chat_template),
    },
    num_steps=count_steps(config, reports["train"]),
  )


def batches(
  config: Config, tokenizer: TokenizerAdapter, records: JsonlRecords, *, training: bool
) -> Iterable[Any]:
  """Micro-batches for training (shuffled, for all epochs) or evaluation (once)."""
  keys = config.data
  return pipeline.build_dataset(
    records,
    tokenizer,
    batch_size=config.training.micro_rows if training else config.training.eval_rows,
    max_length=keys.max_length,
    packing=keys.packing,
    shuffle=keys.shuffle and training,
    seed=config.seed,
    num_epochs=epochs(config) if training else 1,
    overlong=keys.overlong,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
    chat=keys.chat,
    template_kwargs=keys.template_args,
    num_threads=keys.num_threads,
  )


def settle(config: Config) -> Config:
  """The configuration with the number of epochs written out."""
  data = dataclasses.replace(config.data, num_epochs=epochs(config))
  return dataclasses.replace(config, data=data)


def _digest(value: Any) -> str:
  return hashlib.sha256(repr(value).encode()).hexdigest()


def epochs(config: Config) -> int | None:
  """Passes over the data; None: as many as `training.max_steps` needs."""
  if config.data.num_epochs is None and config.training.max_steps is None:
    return 1
  return config.data.num_epochs


def count_steps(config: Config, report: Report) -> int | None:
  """Optimizer steps of a run; None when packing or an incomplete scan hides them."""
  limit, passes = config.training.max_steps, epochs(config)
  if passes is None:
    return limit
  countable = report.scanned == report.records or config.data.overlong != "drop"
  if config.data.packing or not countable:
    return limit
  kept = report.kept if report.scanned == report.records else report.records
  # Both divisions round up: the last batch and the last step may be smaller.
  micro_batches = -(-kept * passes // config.training.micro_rows)
  steps = -(-micro_batches // config.training.micro_batches)
  return steps if limit is None else min(steps, limit)
