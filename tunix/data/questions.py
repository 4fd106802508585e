"""Questions with answers for scripts of reinforcement learning: GSM8K and its kind."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tunix.data import map_datasets as maps
from tunix.utils import optional

Extract = Callable[[str], str | None]


def get_dataset(
  path: str,
  split: str,
  seed: int,
  system_prompt: str,
  *,
  answer_extractor: Extract,
  dataset_name: str = "gsm8k",
) -> Any:
  """Questions in a seeded order.

  Args:
    path: a file of JSON lines {"question", "answer"}, or a folder with one called
      `{split}.jsonl`; else where `tensorflow_datasets` keeps its data.
    split: of the dataset.
    seed: of the order.
    system_prompt: goes before each question, in the user's turn (some models know no
      other one); may be empty.
    answer_extractor: a reference solution -> its final answer; a record for which it
      gives None is left out.
    dataset_name: of `tensorflow_datasets`, where `path` holds no file.

  Returns: a `grain.MapDataset` of {"prompts": messages, "question", "answer"}.

  Raises:
    ImportError: there is no file, and the package is missing.
    ValueError: no question is left, or a record has other columns.
  """
  records = _records(pathlib.Path(path), split, dataset_name)
  rows = []
  for index in np.random.default_rng(seed).permutation(len(records)):
    record = {name: _text(value) for name, value in records[int(index)].items()}
    if not {"question", "answer"} <= record.keys():
      raise ValueError(
        f"record {index} of {path} has the columns {sorted(record)}: expected "
        '"question" and "answer"'
      )
    answer = answer_extractor(record["answer"])
    if answer is None:
      continue
    question = record["question"]
    text = f"{system_prompt}\n\n{question}" if system_prompt else question
    prompt = [{"role": "user", "content": text}]
    rows.append({"prompts": prompt, "question": question, "answer": answer})
  if not rows:
    raise ValueError(
      f"none of {len(records)} records of {path} has an answer that answer_extractor "
      "finds"
    )
  return maps.as_map_dataset(rows)


def get_train_and_eval_datasets(
  data_path: str,
  split: str,
  seed: int,
  system_prompt: str,
  batch_size: int,
  num_batches: int | None,
  train_fraction: float,
  num_epochs: int | None,
  *,
  answer_extractor: Extract,
  dataset_name: str = "gsm8k",
) -> tuple[Any, Any]:
  """Training and evaluation batches of one split, with no question in both.

  Args:
    data_path, split, seed, system_prompt, answer_extractor, dataset_name: see
      `get_dataset`.
    batch_size: questions of a batch; a remainder is dropped.
    num_batches: at most so many of each; None: all.
    train_fraction: of the questions, after they were put in order; in (0, 1].
    num_epochs: passes over the training part; None: one.

  Returns: (training, evaluation) batches {"prompts": [...], "question", "answer"}; the
    second is None with `train_fraction` 1.

  Raises:
    ValueError: a value out of range, or not one whole batch in a part.
  """
  if not 0 < train_fraction <= 1:
    raise ValueError(
      f"train_fraction is {train_fraction}: it must be above 0 and at most 1"
    )
  every = get_dataset(
    data_path,
    split,
    seed,
    system_prompt,
    answer_extractor=answer_extractor,
    dataset_name=dataset_name,
  )
  count = int(len(every) * train_fraction)
  train = maps.batches(every[:count], batch_size, num_batches, num_epochs or 1)
  if train_fraction == 1:
    return train, None
  return train, maps.batches(every[count:], batch_size, num_batches)


def _records(path: pathlib.Path, split: str, dataset_name: str) -> Any:
  file = path / f"{split}.jsonl" if path.is_dir() else path
  if file.is_file():
    return _read(file)
  if path.suffix in (".json", ".jsonl"):
    raise FileNotFoundError(f"there is no file {path}: give a file of JSON lines")
  tfds = optional.require(
    "tensorflow_datasets",
    f"reading {dataset_name!r} ({path} holds no {split}.jsonl)",
    "tensorflow-datasets",
  )
  return tfds.data_source(dataset_name, split=split, data_dir=str(path))


def _read(file: pathlib.Path) -> list[Any]:
  records = []
  for number, line in enumerate(file.read_text().splitlines(), start=1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except ValueError as error:
      raise ValueError(f"{file}:{number}: it is no JSON ({error})") from error
    if not isinstance(record, dict):
      raise ValueError(f"{file}:{number}: expected an object, found {line[:40]!r}")
    records.append(record)
  return records


def _text(value: Any) -> Any:
  return value.decode() if isinstance(value, bytes) else value
