"""Builds the data of a run from its configuration: records, a scan, batches."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tunix
from tunix.cli.make import (
  data_sources,
  data_streams,
  environments,
  fingerprints,
  loading,
  rewards,
  run_widths,
)
from tunix.cli.settings import mesh as mesh_axes
from tunix.cli.settings.data import RowSettings, StreamSettings
from tunix.cli.settings.run import RunSettings, StreamRun
from tunix.data import image_parts, pipeline
from tunix.data.batching.prompts import PromptBatches, with_equal_room
from tunix.data.images import ImageReader
from tunix.data.reading.mixture import Mixture
from tunix.data.reading.stored import Records
from tunix.data.reading.stream import Streamed
from tunix.data.records import (
  IMAGES_COLUMN,
  PROMPT_COLUMN,
  PROMPT_IDS_COLUMN,
  PROMPT_ROWS,
  RAW_PROMPT_COLUMN,
  SFT,
  Kind,
)
from tunix.data.scan import STEP, Report, scan
from tunix.data.source import Source, layout_type
from tunix.data.widths import Widths
from tunix.generate.tokenizer_adapter import TokenizerAdapter


def _row_settings(config: RunSettings, kind: Kind) -> dict[str, Any]:
  """Returns the values of the keys that set the rows, by argument of the data layer."""
  return {n: operator.attrgetter(k)(config) for n, k in config.row_keys(kind).items()}


def _source(
  config: RunSettings,
  tokenizer: TokenizerAdapter,
  records: Records | Streamed,
  report: Report | None = None,
) -> Source:
  """Returns the source of records; its rows have pixels if the report has images."""
  kind, data = records.kind, config.data
  settings = _row_settings(config, kind)
  options = {n: settings.pop(n) for n in ("unusable",) if n in settings}
  if isinstance(data, StreamSettings):
    options["reasoning"] = data.reasoning or "error"
  options["images"] = loading.ModelLoader(config).image_reader()
  options["image_tokens"] = 0 if report is None else report.image_tokens
  layout: Any = layout_type(kind)
  return Source(
    records=records,
    kind=kind,
    tokenizer=tokenizer,
    layout=layout(**settings),
    overlong=data.overlong,
    chat=data.chat,
    template_kwargs=data.template_args,
    **options,
  )


@contextlib.contextmanager
def naming(keys: Mapping[str, str]) -> Iterator[None]:
  """Replaces argument names of the data layer by keys in the errors of a block.

  Args:
    keys: argument -> key, besides those of the section `data`.
  """
  names = {n: f"data.{n}" for n in ("overlong", "chat", "reasoning")} | dict(keys)
  try:
    yield
  except ValueError as error:
    arguments = "|".join(names)
    pattern = rf"(?<![\w.])(?:{arguments})(?= is | \d|: | to |,)"
    text = str(error)
    text = text.replace(
      "give one with chat_template=...",
      "set tokenizer.chat_template to a file with a chat template",
    )
    if "unusable" not in keys:  # this job has no key for it
      text = text.replace(', or set unusable to "drop"', "")
    text = re.sub(pattern, lambda match: names[match[0]], text)
    raise ValueError(text) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
  """The data that a run trains and evaluates on.

  Attributes:
    train: iterable of batches for training; micro-batches, or batches of prompts in RL.
    eval: iterable of batches, started anew for every evaluation; None without
      evaluation.
    reports: report of the scan of "train" and "eval", see `tunix.data.scan`.
    scans: the reports as JSON, each with a digest of everything it depends on. Empty in
      RL, where the prompts are read again at every start.
    fingerprints: SHA-256 of files, tokenizer, chat template, models and reward
      functions.
    num_steps: optimizer steps until the run ends; None if not known in advance.
    widths: widths of the rows of "train" and "eval"; empty if only the settings decide
      them.
    images: reads the images of the records; None: no record has one.
  """

  train: Iterable[Any]
  eval: Iterable[Any] | None
  reports: dict[str, Any]
  scans: dict[str, dict[str, Any]]
  fingerprints: dict[str, str]
  num_steps: int | None
  widths: dict[str, Widths] = dataclasses.field(default_factory=dict)
  images: ImageReader | None = None


def open_records(config: RunSettings) -> dict[str, Records | Streamed]:
  """Opens the sources of `data.train` and `data.eval` without checking the records.

  With `data.stream`, "train" is a stream.

  Raises:
    ValueError: data.train is not set.
    FileNotFoundError, ImportError, ValueError, TypeError, RuntimeError: as for
      `data_sources.open_records`.
  """
  data, size, opened = config.data, config.training.global_batch_size, {}
  for name, names, weights in data.sources(environments.tasks(_env(config))):
    kind, is_train = config.kind(training=name == "train"), name == "train"
    if is_train and isinstance(data, StreamSettings) and data.stream:
      opened[name] = data_streams.open_stream(
        names, kind, data.columns, data.shuffle_buffer
      )
    else:
      later = {step * size: new for step, new in data.weights_at.items()}
      opened[name] = data_sources.open_records(
        names, kind, weights, data.columns, later if is_train else None
      )
  return opened


def scan_records(
  config: RunSettings,
  tokenizer: TokenizerAdapter,
  records: dict[str, Records | Streamed],
  kept: dict[str, dict[int, Any]] | None = None,
) -> dict[str, Any]:
  """Checks the fields of every record, then renders and tokenizes the records.

  Rendering stops after `data.scan_limit` records where the job has this key.

  Args:
    config: settings of the run.
    tokenizer: tokenizer of the run.
    records: opened records of "train" and "eval".
    kept: receives the rows of prompts by name and record number, see `scan.scan`.

  Returns:
    A report for each name.

  Raises:
    ValueError: a record is wrong or cannot be trained on (its place is named), or a
      reward function needs a column that the prompts lack.
  """
  for part in records.values():
    part.validate()
    if part.kind is PROMPT_ROWS:
      assert isinstance(part, Records)
      first = part.kind.read(part[0], part.where(0))
      columns = dict.fromkeys(first.extra)
      reads_images = loading.ModelLoader(config).image_reader() is not None
      # Without a reader the scan refuses the image, and says why.
      if reads_images or image_parts.sources(first.prompt):
        columns[IMAGES_COLUMN] = None
      _check_rewards(config, list(columns))
  reports = {}
  for name, part in records.items():
    holds_rows = kept is not None and part.kind is PROMPT_ROWS
    rows = kept.setdefault(name, {}) if kept is not None and holds_rows else None
    with naming(config.row_keys(part.kind)):
      source = _source(config, tokenizer, part)
      limit = getattr(config.data, "scan_limit", None)
      reports[name] = scan(source, limit, kept=rows)
  return reports


def build_data(
  config: RunSettings,
  tokenizer: TokenizerAdapter,
  scans: Mapping[str, Any] | None = None,
) -> RunData:
  """Opens, checks and scans the records, and makes batches of them.

  Args:
    config: settings of the run.
    tokenizer: tokenizer of the run.
    scans: `RunData.scans` of an earlier start, whose records are not scanned again.

  Raises:
    FileNotFoundError, ValueError: as for `open_records` and `scan_records`.
  """
  records = open_records(config)
  prints = fingerprints.of_inputs(config, tokenizer, records)
  scan_keys = {
    name: _scan_key(config, part, prints)
    for name, part in records.items()
    if isinstance(config, StreamRun)
  }
  reports = _known_reports(scans or {}, scan_keys)
  unknown = {name: part for name, part in records.items() if name not in reports}
  prompts: dict[str, dict[int, Any]] = {}
  reports |= scan_records(config, tokenizer, unknown, prompts)
  reports = {name: reports[name] for name in records}
  chosen = {
    name: run_widths.choose(
      config,
      _source(config, tokenizer, part, reports[name]),
      reports[name],
      training=name == "train",
    )
    for name, part in records.items()
  }
  iterables = {
    name: batches(
      config,
      tokenizer,
      part,
      training=name == "train",
      kept=prompts.get(name),
      chosen=chosen[name],
      report=reports[name],
    )
    for name, part in records.items()
  }
  prints |= fingerprints.of_config(config)
  reader = loading.ModelLoader(config).image_reader()
  has_images = any(report.image_tokens for report in reports.values())
  episode = getattr(config, "episode", None)
  if not has_images and not getattr(episode, "max_image_tokens", 0):
    reader = None
  if reader is not None:
    prints["model"] = fingerprints.digest((prints["model"], reader.fingerprint))
  if not isinstance(config, StreamRun):
    prints |= {"reward_functions": rewards.digest(_reward(config))}
    if (env := _env(config)) is not None:
      prints |= {"env": environments.digest(env)}
  return RunData(
    train=iterables["train"],
    eval=iterables.get("eval"),
    reports=reports,
    scans={
      name: {"key": key, "report": dataclasses.asdict(reports[name])}
      for name, key in scan_keys.items()
    },
    fingerprints=prints,
    num_steps=count_steps(config, reports["train"]),
    widths={name: choice for name, choice in chosen.items() if choice is not None},
    images=reader,
  )


def _unrendered(records: Records, index: int, row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a row with the prompt as the record has it."""
  prompt: Any = records.kind.read(records[index], records.where(index)).prompt
  if row.get(IMAGES_COLUMN):
    sources = iter(row[IMAGES_COLUMN])  # absolute, in the order of the parts
    prompt = copy.deepcopy(prompt)
    for part in itertools.chain.from_iterable(map(image_parts.parts, prompt)):
      part["image"] = next(sources)
  rest = {name: value for name, value in row.items() if name != PROMPT_IDS_COLUMN}
  return rest | {PROMPT_COLUMN: prompt}


def _with_raw_prompts(
  config: RunSettings,
  tokenizer: TokenizerAdapter,
  records: Records,
  prompts: Mapping[int, Any],
) -> dict[int, Any]:
  """Returns the rows with their prompts before the chat template, too."""
  chat = tokenizer.has_chat_template() if config.data.chat is None else config.data.chat
  raw = {i: _unrendered(records, i, row)[PROMPT_COLUMN] for i, row in prompts.items()}
  if chat:
    raw = {
      i: [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
      for i, prompt in raw.items()
    }
  return {i: {**row, RAW_PROMPT_COLUMN: raw[i]} for i, row in prompts.items()}


def _reward(config: Any) -> rewards.RewardSettings:
  return config.reward


def _env(config: RunSettings) -> str | None:
  return getattr(config, "env", None)


def _check_rewards(config: RunSettings, columns: list[str]) -> None:
  """Refuses reward functions and environments that do not fit the data."""
  env = _env(config)
  rewards.check(_reward(config), columns, has_others=env is not None)
  feedback = getattr(getattr(config, "algorithm", None), "feedback", None)
  if feedback is not None and env is None and feedback not in columns:
    raise ValueError(
      f"algorithm.feedback is {feedback!r}, which is no column of the data. It has "
      f"{', '.join(columns) or 'none'}. Correct the name, or leave it out"
    )
  if env is not None:
    environments.check(env, columns)


def _scan_key(
  config: StreamRun, part: Records | Streamed, prints: Mapping[str, str]
) -> str:
  """Returns a digest of everything that the report of a scan depends on."""
  source = config.data
  fields = [field.name for field in dataclasses.fields(Report)]
  kind = part.kind
  form = (tunix.__version__, kind.name, kind.expected, kind.settings, fields, STEP)
  inputs = (part.fingerprint, prints["tokenizer"], prints["chat_template"])
  place = part.name  # the report names the longest record by its place
  settings = list(_row_settings(config, part.kind).values())
  limits = (settings, source.overlong, source.chat, source.template_args)
  tokenizer = config.tokenizer
  limits = (*limits, source.reasoning, tokenizer.add_bos, tokenizer.messages)
  reader = loading.ModelLoader(config).image_reader()
  if reader is not None:
    limits = (*limits, reader.fingerprint)
  if isinstance(part, Mixture):
    limits = (*limits, part.weights, *part.later)
  if isinstance(part, Streamed):
    limits = (*limits, "stream", part.columns)
  return fingerprints.digest((form, inputs, place, limits, source.scan_limit))


def _known_reports(
  scans: Mapping[str, Any], scan_keys: Mapping[str, str]
) -> dict[str, Any]:
  return {
    name: Report(**scans[name]["report"])
    for name, key in scan_keys.items()
    if name in scans and scans[name]["key"] == key
  }


def batches(
  config: RunSettings,
  tokenizer: TokenizerAdapter,
  records: Records | Streamed,
  *,
  training: bool,
  whole: bool = False,
  kept: Mapping[int, Any] | None = None,
  chosen: Widths | None = None,
  report: Report | None = None,
) -> Iterable[Any]:
  """Returns batches for training (shuffled, all epochs) or evaluation (one pass).

  Args:
    config: settings of the run.
    tokenizer: tokenizer of the run.
    records: opened records.
    training: True for training, False for evaluation.
    whole: True gives this process the whole of every batch, not its share. Batches of
      prompts are always whole.
    kept: rows of the prompts that a scan kept; None scans the prompts here.
    chosen: widths of the rows; None chooses them here, which scans the records.
    report: report of the records' scan; None scans records that may have images here.
  """
  if records.kind is PROMPT_ROWS:
    assert isinstance(records, Records)
    if kept is None:
      scan(_source(config, tokenizer, records), kept=(kept := {}))
    if getattr(config, "extends_prompts", False):
      kept = _with_raw_prompts(config, tokenizer, records, kept)
    return _prompt_batches(config, records, kept, training=training)
  assert isinstance(config, StreamRun)
  data = config.data
  number, count = (0, 1) if whole else mesh_axes.process_part(config.mesh)
  options = {
    "batch_size": config.training.micro_rows if training else config.training.eval_rows,
    "shuffle": data.shuffle and training,
    "seed": config.seed,
    "num_epochs": epochs(config) if training else 1,
    "process_index": number,
    "process_count": count,
    "num_threads": data.num_threads,
  }
  if records.kind is SFT and isinstance(data, RowSettings):
    options |= {"packing": data.packing, "length_buckets": data.length_buckets}
  source = _source(config, tokenizer, records, report)
  if source.images is not None and report is None:
    report = scan(source, data.scan_limit)
    source = dataclasses.replace(source, image_tokens=report.image_tokens)
  chosen = chosen or run_widths.choose(config, source, report, training=training)
  if chosen is not None:
    source = dataclasses.replace(source, layout=chosen.layout)
    options |= {"widths": chosen.lengths, "shared_rows": chosen.rows}
    options["batches_per_step"] = config.training.micro_batches if training else 1
  with naming({n: f"data.{n}" for n in ("packing", "length_buckets", "pad_to")}):
    if source.has_images and data.pad_to == "shared":
      pipeline.check_image_rows(pad_to=data.pad_to)
    return pipeline.build_batches(source, **options)


def _prompt_batches(
  config: RunSettings, records: Records, prompts: Mapping[int, Any], *, training: bool
) -> PromptBatches:
  rows, sizes = with_equal_room(list(prompts.values())), config.training
  if _env(config) is not None:
    # An environment renders its own observations.
    rows = [_unrendered(records, index, row) for index, row in prompts.items()]
  if not training:
    return PromptBatches(rows, sizes.eval_rows, seed=None, epochs=1)
  options: dict[str, Any] = {}
  if isinstance(records, Mixture) and records.weights is not None:
    # Shares count the prompts that are left, since dropped ones are never drawn.
    options = {"sizes": records.count_by_part(prompts), "weights": records.weights}
    options["later"] = records.later
  seed = config.seed if config.data.shuffle else None
  return PromptBatches(
    rows, sizes.global_batch_size, seed=seed, epochs=epochs(config), **options
  )


def epochs(config: RunSettings) -> int | None:
  """Returns the passes over the data; None: as many as `training.max_steps` needs."""
  if config.data.num_epochs is None and config.training.max_steps is None:
    return 1
  return config.data.num_epochs


def count_steps(config: RunSettings, report: Report) -> int | None:
  """Returns the number of optimizer steps of a run; None if not known in advance.

  Packing, an incomplete scan with dropped records, a curriculum and dynamic sampling
  hide it.

  Args:
    config: settings of the run.
    report: report of the training data.
  """
  limit, passes = config.training.max_steps, epochs(config)
  count = _count_steps if isinstance(config, StreamRun) else _count_updates
  steps = None if passes is None else count(config, report, passes)
  if steps is None or limit is None:
    return steps if limit is None else limit
  return min(steps, limit)


def _count_steps(config: Any, report: Report, passes: int) -> int | None:
  """Returns the steps of a run on given completions."""
  if report.records is None:
    return None
  all_scanned = report.is_whole
  countable = all_scanned or not config.drops
  if config.data.weights and report.kept < report.records:
    countable = False  # dropped records are drawn as well, an unknown number of times
  if not countable or (isinstance(config.data, RowSettings) and config.data.packing):
    return None
  records = report.kept if all_scanned else report.records
  # Both divisions round up: the last batch and the last step may be smaller.
  micro_batches = -(-records * passes // config.training.micro_rows)
  return -(-micro_batches // config.training.micro_batches)


def _count_updates(config: Any, report: Report, passes: int) -> int | None:
  """Returns the updates of an RL run, at most.

  The learner skips mini-batches whose weights are all 0, so that there may be fewer.
  """
  if config.algorithm.collects_batches or config.algorithm.curriculum is not None:
    return None
  size = config.training.global_batch_size
  whole, rest = divmod(report.kept, size)
  # If its size is not set, a mini-batch is as large as the largest batch.
  mini = config.rl.mini_batch_size or min(size, report.kept)
  updates = whole * -(-size // mini) + -(-rest // mini)
  return updates * passes * config.algorithm.num_iterations
