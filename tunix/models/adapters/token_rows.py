"""Trained rows of single tokens beside adapters: PEFT's `trainable_token_indices`.

PEFT keeps the rows, not their change, in one tensor for each table. The tensors are
"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta" and the same
of an untied `lm_head`, see
https://huggingface.co/docs/peft/package_reference/trainable_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tunix.models import new_tokens
from tunix.models.adapters import whole_files
from tunix.models.families import Family
from tunix.models.files.tensor_files import NewTensor, StoredTensor
from tunix.models.transformer import params
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.token_rows import TokenRows, written
from tunix.utils import mesh as mesh_lib

FIELD = "trainable_token_indices"
_TENSOR = ".token_adapter.trainable_tokens_delta"
_MOST_NEW = 65536  # tokens that an adapter may add to its base model
_FROZEN = ".token_adapter.base_layer.weight"
# Parameter of the rows -> the frozen parameter that they replace.
TABLES = {
  "token_rows.lora_input": "embed_tokens.embedding",
  "token_rows.lora_output": "lm_head.kernel",
}


def of(model: Transformer) -> dict[str, nnx.LoRAParam]:
  """Returns the trained rows by path, a part of the keys of `TABLES`."""
  rows = model.token_rows
  if rows is None:
    return {}
  values = zip(TABLES, (rows.lora_input, rows.lora_output))
  return {path: value for path, value in values if value is not None}


def attach(
  model: Transformer, ids: Sequence[int], dtype: DTypeLike, whole: Sequence[str] = ()
) -> None:
  """Makes the rows of some tokens trainable, in place.

  Args:
    model: a model that shares no modules with another one.
    ids: the token ids; none changes nothing.
    dtype: dtype of the trained rows. They begin with the numbers of the model's rows.
    whole: paths of modules that are trained whole.

  Raises:
    ValueError: an id is not in the vocabulary or is named twice, or all rows of a table
      are trained.
  """
  if not ids:
    return
  ids, size = tuple(sorted(ids)), model.config.vocab_size
  if ids[0] < 0 or ids[-1] >= size or len(set(ids)) < len(ids):
    raise ValueError(
      f"{FIELD} is {list(ids)!r:.80}; expected different ids from 0 to {size - 1}"
    )
  if both := sorted({"embed_tokens", "lm_head"} & set(whole)):
    raise ValueError(
      f"{FIELD} is set and modules_to_save has {both[0]}, which trains all rows. Name "
      "both embed_tokens and lm_head there, or neither"
    )
  head: Any = None if model.lm_head is None else model.lm_head.kernel
  output = None if head is None else _rows(head, ids, dtype, tied=False)
  rows = _rows(model.embed_tokens.embedding, ids, dtype, tied=True)
  model.token_rows = nnx.data(TokenRows(ids, rows, output))


def _rows(
  table: nnx.Param, ids: tuple[int, ...], dtype: DTypeLike, *, tied: bool
) -> nnx.LoRAParam:
  """Returns rows [n, D] of a table [V, D], or [D, V] if not `tied`."""
  spec = (None, table.get_metadata("out_sharding")[1 if tied else 0])

  def take(x):
    return (x if tied else x.T)[np.array(ids)].astype(dtype)

  rows = new_tokens.built(take, spec, table.get_value())
  return nnx.LoRAParam(rows, out_sharding=spec, eager_sharding=False)


def merge(model: Transformer) -> None:
  """Writes the trained rows into the tables of a model, in place."""
  rows = model.token_rows
  if rows is None:
    return

  def change(table, new):
    return written(table, rows.ids, new)

  new_tokens.change_embedding(model, change, rows.lora_input.get_value())
  if rows.lora_output is not None:
    new_tokens.change_unembedding(model, change, rows.lora_output.get_value())
  model.token_rows = nnx.data(None)


def merged(model: Transformer) -> Transformer:
  """Returns the model with its trained rows written; the model itself without any."""
  if getattr(model, "token_rows", None) is None:
    return model
  out = nnx.clone(model)
  merge(out)
  return out


def _module(model: Transformer, family: Family, path: str) -> str:
  """Returns Hugging Face's name of the module whose rows a parameter replaces."""
  key = params.place(family.names, TABLES[path], model.config).keys[0]
  return whole_files.module_of(key)


def peft_fields(model: Transformer, family: Family) -> dict[str, Any]:
  """Returns the field of `adapter_config.json`; {} for a model without trained rows.

  A list selects the embedding, and a tied unembedding with it. A dict names modules.
  """
  rows = of(model)
  if model.token_rows is None:
    return {}
  ids = list(model.token_rows.ids)
  if len(rows) == 1 and model.lm_head is None:
    return {FIELD: ids}
  names = (_module(model, family, path).rpartition(".")[2] for path in rows)
  return {FIELD: dict.fromkeys(names, ids)}


def tensors(model: Transformer, family: Family) -> Iterator[NewTensor]:
  """Yields the tensors of the trained rows."""
  for path, variable in of(model).items():
    value = mesh_lib.to_host(variable.get_value())
    name = whole_files.PREFIX + _module(model, family, path) + _TENSOR
    yield NewTensor(name, value.dtype, value.shape, lambda value=value: value)


def read(
  model: Transformer,
  family: Family,
  stored: dict[str, StoredTensor],
  peft: Mapping[str, Any],
) -> dict[str, np.ndarray]:
  """Returns the rows of a PEFT folder by path, as in `of`.

  Args:
    model: the model that the adapter is loaded into.
    family: the kind of model.
    stored: the tensors of the adapter's file. The tensors of the rows are removed.
    peft: the contents of `adapter_config.json`.

  Raises:
    ValueError: see `ids_of`, a tensor is missing or of another shape, or the file holds
      whole tables, which PEFT adds after a change of the vocabulary's size.
  """
  out, ids = {}, ids_of(peft)
  if frozen := [key for key in stored if key.endswith(_FROZEN)]:
    raise ValueError(
      f"the file holds the whole table {frozen[0]!r}: save the adapter with PEFT's "
      "save_pretrained(folder, save_embedding_layers=False), or merge it"
    )
  for path in TABLES if ids else ():
    if path == "token_rows.lora_output" and model.lm_head is None:
      continue
    name = whole_files.PREFIX + _module(model, family, path) + _TENSOR
    # PEFT's list selects the embedding only.
    if path == "token_rows.lora_input" or name in stored:
      shape = (len(ids), model.config.embed_dim)
      out[path] = whole_files.read_tensor(stored, name, shape)
      del stored[name]
  return out


def ids_of(peft: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns the token ids of `adapter_config.json`, in the order of the stored rows.

  Raises:
    ValueError: two modules have different ids, or a value is no id.
  """
  field = peft.get(FIELD) or []
  lists = list(field.values()) if isinstance(field, dict) else [field]
  first = lists[0]
  is_list = isinstance(first, list) and all(type(i) is int and i >= 0 for i in first)
  if not is_list or any(other != first for other in lists):
    raise ValueError(
      f"{FIELD} is {field!r:.80}; expected one list of ids for all modules. "
      "Merge the adapter with PEFT, and load the merged model"
    )
  return tuple(first)


def with_room(model: Transformer, ids: Sequence[int]) -> Transformer:
  """Returns a model whose embedding has rows for all ids, see `new_tokens.with_rows`.

  Raises:
    ValueError: an id is far above the vocabulary, as in a damaged file.
  """
  size, end = model.config.vocab_size, max(ids, default=0) + 1
  if end > size + _MOST_NEW:
    raise ValueError(
      f"{FIELD} has {end - 1} and the model has {size} tokens; expected at most "
      f"{_MOST_NEW} new ones. The adapter belongs to another model"
    )
  return new_tokens.with_rows(model, range(size, end))


def with_tables(model: Transformer, stored: Mapping[str, StoredTensor]) -> Transformer:
  """Returns a model with as many embeddings as a table that was trained whole.

  Raises:
    ValueError: see `with_room`.
  """
  tables = [x for key, x in stored.items() if key.endswith(".embed_tokens.weight")]
  return with_room(model, [x.shape[0] - 1 for x in tables if x.shape])


def load(
  model: Transformer, ids: tuple[int, ...], rows: Mapping[str, np.ndarray]
) -> None:
  """Attaches stored rows to a model, in place.

  Args:
    model: a model that shares no modules with another one.
    ids: see `ids_of`.
    rows: what `read` returned.
  """
  if not rows:
    return
  order = np.argsort(ids)
  attach(model, ids, next(iter(rows.values())).dtype)
  assert model.token_rows is not None
  if "token_rows.lora_output" not in rows:
    model.token_rows.lora_output = nnx.data(None)
  for path, variable in of(model).items():
    where = variable.get_value().sharding
    variable.set_value(jax.device_put(rows[path][order], where))
