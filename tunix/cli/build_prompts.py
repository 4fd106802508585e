"""From a configuration to checked prompts and batches of them, for the jobs of RL.

A record is one JSON object a line: "prompt" (or "prompts"), a text or a list of
messages, and further columns, the same in every record, which reward functions see.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.cli import algorithms, build_data, fingerprints, rewards
from tunix.cli.build_data import RunData
from tunix.cli.schema import Config
from tunix.data.chat import TEMPLATE_DATE
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.pipeline import PROMPTS

Row = dict[str, Any]
_NAMES = ("prompt", PROMPTS)
_EXPECTED = 'expected {"prompt": text or [messages], further columns}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptReport:
  """What was found in a file of prompts.

  Attributes:
    records: lines with a record.
    kept: those that are not too long.
    longest: tokens of the longest prompt.
    columns: names besides the prompt.
  """

  records: int
  kept: int
  longest: int
  columns: tuple[str, ...]

  def __str__(self) -> str:
    dropped = self.records - self.kept
    parts = [f"{self.records} prompts of at most {self.longest} tokens"]
    if dropped:
      parts.append(f"{dropped} dropped, too long")
    if self.columns:
      parts.append(f"columns {', '.join(self.columns)}")
    return ", ".join(parts)


class PromptBatches:
  """Batches {"prompts": [...], column: [...]}, in an order that follows from the seed.

  Its iterators can be saved and put back. The last batch of an epoch may be smaller.

  Args:
    rows: prompts with their columns.
    size: prompts of a batch.
    seed: of a new order every epoch; None: as they stand.
    epochs: passes; None: without end.
  """

  def __init__(
    self, rows: Sequence[Row], size: int, *, seed: int | None, epochs: int | None
  ):
    self.rows, self.size, self.seed, self.epochs = rows, size, seed, epochs

  def __iter__(self) -> _Batches:
    return _Batches(self)


class _Batches(Iterator[dict[str, list[Any]]]):
  def __init__(self, source: PromptBatches):
    self._source, self._drawn = source, 0

  def __next__(self) -> dict[str, list[Any]]:
    source = self._source
    per_epoch = -(-len(source.rows) // source.size)
    epoch, at = divmod(self._drawn, per_epoch)
    if source.epochs is not None and epoch >= source.epochs:
      raise StopIteration
    order = np.arange(len(source.rows))
    if source.seed is not None:
      order = np.random.default_rng((source.seed, epoch)).permutation(order)
    chosen = [source.rows[i] for i in order[at * source.size :][: source.size]]
    self._drawn += 1
    return {name: [row[name] for row in chosen] for name in chosen[0]}

  def get_state(self) -> dict[str, int]:
    return {"drawn": self._drawn}

  def set_state(self, state: dict[str, int]) -> None:
    self._drawn = state["drawn"]


def read_prompts(path: str) -> tuple[list[Row], str]:
  """The records of a file, and the SHA-256 of it.

  Raises:
    FileNotFoundError: no such file.
    ValueError: no records, or one that is wrong; its line is named.
  """
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    what = "a folder" if file.is_dir() else "no such file"
    raise FileNotFoundError(f"data file {path!r}: {what}; give a file of JSON lines")
  content = file.read_bytes()
  rows: list[Row] = []
  for number, line in enumerate(content.splitlines(), start=1):
    if line.strip():
      rows.append(_row(line, f"{file}:{number}"))
      if rows[-1].keys() != rows[0].keys():
        raise ValueError(
          f"{file}:{number}: the columns are {sorted(rows[-1])}, those of the first "
          f"record {sorted(rows[0])}: reward functions need the same in every record"
        )
  if not rows:
    raise ValueError(f"{file} is empty: {_EXPECTED}, one JSON object a line")
  return rows, hashlib.sha256(content).hexdigest()


def _row(line: bytes, where: str) -> Row:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{where}: invalid JSON ({error}): {_EXPECTED}") from error
  found = [name for name in _NAMES if isinstance(record, dict) and name in record]
  if len(found) != 1:
    raise ValueError(
      f"{where}: {_EXPECTED}, found {line.decode(errors='replace')[:60]}"
    )
  prompt = record.pop(found[0])
  taken = {"completion", "completions"} & record.keys()
  if taken:
    raise ValueError(
      f"{where}: the column {taken.pop()!r} has a name that completions are passed by: "
      "give it another one"
    )
  messages = isinstance(prompt, list) and all(
    isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
  )
  if not prompt or not (isinstance(prompt, str) or messages):
    raise ValueError(f"{where}: the prompt is neither text nor messages; {_EXPECTED}")
  return {PROMPTS: prompt, **record}


def build_prompts(config: Config, tokenizer: TokenizerAdapter) -> RunData:
  """Reads and checks the prompts, renders them, and makes batches of them.

  Raises:
    FileNotFoundError, ValueError: something about files, records or rewards is wrong.
  """
  keys = config.data
  if keys.train is None:
    raise ValueError("data.train is not set: give a file of JSON lines with prompts")
  algorithms.algorithm_config(config)  # or says what is wrong with it
  rewards.check(config)
  batches, reports, prints = {}, {}, {}
  files = {"train": keys.train, "eval": keys.eval}
  for name, path in files.items():
    if path is None:
      continue
    rows, prints[name] = read_prompts(path)
    texts = [
      rendered(row, tokenizer, path, keys.chat, keys.template_args) for row in rows
    ]
    rows, reports[name] = _short_enough(rows, texts, config, tokenizer, path)
    batches[name] = _batches(rows, config, training=name == "train")
  return RunData(
    train=batches["train"],
    eval=batches.get("eval"),
    reports=reports,
    scans={},
    fingerprints=fingerprints.of_inputs(config, tokenizer, {})
    | prints
    | fingerprints.of_base(config)
    | {"reward_functions": rewards.digest(config)}
    | _other_models(config),
    num_steps=count_steps(config, reports["train"]),
  )


def rendered(
  row: Row,
  tokenizer: TokenizerAdapter,
  path: str,
  chat: bool | None,
  template_args: Mapping[str, Any],
) -> Row:
  """The row with its prompt as text, chats with the header of the answer.

  Args:
    row: of `read_prompts`.
    tokenizer: renders chats.
    path: of the file, for messages.
    chat: whether plain prompts are user turns; None: when there is a chat template.
    template_args: further names for the chat template.

  Raises:
    ValueError: messages without a chat template.
  """
  prompt = row[PROMPTS]
  chat = tokenizer.has_chat_template() if chat is None else chat
  if isinstance(prompt, str):
    if not chat:
      return row
    prompt = [{"role": "user", "content": prompt}]
  elif not chat:
    raise ValueError(
      f"{path} has prompts of messages, which need a chat template: set "
      "tokenizer.chat_template, and leave data.chat alone"
    )
  text = tokenizer.apply_chat_template(prompt, now=TEMPLATE_DATE, **template_args)
  return row | {PROMPTS: text}


def _short_enough(
  rows: Sequence[Row],
  texts: Sequence[Row],
  config: Config,
  tokenizer: TokenizerAdapter,
  path: str,
) -> tuple[list[Row], PromptReport]:
  limit = config.rollout.max_prompt_length
  lengths = [len(tokenizer.tokenize(row[PROMPTS], add_eos=False)) for row in texts]
  kept = [row for row, length in zip(texts, lengths) if length <= limit]
  if config.data.overlong == "error" and len(kept) < len(texts):
    at = next(i for i, length in enumerate(lengths) if length > limit)
    raise ValueError(
      f"{path}: record {at + 1} has {lengths[at]} tokens, rollout.max_prompt_length is "
      f"{limit}: raise it, or set data.overlong=drop"
    )
  if not kept:
    raise ValueError(
      f"{path}: every prompt is longer than rollout.max_prompt_length {limit}: raise it"
    )
  report = PromptReport(
    records=len(rows),
    kept=len(kept),
    longest=max(lengths),
    columns=tuple(name for name in rows[0] if name != PROMPTS),
  )
  return kept, report


def _batches(rows: Sequence[Row], config: Config, *, training: bool) -> PromptBatches:
  keys = config.training
  if not training:
    size = keys.eval_batch_size or keys.global_batch_size
    return PromptBatches(rows, size, seed=None, epochs=1)
  seed = config.seed if config.data.shuffle else None
  epochs = build_data.epochs(config)
  return PromptBatches(rows, keys.global_batch_size, seed=seed, epochs=epochs)


def _other_models(config: Config) -> dict[str, str]:
  """Digests of the models besides the one that is trained."""
  critic = config.rl.critic if config.rl.critic != "actor" else None
  return fingerprints.of_models(
    {
      "reference": config.rl.reference,
      "reward": config.reward.model,
      "critic": critic,
    }
  )


def count_steps(config: Config, report: PromptReport) -> int | None:
  """Updates of a run; None where dynamic sampling hides them.

  Mini-batches that would weigh nothing are left out, so that there may be fewer.
  """
  limit, passes = config.training.max_steps, build_data.epochs(config)
  algorithm = algorithms.algorithm_config(config)
  if passes is None or getattr(algorithm, "dynamic_sampling", False):
    return limit
  size = config.training.global_batch_size
  whole, rest = divmod(report.kept, size)
  # Without a size of its own a mini-batch is as large as the largest batch.
  mini = config.rl.mini_batch_size or min(size, report.kept)
  updates = whole * -(-size // mini) + -(-rest // mini)
  steps = updates * passes * algorithm.num_iterations
  return steps if limit is None else min(steps, limit)
