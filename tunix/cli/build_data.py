"""From a configuration to checked records and batches."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

import tunix
from tunix.cli import fingerprints
from tunix.cli.schema import Config
from tunix.data import pipeline
from tunix.data.jsonl import JsonlRecords
from tunix.data.records import ANSWERED, LABELLED, PAIRS, PROMPTS, SFT, Kind
from tunix.data.rows import OneRow, SideBySide
from tunix.data.scan import Report, scan
from tunix.data.source import Source
from tunix.generate.tokenizer_adapter import TokenizerAdapter

_KINDS: dict[str, Kind] = {
  "sft": SFT,
  "distill": SFT,
  "dpo": PAIRS,
  "orpo": PAIRS,
  "reward": PAIRS,
  "kto": LABELLED,
}


def kind_of(config: Config, *, training: bool) -> Kind:
  """What the run's records are, those to train on or those to evaluate."""
  if config.is_on_policy:
    # Evaluation compares on the same completions every time: those of the data.
    alone = training and config.distill.on_policy_fraction == 1
    return PROMPTS if alone else ANSWERED
  return _KINDS[config.job]


def _keys(config: Config, kind: Kind) -> dict[str, str]:
  """Arguments of the data layer -> the keys that they come from."""
  if kind is SFT:
    return {"max_length": "data.max_length"}
  if config.job == "distill":
    return {
      "max_prompt_length": "rollout.max_prompt_length",
      "max_completion_length": "rollout.max_tokens_to_generate",
    }
  return {
    "max_prompt_length": "preference.max_prompt_length",
    "max_completion_length": "preference.max_response_length",
    "unusable": "preference.unusable",
  }


def _source(
  config: Config, tokenizer: TokenizerAdapter, records: JsonlRecords
) -> Source:
  kind, data = records.kind, config.data
  settings = {n: operator.attrgetter(k)(config) for n, k in _keys(config, kind).items()}
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
    text = re.sub(pattern, lambda match: names[match[0]], str(error))
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


def open_records(config: Config) -> dict[str, JsonlRecords]:
  """The files of `data.train` and `data.eval`, indexed and not checked yet.

  Raises:
    FileNotFoundError: no such file.
    ValueError: no file was named, or it is empty.
  """
  if config.data.train is None:
    raise ValueError("data.train is not set: give a file of JSON lines")
  files = {"train": config.data.train, "eval": config.data.eval}
  return {
    name: JsonlRecords(file, kind_of(config, training=name == "train"))
    for name, file in files.items()
    if file is not None
  }


def scan_records(
  config: Config, tokenizer: TokenizerAdapter, records: dict[str, JsonlRecords]
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
    with naming(_keys(config, part.kind)):
      source = _source(config, tokenizer, part)
      reports[name] = scan(source, config.data.scan_limit)
  return reports


def build_data(
  config: Config, tokenizer: TokenizerAdapter, known: Mapping[str, Any] | None = None
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


def _scan_key(config: Config, part: JsonlRecords, prints: Mapping[str, str]) -> str:
  """A digest of all that a scan's report depends on."""
  keys = config.data
  fields = [field.name for field in dataclasses.fields(Report)]
  form = (tunix.__version__, part.kind.name, part.kind.expected, fields)
  inputs = (part.fingerprint, prints["tokenizer"], prints["chat_template"])
  place = str(part.path)  # the report names its longest record by it
  settings = [operator.attrgetter(k)(config) for k in _keys(config, part.kind).values()]
  limits = (settings, keys.overlong, keys.chat, keys.template_args)
  return fingerprints.digest((form, inputs, place, limits, keys.scan_limit))


def _known_reports(known: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
  return {
    name: Report(**known[name]["report"])
    for name, key in keys.items()
    if name in known and known[name]["key"] == key
  }


def batches(
  config: Config, tokenizer: TokenizerAdapter, records: JsonlRecords, *, training: bool
) -> Iterable[Any]:
  """Micro-batches for training (shuffled, for all epochs) or evaluation (once)."""
  keys = config.data
  stream = {
    "batch_size": config.training.micro_rows if training else config.training.eval_rows,
    "shuffle": keys.shuffle and training,
    "seed": config.seed,
    "num_epochs": epochs(config) if training else 1,
    "process_index": jax.process_index(),
    "process_count": jax.process_count(),
    "num_threads": keys.num_threads,
  }
  source = _source(config, tokenizer, records)
  packing = keys.packing and records.kind is SFT
  return pipeline.build_batches(source, packing=packing, **stream)


def settle(config: Config) -> Config:
  """The configuration with the number of epochs written out."""
  data = dataclasses.replace(config.data, num_epochs=epochs(config))
  return dataclasses.replace(config, data=data)


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
  drops = "drop" in (config.data.overlong, config.preference.unusable)
  countable = report.scanned == report.records or not drops
  if config.data.packing or not countable:
    return limit
  kept = report.kept if report.scanned == report.records else report.records
  # Both divisions round up: the last batch and the last step may be smaller.
  micro_batches = -(-kept * passes // config.training.micro_rows)
  steps = -(-micro_batches // config.training.micro_batches)
  return steps if limit is None else min(steps, limit)
