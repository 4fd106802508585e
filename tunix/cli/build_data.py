"""From a configuration to checked records and batches."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

import tunix
from tunix.cli import fingerprints
from tunix.cli.settings import RowSettings
from tunix.data import answer_formats, formats, pipeline
from tunix.data.answer_scan import AnswerReport, scan_answers
from tunix.data.answer_source import AnswerSource, Kind
from tunix.data.formats import Form, JsonlRecords
from tunix.data.scan import Report, scan
from tunix.generate.tokenizer_adapter import TokenizerAdapter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """How the records of a job are read.

  Attributes:
    form: what they look like.
    report: class of what a scan finds.
    scan: (config, tokenizer, records) -> report.
    batches: (config, tokenizer, records, options of the stream) -> batches.
    limits: config -> all that a scan depends on besides the records and how a chat is
      rendered.
  """

  form: Form
  report: type
  scan: Callable[[Any, TokenizerAdapter, JsonlRecords], Any]
  batches: Callable[[Any, TokenizerAdapter, JsonlRecords, dict[str, Any]], Any]
  limits: Callable[[Any], Any]


def _scan_examples(
  config: Any, tokenizer: TokenizerAdapter, records: JsonlRecords
) -> Report:
  keys = config.data
  return scan(
    records,
    tokenizer,
    max_length=keys.max_length,
    overlong=keys.overlong,
    chat=keys.chat,
    template_kwargs=keys.template_args,
    limit=keys.scan_limit,
  )


def _example_batches(
  config: Any,
  tokenizer: TokenizerAdapter,
  records: JsonlRecords,
  stream: dict[str, Any],
) -> Iterable[Any]:
  keys = config.data
  return pipeline.build_dataset(
    records,
    tokenizer,
    max_length=keys.max_length,
    packing=keys.packing,
    overlong=keys.overlong,
    chat=keys.chat,
    template_kwargs=keys.template_args,
    **stream,
  )


def _answer_keys(config: Any) -> dict[str, str]:
  """The keys that settings of an `AnswerSource` come from."""
  own = {n: f"preference.{n}" for n in ("max_prompt_length", "max_response_length")}
  own["unusable"] = "preference.unusable"
  if config.job == "distill":
    own = {
      "max_prompt_length": "rollout.max_prompt_length",
      "max_response_length": "rollout.max_tokens_to_generate",
    }
  return own | {"overlong": "data.overlong"}


def _answer_settings(config: Any) -> dict[str, Any]:
  keys = _answer_keys(config).items()
  return {name: operator.attrgetter(key)(config) for name, key in keys}


def _source(
  config: Any, tokenizer: TokenizerAdapter, records: JsonlRecords, kind: Kind
) -> AnswerSource:
  data = config.data
  return AnswerSource(
    records=records,
    kind=kind,
    tokenizer=tokenizer,
    **_answer_settings(config),
    chat=data.chat,
    template_kwargs=data.template_args,
    keys=_answer_keys(config),
  )


def _answers(form: Form, kind: Kind) -> Reading:
  return Reading(
    form=form,
    report=AnswerReport,
    scan=lambda config, tokenizer, records: scan_answers(
      _source(config, tokenizer, records, kind), config.data.scan_limit
    ),
    batches=lambda config, tokenizer, records, stream: pipeline.build_answers(
      _source(config, tokenizer, records, kind), **stream
    ),
    limits=_answer_settings,
  )


_EXAMPLES = Reading(
  form=formats.FINE_TUNING,
  report=Report,
  scan=_scan_examples,
  batches=_example_batches,
  limits=lambda config: config.data.max_length,
)
_PAIRS = _answers(answer_formats.PAIRS, "pair")
_LABELLED = _answers(answer_formats.LABELLED, "labelled")
_ANSWERED = _answers(answer_formats.ANSWERED, "answered")
_PROMPTS = _answers(answer_formats.PROMPTS, "prompt")

_READINGS: dict[str, Reading] = {
  "sft": _EXAMPLES,
  "distill": _EXAMPLES,
  "dpo": _PAIRS,
  "orpo": _PAIRS,
  "reward": _PAIRS,
  "kto": _LABELLED,
}


_ANSWERED_JOBS = ("dpo", "orpo", "kto", "reward")


def reading(config: Any, *, training: bool) -> Reading:
  """How the run's records are read, those to train on or those to evaluate."""
  if config.job == "distill" and config.is_on_policy:
    # Evaluation compares on the same responses every time: those of the data.
    alone = training and config.distill.on_policy_fraction == 1
    return _PROMPTS if alone else _ANSWERED
  return _READINGS[config.job]


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
    reports: what the scan of "train" and "eval" found, by the job's `Reading`.
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


def open_records(config: Any) -> dict[str, JsonlRecords]:
  """The files of `data.train` and `data.eval`, indexed and not checked yet.

  Raises:
    FileNotFoundError: no such file.
    ValueError: no file was named, or it is empty.
  """
  if config.data.train is None:
    raise ValueError("data.train is not set: give a file of JSON lines")
  files = {"train": config.data.train, "eval": config.data.eval}
  return {
    name: JsonlRecords(file, reading(config, training=name == "train").form)
    for name, file in files.items()
    if file is not None
  }


def scan_records(
  config: Any, tokenizer: TokenizerAdapter, records: dict[str, JsonlRecords]
) -> dict[str, Any]:
  """Checks the structure of every record, then renders and tokenises them, as far as
  `data.scan_limit` asks for.

  Raises:
    ValueError: a record is wrong or cannot be trained on (its line is named).
  """
  for part in records.values():
    part.validate()
  return {
    name: reading(config, training=name == "train").scan(config, tokenizer, part)
    for name, part in records.items()
  }


def build_data(
  config: Any, tokenizer: TokenizerAdapter, known: Mapping[str, Any] | None = None
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
  keys = {
    name: _scan_key(config, reading(config, training=name == "train"), part, prints)
    for name, part in records.items()
  }
  reports = _known_reports(config, known or {}, keys)
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


def _scan_key(
  config: Any, how: Reading, part: JsonlRecords, prints: Mapping[str, str]
) -> str:
  """A digest of all that a scan's report depends on."""
  keys = config.data
  fields = [field.name for field in dataclasses.fields(how.report)]
  form = (tunix.__version__, how.form.expected, fields)
  inputs = (part.fingerprint, prints["tokenizer"], prints["chat_template"])
  place = str(part.path)  # the report names its longest record by it
  limits = (how.limits(config), keys.overlong, keys.chat, keys.template_args)
  return fingerprints.digest((form, inputs, place, limits, keys.scan_limit))


def _known_reports(
  config: Any, known: Mapping[str, Any], keys: Mapping[str, str]
) -> dict[str, Any]:
  return {
    name: reading(config, training=name == "train").report(**known[name]["report"])
    for name, key in keys.items()
    if name in known and known[name]["key"] == key
  }


def batches(
  config: Any, tokenizer: TokenizerAdapter, records: JsonlRecords, *, training: bool
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
  return reading(config, training=training).batches(config, tokenizer, records, stream)


def settle(config: Any) -> Any:
  """The configuration with the number of epochs written out."""
  data = dataclasses.replace(config.data, num_epochs=epochs(config))
  return dataclasses.replace(config, data=data)


def epochs(config: Any) -> int | None:
  """Passes over the data; None: as many as `training.max_steps` needs."""
  if config.data.num_epochs is None and config.training.max_steps is None:
    return 1
  return config.data.num_epochs


def count_steps(config: Any, report: Report | AnswerReport) -> int | None:
  """Optimizer steps of a run; None when packing or an incomplete scan hides them."""
  limit, passes = config.training.max_steps, epochs(config)
  if passes is None:
    return limit
  drops = config.data.overlong == "drop" or (
    config.job in _ANSWERED_JOBS and config.preference.unusable == "drop"
  )
  countable = report.scanned == report.records or not drops
  packed = isinstance(config.data, RowSettings) and config.data.packing
  if packed or not countable:
    return limit
  kept = report.kept if report.scanned == report.records else report.records
  # Both divisions round up: the last batch and the last step may be smaller.
  micro_batches = -(-kept * passes // config.training.micro_rows)
  steps = -(-micro_batches // config.training.micro_batches)
  return steps if limit is None else min(steps, limit)
