"""From a configuration to checked records and batches."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tunix
from tunix.cli.build import data_sources, mesh as mesh_axes
from tunix.cli.run import fingerprints
from tunix.cli.settings.data import RowSettings
from tunix.cli.settings.run import RunSettings, StreamRun
from tunix.data import mixture, pipeline
from tunix.data.records import SFT, Kind
from tunix.data.rows import OneRow, SideBySide
from tunix.data.scan import Report, scan
from tunix.data.source import Source
from tunix.data.stored import Records
from tunix.generate.tokenizer_adapter import TokenizerAdapter


def _row_settings(config: StreamRun, kind: Kind) -> dict[str, Any]:
  """What the data layer is told of rows, by its own names."""
  return {n: operator.attrgetter(k)(config) for n, k in config.row_keys(kind).items()}


def _source(config: StreamRun, tokenizer: TokenizerAdapter, records: Records) -> Source:
  kind, data = records.kind, config.data
  settings = _row_settings(config, kind)
  more = {n: settings.pop(n) for n in ("unusable",) if n in settings}
  return Source(
    records=records,
    kind=kind,
    tokenizer=tokenizer,
    layout=OneRow(**settings) if kind is SFT else SideBySide(**settings),
    overlong=data.overlong,
    chat=data.chat,
    template_kwargs=data.template_args,
    **more,
  )


@contextlib.contextmanager
def naming(keys: Mapping[str, str]) -> Iterator[None]:
  """What the data layer says of its arguments, said of the keys that they come from.

  Args:
    keys: argument -> key, besides those of the section `data`.
  """
  names = {"overlong": "data.overlong", "chat": "data.chat", **keys}
  try:
    yield
  except ValueError as error:
    words = "|".join(names)
    pattern = rf"(?<![\w.])(?:{words})(?= is | \d|: | to )"
    text = str(error)
    text = text.replace(
      "give one with chat_template=...",
      "give a file of one with tokenizer.chat_template",
    )
    if "unusable" not in keys:  # no key of this job asks for that
      text = text.replace(', or set unusable to "drop"', "")
    text = re.sub(pattern, lambda match: names[match[0]], text)
    raise ValueError(text) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
  """What a run trains and evaluates on.

  Attributes:
    train: yields micro-batches.
    eval: yields batches, anew for every evaluation; None: there is no evaluation.
    reports: what the scan of "train" and "eval" found, see `tunix.data.scan`.
    scans: reports as JSON, each with the key of what it depends on.
    fingerprints: SHA-256 of files, tokenizer, chat template and base model.
    num_steps: optimizer steps until the run ends; None: not known beforehand.
  """

  train: Iterable[Any]
  eval: Iterable[Any] | None
  reports: dict[str, Any]
  scans: dict[str, dict[str, Any]]
  fingerprints: dict[str, str]
  num_steps: int | None


def open_records(config: StreamRun) -> dict[str, Records]:
  """What `data.train` and `data.eval` name, opened and not checked yet.

  Raises:
    ValueError: nothing was named.
    FileNotFoundError, ImportError, ValueError, TypeError, RuntimeError: see
      `data_sources.open_records`.
  """
  return {
    name: data_sources.open_records(
      names, config.kind(training=name == "train"), how, config.data.columns
    )
    for name, names, how in config.data.sources()
  }


def scan_records(
  config: StreamRun, tokenizer: TokenizerAdapter, records: dict[str, Records]
) -> dict[str, Any]:
  """Checks the structure of every record, then renders and tokenises them, as far as
  `data.scan_limit` asks for.

  Raises:
    ValueError: a record is wrong or cannot be trained on (its line is named).
  """
  for part in records.values():
    part.validate()
  reports = {}
  for name, part in records.items():
    with naming(config.row_keys(part.kind)):
      source = _source(config, tokenizer, part)
      reports[name] = scan(source, config.data.scan_limit)
  return reports


def build_data(
  config: StreamRun, tokenizer: TokenizerAdapter, known: Mapping[str, Any] | None = None
) -> RunData:
  """Opens, checks and scans the records, and makes batches of them.

  Args:
    config: of the run.
    tokenizer: of the run.
    known: `RunData.scans` of an earlier start; what they cover is not scanned again.

  Raises:
    FileNotFoundError, ValueError: see `open_records` and `scan_records`.
  """
  records = open_records(config)
  prints = fingerprints.of_inputs(config, tokenizer, records)
  keys = {name: _scan_key(config, part, prints) for name, part in records.items()}
  reports = _known_reports(known or {}, keys)
  rest = {name: part for name, part in records.items() if name not in reports}
  reports |= scan_records(config, tokenizer, rest)
  reports = {name: reports[name] for name in records}
  held_out = None
  if "eval" in records:
    held_out = batches(config, tokenizer, records["eval"], training=False)
  return RunData(
    train=batches(config, tokenizer, records["train"], training=True),
    eval=held_out,
    reports=reports,
    scans={
      name: {"key": keys[name], "report": dataclasses.asdict(report)}
      for name, report in reports.items()
    },
    fingerprints=prints | fingerprints.of_base(config),
    num_steps=count_steps(config, reports["train"]),
  )


def _scan_key(config: StreamRun, part: Records, prints: Mapping[str, str]) -> str:
  """A digest of all that a scan's report depends on."""
  source = config.data
  fields = [field.name for field in dataclasses.fields(Report)]
  form = (tunix.__version__, part.kind.name, part.kind.expected, fields)
  inputs = (part.fingerprint, prints["tokenizer"], prints["chat_template"])
  place = part.name  # the report names its longest record by it
  settings = list(_row_settings(config, part.kind).values())
  limits = (settings, source.overlong, source.chat, source.template_args)
  if isinstance(part, mixture.Mixture):
    limits = (*limits, part.weights)
  return fingerprints.digest((form, inputs, place, limits, source.scan_limit))


def _known_reports(known: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
  return {
    name: Report(**known[name]["report"])
    for name, key in keys.items()
    if name in known and known[name]["key"] == key
  }


def batches(
  config: StreamRun,
  tokenizer: TokenizerAdapter,
  records: Records,
  *,
  training: bool,
  whole: bool = False,
) -> Iterable[Any]:
  """Micro-batches for training (shuffled, for all epochs) or evaluation (once): this
  process's share of each, or the `whole` of it."""
  keys = config.data
  number, count = (0, 1) if whole else mesh_axes.process_part(config.mesh)
  stream = {
    "batch_size": config.training.micro_rows if training else config.training.eval_rows,
    "shuffle": keys.shuffle and training,
    "seed": config.seed,
    "num_epochs": epochs(config) if training else 1,
    "process_index": number,
    "process_count": count,
    "num_threads": keys.num_threads,
  }
  source = _source(config, tokenizer, records)
  if records.kind is SFT and isinstance(keys, RowSettings):
    stream |= {"packing": keys.packing, "length_buckets": keys.length_buckets}
  return pipeline.build_batches(source, **stream)


def _packs(config: StreamRun) -> bool:
  return isinstance(config.data, RowSettings) and config.data.packing


def settle(config: RunSettings) -> RunSettings:
  """The configuration with the number of epochs written out."""
  data = dataclasses.replace(config.data, num_epochs=epochs(config))
  return dataclasses.replace(config, data=data)


def epochs(config: RunSettings) -> int | None:
  """Passes over the data; None: as many as `training.max_steps` needs."""
  if config.data.num_epochs is None and config.training.max_steps is None:
    return 1
  return config.data.num_epochs


def count_steps(config: StreamRun, report: Report) -> int | None:
  """Optimizer steps of a run; None when packing or an incomplete scan hides them."""
  limit, passes = config.training.max_steps, epochs(config)
  if passes is None:
    return limit
  countable = report.scanned == report.records or not config.drops
  if config.data.weights and report.kept < report.records:
    countable = False  # how often those left out are drawn was not looked up
  if _packs(config) or not countable:
    return limit
  kept = report.kept if report.scanned == report.records else report.records
  # Both divisions round up: the last batch and the last step may be smaller.
  micro_batches = -(-kept * passes // config.training.micro_rows)
  steps = -(-micro_batches // config.training.micro_batches)
  return steps if limit is None else min(steps, limit)
