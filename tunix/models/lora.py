"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on the decoder's layers.

y = x W + (alpha / r) x A B, with A [in, r] drawn and B [r, out] zero, so that a fresh
adapter changes nothing. A and B are `nnx.LoRAParam`s beside the kernel that they
adapt; the trainer finds them by that type. The base weights are shared, not copied.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tunix.models import families, lora_modules, tensor_files
from tunix.models.families import Family
from tunix.models.tensor_files import NewTensor, StoredTensor
from tunix.models.transformer import hf_config, params
from tunix.models.transformer.model import Transformer

ALL_LINEAR = (
  "q_proj",
  "k_proj",
  "v_proj",
  "o_proj",
  "gate_proj",
  "up_proj",
  "down_proj",
)
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
# Options of PEFT adapters whose values change the mathematics, and what we do.
_PEFT_SUPPORTED: dict[str, tuple[Any, ...]] = {
  "peft_type": ("LORA",),
  "use_dora": (False, None),
  "fan_in_fan_out": (False, None),
  "lora_bias": (False, None),
  "bias": ("none", None),
  "modules_to_save": (None, []),
  "rank_pattern": ({}, None),
  "alpha_pattern": ({}, None),
  "trainable_token_indices": (None,),
  "layer_replication": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Which modules get adapters, and of what size.

  Attributes:
    rank: r.
    alpha: the adapter's output is scaled by alpha / rank; None means rank.
    targets: each the last parts of a module's path ("q_proj", "attn.q_proj") or a
      regular expression for all of it (r"layers\\..*_proj"); each must match.
    dtype: of the adapters; float32 by default also on a bfloat16 base, because small
      updates are lost in bfloat16.
  """

  rank: int
  alpha: float | None = None
  targets: tuple[str, ...] = ALL_LINEAR
  dtype: DTypeLike = jnp.float32

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f"rank is {self.rank}, it must be at least 1")
    if self.alpha is not None and self.alpha <= 0:
      raise ValueError(f"alpha is {self.alpha}, it must be positive")
    if isinstance(self.targets, str) or not self.targets:
      raise ValueError(
        f"targets {self.targets!r} must be a tuple of names or patterns, like "
        "('q_proj', 'v_proj')"
      )
    for target in self.targets:
      try:
        re.compile(target)
      except re.error as error:
        raise ValueError(
          f"target {target!r} is no regular expression: {error}"
        ) from error

  @property
  def scale(self) -> float:
    """alpha / rank."""
    return 1.0 if self.alpha is None else self.alpha / self.rank


def apply(
  model: Transformer,
  config: LoraConfig,
  *,
  seed: int = 0,
  rngs: nnx.Rngs | None = None,
) -> Transformer:
  """A model with fresh adapters that shares the base weights of `model`.

  A is uniform in +-1/sqrt(in), B is zero. The adapters lie on the base's mesh, split
  like the dimension of the kernel that they touch.

  Args:
    model: not adapted yet; unchanged. Stacked, or unstacked to adapt single layers.
    config: rank, scale and targets.
    seed: of A; the draw of a module depends on the seed and its name only.
    rngs: the source of the key instead of `seed`.

  Raises:
    ValueError: a target matches nothing that can be adapted (the message lists the
      modules), or the model has adapters already.
  """
  chosen = match(model, config.targets)
  key = jax.random.key(seed) if rngs is None else rngs.params()
  modules = lora_modules.linears(model)
  shapes = {}
  for path in chosen:
    *stack, rows, columns = modules[path].kernel.shape
    shapes[path] = (*stack, rows, config.rank), (*stack, config.rank, columns)
  where = lora_modules.pair_shardings(model, shapes)
  pairs = {}
  for path, (shape_a, shape_b) in shapes.items():
    own = jax.random.fold_in(key, zlib.crc32(path.encode()))
    draw = jax.jit(_uniform, static_argnums=(1, 2), out_shardings=where[path][0])
    a = draw(own, shape_a, jnp.dtype(config.dtype))
    pairs[path] = a, jnp.zeros(shape_b, config.dtype, device=where[path][1])
  return lora_modules.attach(model, pairs, config.scale)


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  limit = 1 / math.sqrt(shape[-2])
  return jax.random.uniform(key, shape, jnp.float32, -limit, limit).astype(dtype)


def merge(model: Transformer) -> Transformer:
  """A model without adapters, W + (alpha / r) A B, computed in float32.

  Weights that had no adapter are shared with `model`.

  Raises:
    ValueError: the model has no adapters.
  """
  lora_modules.require_adapters(model)
  out = lora_modules.copy(model)
  for linear in lora_modules.adapted(out).values():
    linear.kernel.set_value(lora_modules.merged_kernel(linear, linear.kernel.dtype))
    linear.lora_a, linear.lora_b = nnx.data(None), nnx.data(None)
    linear.lora_scale = 1.0
  return out


def match(model: Transformer, targets: tuple[str, ...]) -> list[str]:
  """The modules that the targets name, in the model's order.

  Raises:
    ValueError: see `apply`.
  """
  lora_modules.require_bare(model)
  paths = list(lora_modules.adaptable(model))
  chosen: set[str] = set()
  for target in targets:
    hits = [path for path in paths if _hits(target, path)]
    if not hits:
      fixed = [p for p in ("lm_head", "embed_tokens") if _hits(target, p)]
      why = f"{fixed[0]} cannot be adapted" if fixed else "it matches no module"
      raise ValueError(f"target {target!r}: {why}; modules are {', '.join(paths)}")
    chosen.update(hits)
  return [path for path in paths if path in chosen]


def _hits(target: str, path: str) -> bool:
  return f".{path}".endswith(f".{target}") or bool(re.fullmatch(target, path))


def describe(model: Transformer) -> str:
  """A table of what is adapted, and how much of the model that is.

  Raises:
    ValueError: the model has no adapters.
  """
  lora_modules.require_adapters(model)
  lines, trained = [], 0
  for path, linear in lora_modules.adapted(model).items():
    a, b = lora_modules.pair_of(linear)
    size = a.size + b.size
    shape = " x ".join(map(str, linear.kernel.shape))
    lines.append(f"{path:32} {shape:24} rank {a.shape[-1]:<4} {size:>12,}")
    trained += size
  total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
  share = 100 * trained / total
  lines.append(f"trainable {trained:,} of {total:,} parameters ({share:.2f} %)")
  return "\n".join(lines)


def save_adapter(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  base: str | None = None,
  family: Family | None = None,
) -> None:
  """Writes the adapters as a PEFT folder.

  Args:
    model: adapted; unchanged.
    folder: where to; see `tensor_files.staged_folder`.
    base: name or folder of the base model, recorded for readers.
    family: the kind of model; None: found by the config's class.

  Raises:
    ValueError: the model has no adapters, or they differ in rank or scale.
    OSError: the disk is full or not writable.
  """
  lora_modules.require_adapters(model)
  family = family or families.of_config(model.config)
  adapters = lora_modules.adapted(model)
  sizes = {
    (lora_modules.pair_of(x)[0].shape[-1], x.lora_scale) for x in adapters.values()
  }
  if len(sizes) > 1:
    raise ValueError(
      f"adapters of several (rank, scale) {sorted(sizes)} cannot be saved in one "
      "folder: use one rank and alpha"
    )
  ((rank, scale),) = sizes
  tensors, names = [], {}
  for path, linear in adapters.items():
    place = params.place(family.names, f"{path}.kernel", model.config)
    names[path] = [key.removesuffix(".weight") for key in place.keys]
    for side, value in zip("AB", lora_modules.pair_of(linear)):
      tensors += _adapter_tensors(names[path], side, value)
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": rank,
    "lora_alpha": scale * rank,
    "target_modules": _peft_targets(model, names),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
  }
  with tensor_files.staged_folder(pathlib.Path(folder)) as staging:
    tensor_files.write_file(staging / WEIGHTS_FILE, tensors)
    (staging / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _adapter_tensors(names: list[str], side: str, value: jax.Array) -> list[NewTensor]:
  host = np.asarray(value).reshape(len(names), *value.shape[-2:])
  return [
    NewTensor(
      f"{_PREFIX}{name}.lora_{side}.weight",
      host.dtype,
      host.shape[-2:][::-1],
      functools.partial(np.transpose, host[i]),
    )
    for i, name in enumerate(names)
  ]


def _peft_targets(model: Transformer, names: dict[str, list[str]]) -> list[str]:
  """PEFT's target_modules: last parts, or full names when only some layers have
  an adapter."""
  short = {path.rpartition(".")[2] for path in names}
  same = [p for p in lora_modules.linears(model) if p.rpartition(".")[2] in short]
  full = [name for keys in names.values() for name in keys]
  if len(same) > len(names):
    return sorted(full)
  return sorted({name.rpartition(".")[2] for name in full})


def load_adapter(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  family: Family | None = None,
) -> Transformer:
  """A model with the adapters of a PEFT folder, sharing the weights of `model`.

  Raises:
    FileNotFoundError: no such folder, or one of its files is missing.
    ValueError: an option of PEFT that the decoder does not do, a tensor that is
      missing, has another shape or names a module that cannot be adapted, or a model
      that has adapters already.
  """
  path = pathlib.Path(folder)
  if not (path / CONFIG_FILE).is_file() or not (path / WEIGHTS_FILE).is_file():
    raise FileNotFoundError(
      f"{path} lacks {CONFIG_FILE} or {WEIGHTS_FILE}: give a folder that save_adapter "
      "or PEFT wrote"
    )
  peft = tensor_files.read_json(path / CONFIG_FILE)
  for field, accepted in _PEFT_SUPPORTED.items():
    if peft.get(field, accepted[0]) not in accepted:
      raise ValueError(
        f"{path / CONFIG_FILE}: {field} is {peft[field]!r}, supported is only "
        f"{accepted[0]!r}"
      )
  rank, alpha = hf_config.integer(peft, "r"), hf_config.number(peft, "lora_alpha")
  scale = alpha / (math.sqrt(rank) if peft.get("use_rslora") else rank)
  tensors = tensor_files.read_header(path / WEIGHTS_FILE)
  pairs = _read_pairs(model, family or families.of_config(model.config), tensors, rank)
  shapes = {path: (a.shape, b.shape) for path, (a, b) in pairs.items()}
  pairs = jax.device_put(pairs, lora_modules.pair_shardings(model, shapes))
  return lora_modules.attach(model, pairs, scale)


def _read_pairs(
  model: Transformer, family: Family, tensors: dict[str, StoredTensor], rank: int
) -> dict[str, lora_modules.Pair]:
  """(A, B) of every module that the tensors name."""
  pairs: dict[str, lora_modules.Pair] = {}
  used: set[str] = set()
  modules = lora_modules.adaptable(model)
  for path, linear in modules.items():
    place = params.place(family.names, f"{path}.kernel", model.config)
    names = [_PREFIX + key.removesuffix(".weight") for key in place.keys]
    keys = {side: [f"{name}.lora_{side}.weight" for name in names] for side in "AB"}
    if tensors.keys().isdisjoint(keys["A"]):
      continue
    rows, columns = linear.kernel.shape[-2:]
    shapes = {"A": (rank, rows), "B": (columns, rank)}
    a, b = (
      [_adapter_part(tensors, key, shapes[side]) for key in keys[side]] for side in "AB"
    )
    stacks = [np.stack(parts).reshape(*place.lead, *parts[0].shape) for parts in (a, b)]
    pairs[path] = stacks[0], stacks[1]
    used.update(*keys.values())
  unused = sorted(tensors.keys() - used)
  if unused or not pairs:
    raise ValueError(
      f"adapter tensors {unused[:3]} name no module that can be adapted; modules are "
      f"{', '.join(modules)}"
    )
  return pairs


def _adapter_part(
  tensors: dict[str, StoredTensor], key: str, shape: tuple[int, ...]
) -> np.ndarray:
  tensor = tensors.get(key)
  if tensor is None or tensor.shape != shape:
    found = "missing" if tensor is None else f"of shape {tensor.shape}"
    raise ValueError(
      f"adapter tensor {key!r} is {found}, expected shape {shape}: the adapter belongs "
      "to another model, or leaves out layers"
    )
  return np.ascontiguousarray(tensor.map().T)
