"""Names, shapes and dtypes of arrays in a checkpoint, compared with those asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from tunix.sft.checkpoint_errors import MismatchError
from tunix.utils import tree


def check(
  where: str, in_it: Mapping[str, Any], here: Mapping[str, Any], partial: bool
) -> None:
  """Compares what was saved with what is wanted, by name; nothing is read yet.

  Args:
    where: begins the message: which checkpoint does not fit.
    in_it: arrays of the checkpoint.
    here: arrays that are wanted.
    partial: it may hold more.

  Raises:
    MismatchError: names those that are missing, unexpected or of another form.
  """
  saved = {k: _form(tuple(v.shape), v.dtype) for k, v in in_it.items()}
  wanted = {k: _stored(v) for k, v in here.items()}
  extra = set() if partial else saved.keys() - wanted.keys()
  problems = [f"{k} is not in it" for k in sorted(wanted.keys() - saved.keys())]
  problems += [f"it has {k} besides" for k in sorted(extra)]
  problems += [
    f"{k} is {saved[k]} in it and {wanted[k]} here"
    for k in sorted(wanted.keys() & saved.keys())
    if wanted[k] != saved[k]
  ]
  if problems:
    shown = "; ".join(problems[:4]) + ("; ..." if len(problems) > 4 else "")
    raise MismatchError(
      f"{where}: {shown}. Resume with the model, LoRA and optimizer settings it was "
      "made with, or use another folder"
    )


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  """Form and layout of an array."""
  sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def of_metadata(metadata: Any) -> dict[str, Any]:
  """Orbax's metadata of an item, by name.

  Raises:
    FileNotFoundError: it is gone.
  """
  if metadata is None:
    raise FileNotFoundError("the metadata of its arrays is missing")
  inner = getattr(metadata, "tree", metadata)
  flat = jax.tree_util.tree_flatten_with_path(
    inner, is_leaf=lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
  )[0]
  return {tree.path_name(path): leaf for path, leaf in flat}


def _stored(leaf: Any) -> str:
  """Dtype and shape on disk: random keys are stored as their data."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.eval_shape(jax.random.key_data, leaf)
  return _form(tuple(leaf.shape), leaf.dtype)


def _form(shape: tuple[int, ...], dtype: Any) -> str:
  return f"{jax.numpy.dtype(dtype).name}{list(shape)}"
