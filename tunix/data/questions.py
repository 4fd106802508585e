"""Prompts for scripts of reinforcement learning, and questions such as GSM8K."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tunix.data import fields
from tunix.data.batching import map_datasets as maps
from tunix.data.batching.prompts import PromptBatches, PromptText, with_equal_room
from tunix.data.images import ImageReader
from tunix.data.reading.jsonl import JsonlRecords
from tunix.data.reading.stored import HeldRecords, Records
from tunix.data.records import PROMPT_ROWS, Kind, Record
from tunix.data.scan import scan
from tunix.data.source import Source
from tunix.generate.tokenizer_adapter import TokenizerAdapter
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
  """Returns questions in an order determined by the seed.

  Args:
    path: file of JSON lines {"question", "answer"}, or a folder with such a file named
      `{split}.jsonl`; any other path is the data folder of `tensorflow_datasets`.
    split: split of the data set.
    seed: seed of the order.
    system_prompt: text before each question, within the user's turn, because some
      models have no system turn; may be empty.
    answer_extractor: reference solution -> final answer. None leaves the record out.
    dataset_name: name in `tensorflow_datasets`, used if `path` has no file.

  Returns:
    A `grain.MapDataset` of {"prompts": messages, "question", "answer"}.

  Raises:
    FileNotFoundError: a path that ends with .json or .jsonl does not exist.
    ImportError: there is no file, and `tensorflow_datasets` is missing.
    ValueError: no question is left, or a record has other columns.
  """
  records = _records(pathlib.Path(path), split, dataset_name)
  rows = []
  for index in np.random.default_rng(seed).permutation(len(records)):
    record = records[int(index)]
    answer = answer_extractor(record["answer"])
    if answer is None:
      continue
    question = record["question"]
    text = f"{system_prompt}\n\n{question}" if system_prompt else question
    prompt = [{"role": "user", "content": text}]
    rows.append({"prompts": prompt, "question": question, "answer": answer})
  if not rows:
    raise ValueError(
      f"answer_extractor finds no answer in any of the {len(records)} records of {path}"
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
  """Returns training and evaluation batches of one split, with disjoint questions.

  Args:
    data_path, split, seed, system_prompt, answer_extractor, dataset_name: as for
      `get_dataset`.
    batch_size: questions of a batch; a remainder is dropped.
    num_batches: largest number of batches of each part; None for all.
    train_fraction: share of the ordered questions that is for training, in (0, 1].
    num_epochs: passes over the training part; None for one.

  Returns:
    (training, evaluation) batches {"prompts": [...], "question", "answer"}; the second
    is None if `train_fraction` is 1.

  Raises:
    ValueError: a value is out of range, or a part has no full batch.
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


def build_prompts(
  records: Sequence[Mapping[str, Any]],
  tokenizer: TokenizerAdapter,
  *,
  batch_size: int,
  max_prompt_length: int,
  overlong: Literal["error", "drop"] = "error",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
  images: ImageReader | None = None,
  seed: int | None = 0,
  num_epochs: int | None = 1,
) -> PromptBatches:
  """Returns batches of prompts with their columns, for `RLLearner.train`.

  Args:
    records: prompts with columns, see PROMPT_ROWS in `tunix.data.records`.
    tokenizer: tokenizer with the chat template.
    batch_size: prompts of a batch.
    max_prompt_length: tokens of a prompt, with those of its images.
    overlong: treatment of longer prompts.
    chat, template_kwargs: see `tunix.data.source.Source`.
    images: reads the images of the prompts; None refuses images. Give the same reader
      to RLCluster.
    seed: seed of a new order in every epoch; None keeps the order.
    num_epochs: number of passes; None never ends.

  Raises:
    ValueError: a record or an image is wrong, or no prompt is left; names its place.
  """
  source = Source(
    records=records,
    kind=PROMPT_ROWS,
    tokenizer=tokenizer,
    layout=PromptText(max_prompt_length=max_prompt_length),
    overlong=overlong,
    chat=chat,
    template_kwargs=template_kwargs,
    images=images,
  )
  rows: dict[int, Any] = {}
  scan(source, kept=rows)
  return PromptBatches(
    with_equal_room(list(rows.values())), batch_size, seed=seed, epochs=num_epochs
  )


def _records(path: pathlib.Path, split: str, dataset_name: str) -> Records:
  file = path / f"{split}.jsonl" if path.is_dir() else path
  if file.is_file() or path.suffix in (".json", ".jsonl"):
    return JsonlRecords(file, QUESTIONS)
  tfds = optional.require(
    "tensorflow_datasets",
    f"reading {dataset_name!r} ({path} holds no {split}.jsonl)",
    "tensorflow-datasets",
  )
  source = tfds.data_source(dataset_name, split=split, data_dir=str(path))
  return HeldRecords(source, QUESTIONS, name=dataset_name)


def _read(record: Any, where: str) -> Record:
  fields.check_mapping(record, where, QUESTIONS.expected)
  if not {"question", "answer"} <= record.keys():
    raise ValueError(f"{where}: found {fields.describe(record)}, {QUESTIONS.expected}")
  return Record("question", record["question"], {"answer": record["answer"]}, {}, None)


QUESTIONS = Kind(
  name="question",
  expected='expected {"question": text, "answer": text}',
  read=_read,
  completions=("answer",),
  noun="questions",
)
