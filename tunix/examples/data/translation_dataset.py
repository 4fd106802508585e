"""Fine-tuning data for translation from English to French: two named datasets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tunix.data.batching import map_datasets as maps
from tunix.sft.config import TrainingInput
from tunix.utils import optional

INPUT_TEMPLATE = {"prefix": "Translate this into French:\n", "suffix": "\n"}
# The turns of Gemma's chat template.
INPUT_TEMPLATE_IT = {
  "prefix": "<start_of_turn>user\nTranslate this into French:\n",
  "suffix": "\n<end_of_turn>\n<start_of_turn>model\n",
}


def create_datasets(
  dataset_name: str,
  global_batch_size: int,
  max_target_length: int,
  num_train_epochs: int | None,
  tokenizer: Any,
  instruct_tuned: bool = False,
  tfds_download: bool = True,
  input_template: Mapping[str, str] | None = None,
) -> tuple[Any, Any]:
  """Returns training and evaluation batches of `TrainingInput`.

  Only the target is trained. Rows are padded to `max_target_length`; longer examples
  are dropped. Each of several processes gets its rows of every batch. A last batch that
  is not full is dropped.

  Args:
    dataset_name: "mtnt/en-fr" (from `tensorflow_datasets`) or "Helsinki-NLP/opus-100"
      (from `datasets`).
    global_batch_size: number of rows of a batch, over all processes.
    max_target_length: number of tokens of a row, source and target together.
    num_train_epochs: number of passes over the training data; None: endless. Evaluation
      makes one pass.
    tokenizer: an object with `tokenize(text, prefix=, suffix=, add_eos=)`, `pad_id()`.
    instruct_tuned: if True, the default template is that of chat models.
    tfds_download: if True, `tensorflow_datasets` may download.
    input_template: {"prefix", "suffix"} around the source; None: the default template.

  Returns: training and evaluation `grain.IterDataset`s with resumable iterators.

  Raises:
    ImportError: the package of the dataset is missing.
    ValueError: an unknown name, a template without its two parts, or a batch size that
      the number of processes does not divide.
  """
  if global_batch_size < 1 or global_batch_size % jax.process_count():
    raise ValueError(
      f"global_batch_size is {global_batch_size}; expected a positive multiple of the "
      f"{jax.process_count()} processes"
    )
  template = INPUT_TEMPLATE_IT if instruct_tuned else INPUT_TEMPLATE
  template = dict(template if input_template is None else input_template)
  if template.keys() != {"prefix", "suffix"}:
    raise ValueError(
      f'input_template has {sorted(template)}; expected "prefix" and "suffix"'
    )
  row = functools.partial(
    _row, tokenizer=tokenizer, template=template, length=max_target_length
  )
  train, held_out = _sources(dataset_name, tfds_download)
  make = functools.partial(_batches, row=row, size=global_batch_size)
  return make(train, epochs=num_train_epochs), make(held_out, epochs=1)


def _sources(name: str, download: bool) -> tuple[Any, Any]:
  purpose = f"the dataset {name!r}"
  if name == "mtnt/en-fr":
    tfds = optional.require("tensorflow_datasets", purpose, "tensorflow-datasets")
    return tfds.data_source(name, split=("train", "valid"), download=download)
  if name == "Helsinki-NLP/opus-100":
    hub = optional.require("datasets", purpose, "datasets")
    splits = ["train", "validation"]
    return tuple(hub.load_dataset(name, data_dir="en-fr", split=splits))
  raise ValueError(
    f"dataset_name is {name!r}; expected 'mtnt/en-fr' or 'Helsinki-NLP/opus-100'. "
    "Write other data as JSON lines, see docs/guides/data.md"
  )


def _batches(source: Any, *, row: Any, size: int, epochs: int | None) -> Any:
  rows = maps.as_map_dataset(source).repeat(epochs).map(row)
  # A filtered dataset has no random access; all processes read the same stream.
  stream = rows.filter(lambda x: x is not None).to_iter_dataset()
  return stream.batch(size, drop_remainder=True, batch_fn=_stacked)


def _row(
  record: Mapping[str, Any], *, tokenizer: Any, template: dict[str, str], length: int
) -> TrainingInput | None:
  """Returns a padded row; None if the example is too long."""
  source, target = _pair(record)
  shown = tokenizer.tokenize(source, **template, add_eos=False)
  trained = tokenizer.tokenize(target, add_eos=True)
  count = len(shown) + len(trained)
  if count > length:
    return None
  tokens = np.full(length, tokenizer.pad_id(), np.int32)
  tokens[:count] = np.concatenate([shown, trained])
  mask = np.zeros(length, bool)
  mask[len(shown) : count] = True
  return TrainingInput(input_tokens=tokens, input_mask=mask)


def _pair(record: Mapping[str, Any]) -> tuple[str, str]:
  if "translation" in record:
    return record["translation"]["en"], record["translation"]["fr"]
  source, target = (record[name] for name in ("src", "dst"))

  def decode(x):
    return x.decode() if isinstance(x, bytes) else x

  return decode(source), decode(target)


def _stacked(rows: Any) -> TrainingInput:
  """Returns this process's rows of a batch."""
  count = len(rows) // jax.process_count()
  mine = rows[jax.process_index() * count :][:count]
  return TrainingInput(
    input_tokens=np.stack([row.input_tokens for row in mine]),
    input_mask=np.stack([row.input_mask for row in mine]),
  )
