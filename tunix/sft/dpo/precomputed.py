"""PrecomputedLogps: a reference's log-probabilities, computed once and kept on disk."""

from __future__ import annotations

import json
import pathlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.data import batches as reading, render
from tunix.data.batches import PAIR
from tunix.data.reading.store import RowStore, row_key, without_blanks
from tunix.models.backbone import reference_of
from tunix.sft import inference
from tunix.sft.checkpoints import stamp
from tunix.sft.dpo.completions import logps_of, token_columns
from tunix.sft.dpo.preference_config import DPOTrainingConfig
from tunix.sft.losses import batch_fields
from tunix.sft.steps.module_state import is_lora
from tunix.utils import coordination, mesh as mesh_lib, tree
from tunix.utils.io import write_json

_ABOUT = "reference.json"
_FORMAT = 3
_FILE = "reference_logps.npz"  # the one file of format 2, which is still read
_FILE_FORMAT = 2


class PrecomputedLogps:
  """Log-probabilities of a reference model on disk.

  They are stored by the content of a prompt and its completion, independent of order
  and padding. They belong to one model, whose content stamp is stored with them.

    PrecomputedLogps.write(folder, reference, batches, config, tokenizer)
    DPOTrainer(model, None, tx, config, reference_logps=PrecomputedLogps(folder))

  Args:
    folder: the folder that `write` has written.

  Raises:
    FileNotFoundError: The folder has no log-probabilities, or not all of them.
    ValueError: A file is damaged, or has the format of another version.
  """

  def __init__(self, folder: Any):
    self.folder = pathlib.Path(folder)
    about = _about(self.folder)
    if not about.get("complete"):
      raise FileNotFoundError(
        f"no reference log-probabilities in {str(folder)!r}, or not all of them: write "
        "them with PrecomputedLogps.write, which continues an interrupted call"
      )
    self.model_stamp = about["model"]
    self._rows = _open(self.folder)

  def __len__(self) -> int:
    """Returns the number of stored completions."""
    return len(self._rows)

  def check(self, model: nnx.Module) -> None:
    """Refuses a model other than the one of the stored log-probabilities.

    Args:
      model: the reference, or a model whose weights without adapters are the reference.

    Raises:
      ValueError: The model has other weights.
    """
    _check(self.folder, self.model_stamp, model)

  def logps(self, rows: Mapping[str, Any], weights: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities of pairs, float32 [B, 2]; 0 in rows of weight 0.

    Args:
      rows: ids and masks of prompts and completions.
      weights: weights of the rows, [B].

    Raises:
      ValueError: A pair was not in the data of `write`.
    """
    out = np.zeros((len(weights), len(PAIR)), np.float32)
    for column, name in enumerate(PAIR):
      for row, key in _keys(rows, weights, name):
        if key not in self._rows:
          raise ValueError(
            f"the {name} completion of row {row} of the batch is not in {self.folder}, "
            "which was written with other data, another tokenizer or other maximum "
            "lengths"
          )
        [out[row, column]] = self._rows.take([key], "logps")
    return out

  @staticmethod
  def write(
    folder: Any,
    model: nnx.Module,
    batches: Iterable[Any],
    config: DPOTrainingConfig | None = None,
    tokenizer: object = None,
  ) -> PrecomputedLogps:
    """Scores all pairs of the data, and writes those that are not stored yet.

    Several processes compute together, with a model on a mesh over all of them. The
    first process writes the same files as a run of one process.

    Args:
      folder: the folder, which is made if missing. Its log-probabilities of the same
        model are kept.
      model: the reference; adapters of the model are left out.
      batches: batches as for `train`. With several processes each of them passes whole
        batches.
      config: maximum lengths and the treatment of bad rows.
      tokenizer: tokenizer of text batches.

    Raises:
      ValueError: The folder belongs to another model; or see `batches.read_pairs`.
    """
    config = DPOTrainingConfig() if config is None else config
    if is_lora(model):
      model = reference_of(model)
    folder = pathlib.Path(folder)
    if about := _about(folder):
      _check(folder, about["model"], model)
    # The model's stamp is written first. The mark of completeness is written last.
    about = {"format": _FORMAT, "model": model_stamp(model), "complete": False}
    store, score = _open(folder), logps_of(PAIR, False)
    # All processes must have counted the stored rows before the first process writes.
    coordination.agree(
      "reference log-probabilities on disk",
      {"rows": str(len(store))},
      "name a folder that all processes see",
    )
    _write_about(folder, about)
    options = config.text_options(tokenizer)
    for batch in batches:
      pairs = reading.read_pairs(batch_fields(batch), options)
      rows = token_columns(pairs)
      new = {
        key: (row, column)
        for column, name in enumerate(PAIR)
        for row, key in _keys(rows, pairs["weights"], name)
        if key not in store
      }
      if new:
        axes = config.data_sharding_axis
        logps = inference.apply(model, score, rows, axes, whole=True)
        places = tuple(np.asarray(list(new.values())).T)
        values = np.asarray(mesh_lib.to_host(logps), np.float32)[places]
        store.add({"logps": values}, list(new))
    _write_about(folder, {**about, "complete": True})
    return PrecomputedLogps(folder)


def _write_about(folder: pathlib.Path, about: dict[str, Any]) -> None:
  """Writes the description in the first process; all processes wait for it."""
  if jax.process_index() == 0:
    write_json(folder / _ABOUT, about)
  coordination.gather("reference log-probabilities", None)


def model_stamp(model: nnx.Module) -> str:
  """Returns the content stamp of a model's parameters without its adapters."""
  base = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
  return stamp.content_stamp(tree.flatten(base))


def _check(folder: pathlib.Path, written: str, model: nnx.Module) -> None:
  ours = model_stamp(model)
  if ours != written:
    raise ValueError(
      f"{folder} holds log-probabilities of the model {written}, and the reference "
      f"here is {ours} (other weights or another dtype). Write them with this model "
      "into another folder, or load the model that they were written with."
    )


def _about(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the folder's description; {} if there is none."""
  path = folder / _ABOUT
  if path.exists():
    about, expected = json.loads(path.read_text()), _FORMAT
  elif (folder / _FILE).exists():
    path, expected = folder / _FILE, _FILE_FORMAT
    about = {**json.loads(str(_old_file(path)["about"])), "complete": True}
  else:
    return {}
  if (written := about.get("format", 1)) != expected:
    raise ValueError(
      f"{path} has format {written}; expected {expected}. Delete it and write it again."
    )
  return about


def _open(folder: pathlib.Path) -> RowStore:
  """Returns the stored rows, including those of a file of format 2."""
  store = RowStore(folder)
  if (folder / _FILE).exists():
    old = _old_file(folder / _FILE)
    store.hold({"logps": old["logps"]}, [key.tobytes().hex() for key in old["keys"]])
  return store


def _old_file(path: pathlib.Path) -> dict[str, np.ndarray]:
  try:
    with np.load(path, allow_pickle=False) as saved:
      return {name: saved[name] for name in ("about", "keys", "logps")}
  except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
    raise ValueError(
      f"{path} is damaged ({error}). Delete it and write it again."
    ) from error


def _keys(
  rows: Mapping[str, Any], weights: np.ndarray, name: str
) -> Iterator[tuple[int, str]]:
  """Yields (row, key) for the named completion of each row whose weight is not 0.

  The key is a hash of all tokens and images that the score depends on, without padding.
  """
  images = [np.asarray(x) for x in jax.tree.leaves(rows.get("images"))]
  for row in np.flatnonzero(weights):
    columns = [np.asarray(rows[f"{name}_{part}"][row]) for part in ("ids", "mask")]
    shown = np.asarray(rows["prompt_mask"][row]) != 0
    prompt = np.asarray(rows["prompt_ids"][row])[shown]
    seen = (prompt, *render.seen_part(*columns))
    parts = [np.asarray(part, np.int64) for part in seen]
    parts += [part for x in images if len(part := without_blanks(x[row]))]
    yield (
      int(row),
      row_key(np.int64(len(part)).tobytes() + part.tobytes() for part in parts),
    )
