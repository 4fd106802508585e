"""Modules that are trained whole beside adapters: PEFT's `modules_to_save`.

Their parameters are `nnx.LoRAParam`s. Trainers and checkpoints find the trained
parameters of an adapted model by this type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
from flax import nnx
from jax.typing import DTypeLike

from tunix.models.adapters import lora_modules
from tunix.models.transformer.model import Transformer


def of(model: nnx.Module) -> dict[str, nnx.LoRAParam]:
  """Returns the parameters that are trained whole, by dotted path."""
  return {
    ".".join(map(str, path)): node
    for path, node in nnx.iter_graph(model)
    if isinstance(node, nnx.LoRAParam) and "lora_" not in str(path[-1])
  }


def choose(model: Transformer, names: Iterable[str] | None) -> list[str]:
  """Returns the paths of the modules that the names select.

  Args:
    model: the model.
    names: names or patterns, matched as in `LoraConfig.targets`. None selects the score
      head of a model that has one, because a random head that is not trained gives
      meaningless scores.

  Raises:
    ValueError: a name matches no module that can be trained whole; the message lists
      the modules. Or it selects an embedding table that is tied to the unembedding.
  """
  if names is None:
    return [] if model.score is None else ["score"]
  paths = [path for path, _ in _modules(model)]
  chosen: set[str] = set()
  for name in names:
    matched = [path for path in paths if lora_modules.hits(name, path)]
    if not matched:
      raise ValueError(
        f"modules_to_save {name!r} matches no module with weights that can be trained "
        f"(quantized ones cannot); modules are {', '.join(paths)}"
      )
    chosen.update(matched)
  tied = model.config.tie_embeddings and model.score is None
  if "embed_tokens" in chosen and tied:
    raise ValueError(
      "modules_to_save 'embed_tokens': the embedding of this model is its unembedding "
      "too, and PEFT would untie the two: leave it out, or train without adapters"
    )
  return [path for path in paths if path in chosen]


def mark(
  model: Transformer, modules: Iterable[str], dtype: DTypeLike | None = None
) -> None:
  """Marks modules as trained whole, in place.

  Args:
    model: a model that shares no modules with another one.
    modules: paths, as `choose` returns them.
    dtype: the new dtype of their parameters; None keeps it.
  """
  _retype(model, set(modules), nnx.LoRAParam, dtype)


def unmark(model: Transformer) -> None:
  """Turns all parameters that are trained whole into ordinary ones, in place."""
  modules = {path.rpartition(".")[0] for path in of(model)}
  _retype(model, modules, nnx.Param, None)


def _modules(model: Transformer) -> Iterator[tuple[str, nnx.Module]]:
  """Yields the modules that hold parameters directly, with their paths."""
  for path, module in nnx.iter_modules(model):
    if isinstance(module, nnx.Module) and any(_parameters(module)):
      yield ".".join(map(str, path)), module


def _parameters(module: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
  for name, value in vars(module).items():
    # Codes and scales belong to a quantized kernel, lora_* to an adapter.
    if name.startswith(("codes", "scales", "lora_")):
      continue
    if isinstance(value, nnx.Param):
      yield name, value


def _retype(
  model: Transformer, modules: set[str], kind: type[nnx.Param], dtype: DTypeLike | None
) -> None:
  for path, module in _modules(model):
    if path not in modules:
      continue
    for name, value in list(_parameters(module)):
      array: jax.Array = value.get_value()
      spec = value.get_metadata("out_sharding")
      new = array if dtype is None else array.astype(dtype)
      setattr(
        module, name, nnx.data(kind(new, out_sharding=spec, eager_sharding=False))
      )
