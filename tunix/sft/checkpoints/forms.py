"""Comparison of a checkpoint with the arrays to restore: names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.typing import DTypeLike

from tunix.sft.checkpoints.errors import MismatchError
from tunix.utils import tree


def check(
  subject: str, saved: Mapping[str, Any], target: Mapping[str, Any], partial: bool
) -> None:
  """Compares saved arrays with the arrays to restore, before anything is read.

  Args:
    subject: first words of the message, which name the checkpoint.
    saved: metadata of the checkpoint's arrays, by name.
    target: the arrays to restore, by name.
    partial: the checkpoint may have further arrays.

  Raises:
    MismatchError: Arrays are missing, unexpected, or of another shape or dtype; the
      message names them.
  """
  theirs = {k: _form(tuple(v.shape), v.dtype) for k, v in saved.items()}
  ours = {k: _stored(v) for k, v in target.items()}
  extra = set() if partial else theirs.keys() - ours.keys()
  problems = [f"{k} is not in it" for k in sorted(ours.keys() - theirs.keys())]
  problems += [f"it also has {k}" for k in sorted(extra)]
  problems += [
    f"{k} is {theirs[k]} in it and {ours[k]} here"
    for k in sorted(ours.keys() & theirs.keys())
    if ours[k] != theirs[k]
  ]
  if problems:
    shown = "; ".join(problems[:4]) + ("; ..." if len(problems) > 4 else "")
    raise MismatchError(
      f"{subject}: {shown}. Resume with the model, LoRA and optimizer settings that it "
      "was written with, or use another folder."
    )


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape, dtype and sharding of an array."""
  sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def of_metadata(metadata: object) -> dict[str, Any]:
  """Returns the metadata of an item's arrays by name.

  Args:
    metadata: orbax's metadata of the item.

  Raises:
    FileNotFoundError: The metadata is missing.
  """
  if metadata is None:
    raise FileNotFoundError("the metadata of its arrays is missing")
  inner = getattr(metadata, "tree", metadata)
  flat = jax.tree_util.tree_flatten_with_path(
    inner, is_leaf=lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
  )[0]
  return {tree.path_name(path): leaf for path, leaf in flat}


def _stored(leaf: Any) -> str:
  """Returns dtype and shape as stored on disk; a random key is stored as its data."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.eval_shape(jax.random.key_data, leaf)
  return _form(tuple(leaf.shape), leaf.dtype)


def _form(shape: tuple[int, ...], dtype: DTypeLike) -> str:
  return f"{jax.numpy.dtype(dtype).name}{list(shape)}"
