"""Reference log-probabilities that were written once and are read in every run."""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from tunix.data import answers
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.backbone import reference_of
from tunix.sft import inference
from tunix.sft.dpo.answer_trainer import logps_of
from tunix.sft.dpo.pairs import PAIR
from tunix.sft.dpo.preference_config import PreferenceConfig
from tunix.sft.dpo.reader import Reader, token_columns
from tunix.sft.module_state import is_lora
from tunix.utils import io as files, stamp, tree

_FILE = "reference_logps.npz"
_FORMAT = 2  # of the keys and of how they are kept


class PrecomputedLogps:
  """Log-probabilities of a reference model, written once and read in every run.

  They are found by the content of a prompt and its answer, whatever the order or the
  padding, and belong to one model: its content stamp is written beside them.

    PrecomputedLogps.write(folder, reference, batches, config, tokenizer)
    DPOTrainer(model, None, tx, config, reference_logps=PrecomputedLogps(folder))

  Raises:
    FileNotFoundError: nothing was written there.
    ValueError: the file is damaged, or of another version's format.
  """

  def __init__(self, folder: Any):
    self.path = pathlib.Path(folder) / _FILE
    try:
      with np.load(self.path, allow_pickle=False) as saved:
        about = json.loads(str(saved["about"]))
        self.model_stamp = about["model"]
        keys, values = saved["keys"], saved["logps"]
    except FileNotFoundError:
      raise FileNotFoundError(
        f"no {_FILE} in {str(folder)!r}: write it with PrecomputedLogps.write"
      ) from None
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
      raise ValueError(
        f"{self.path} is damaged ({error}): delete it and write it again"
      ) from error
    if (found := about.get("format", 1)) != _FORMAT:
      raise ValueError(
        f"{self.path} has format {found}, and this version reads {_FORMAT}: delete it "
        "and write it again"
      )
    self._logps = dict(zip(map(bytes, keys), values.tolist(), strict=True))

  def __len__(self) -> int:
    """Answers that it knows."""
    return len(self._logps)

  def check(self, model: nnx.Module) -> None:
    """Refuses another model.

    Args:
      model: the reference, or an adapted model: then what lies below its adapters.

    Raises:
      ValueError: its weights are not those that the file was written with.
    """
    found = model_stamp(model)
    if found != self.model_stamp:
      raise ValueError(
        f"{self.path} holds log-probabilities of the model {self.model_stamp}, and the "
        f"reference here is {found} (other weights or another dtype): write them anew "
        "with this model, or load the one they were written with"
      )

  def logps(self, rows: Mapping[str, Any], weights: np.ndarray) -> np.ndarray:
    """float32 [B, 2] of pairs; 0 in rows without weight.

    Raises:
      ValueError: a pair was not in the data that the file was written from.
    """
    out = np.zeros((len(weights), len(PAIR)), np.float32)
    for column, name in enumerate(PAIR):
      for row, key in _keys(rows, weights, name):
        if key not in self._logps:
          raise ValueError(
            f"the {name} answer of row {row} of the batch is not in {self.path}: it "
            "was written from other data, another tokenizer or other maximum lengths"
          )
        out[row, column] = self._logps[key]
    return out

  @staticmethod
  def write(
    folder: Any,
    model: nnx.Module,
    batches: Iterable[Any],
    config: PreferenceConfig | None = None,
    tokenizer: Any = None,
  ) -> PrecomputedLogps:
    """Scores every pair of the data and writes the file.

    Args:
      folder: made if missing. What it holds of the same model is kept.
      model: the reference; of an adapted model, what lies below its adapters.
      batches: what `train` would be given.
      config: maximum lengths, and what to do with bad rows.
      tokenizer: for text.

    Raises:
      ValueError: the folder belongs to another model; or see Reader.
    """
    config = PreferenceConfig() if config is None else config
    if is_lora(model):
      model = reference_of(model)
    known: dict[bytes, float] = {}
    path = pathlib.Path(folder) / _FILE
    if path.exists():
      before = PrecomputedLogps(folder)
      before.check(model)
      known |= before._logps
    if tokenizer is not None and not isinstance(tokenizer, TokenizerAdapter):
      tokenizer = TokenizerAdapter(tokenizer)
    reader = Reader(tokenizer, config.limits, config.bad_rows)
    score = logps_of(PAIR, False)
    for batch in batches:
      pairs = reader.pairs(batch)
      rows = token_columns(pairs)
      logps = inference.apply(model, score, rows, config.data_sharding_axis)
      for column, name in enumerate(PAIR):
        values = np.asarray(logps)[:, column].tolist()
        known |= {key: values[row] for row, key in _keys(rows, pairs.weights, name)}
    about = json.dumps({"format": _FORMAT, "model": model_stamp(model)})
    data = io.BytesIO()
    np.savez(
      data,
      about=np.asarray(about),
      keys=np.frombuffer(b"".join(known), np.uint8).reshape(-1, 16),
      logps=np.asarray(list(known.values()), np.float32),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, data.getvalue())
    return PrecomputedLogps(folder)


def model_stamp(model: nnx.Module) -> str:
  """Content stamp of a model's parameters without its adapters."""
  base = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
  return stamp.content_stamp(tree.flatten(base))


def _keys(
  rows: Mapping[str, Any], weights: np.ndarray, name: str
) -> Iterator[tuple[int, bytes]]:
  """(row, key) of an answer in every row with weight: a hash of what its score depends
  on, wherever the padding is."""
  for row in np.flatnonzero(weights):
    digest = hashlib.blake2b(digest_size=16)
    columns = [np.asarray(rows[f"{name}_{part}"][row]) for part in ("ids", "mask")]
    prompt = np.asarray(rows["prompt_ids"][row])[
      np.asarray(rows["prompt_mask"][row]) != 0
    ]
    for part in (prompt, *answers.seen_part(*columns)):
      whole = np.asarray(part, np.int64)
      digest.update(np.int64(len(whole)).tobytes() + whole.tobytes())
    yield int(row), digest.digest()
