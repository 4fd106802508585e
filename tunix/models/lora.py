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
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from tunix.models import families, tensor_files
from tunix.models.families import Family
from tunix.models.tensor_files import NewTensor, StoredTensor
from tunix.models.transformer import params
from tunix.models.transformer.layers import Linear
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib

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
  shapes = {path: linears(model)[path].kernel.shape for path in chosen}

  def draw(key: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    pairs = {}
    for path, (*stack, rows, columns) in shapes.items():
      own = jax.random.fold_in(key, zlib.crc32(path.encode()))
      shape, limit = (*stack, rows, config.rank), 1 / math.sqrt(rows)
      a = jax.random.uniform(own, shape, jnp.float32, -limit, limit)
      b = jnp.zeros((*stack, config.rank, columns), config.dtype)
      pairs[path] = (a.astype(config.dtype), b)
    return pairs

  wanted = jax.eval_shape(draw, key)
  pairs = jax.jit(draw, out_shardings=_shardings(model, wanted))(key)
  return _attach(model, pairs, dict.fromkeys(pairs, config.scale))


def merge(model: Transformer) -> Transformer:
  """A model without adapters, W + (alpha / r) A B, computed in float32.

  Weights that had no adapter are shared with `model`.

  Raises:
    ValueError: the model has no adapters.
  """
  _require_adapters(model)
  out = _copy(model)
  for linear in adapted(out).values():
    kernel = merged_kernel(linear, linear.kernel.dtype)
    linear.kernel = linear.kernel.replace(kernel)
    linear.lora_a, linear.lora_b = nnx.data(None), nnx.data(None)
    linear.lora_scale = 1.0
  return out


def merged_kernel(linear: Linear, dtype: DTypeLike) -> jax.Array:
  """The kernel of one adapted module with its adapter added, laid out like it."""
  assert linear.lora_a is not None and linear.lora_b is not None
  kernel = linear.kernel[...]
  where = kernel.sharding if isinstance(kernel.sharding, NamedSharding) else None
  merged = jax.jit(_merged, static_argnums=(3, 4), out_shardings=where)
  a, b = linear.lora_a[...], linear.lora_b[...]
  return merged(kernel, a, b, linear.lora_scale, jnp.dtype(dtype))


def _merged(kernel, a, b, scale, dtype):
  product = jnp.matmul(
    a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
  )
  return (kernel.astype(jnp.float32) + scale * product).astype(dtype)


def linears(model: Transformer) -> dict[str, Linear]:
  """The model's linear maps by dotted module path."""
  found = {
    ".".join(map(str, path)): module
    for path, module in nnx.iter_modules(model)
    if isinstance(module, Linear)
  }
  return dict(sorted(found.items()))


def adapted(model: Transformer) -> dict[str, Linear]:
  """Those linear maps that carry an adapter."""
  return {p: m for p, m in linears(model).items() if m.lora_a is not None}


def match(model: Transformer, targets: tuple[str, ...]) -> list[str]:
  """The modules that the targets name, in the model's order.

  Raises:
    ValueError: see `apply`.
  """
  if adapted(model):
    raise ValueError(
      "the model has adapters already: merge them first, or adapt the base model"
    )
  # The unembedding is read by the losses beside the layers, so an adapter on it or on
  # the embedding would train nobody.
  modules = [path for path in linears(model) if path.startswith("layers.")]
  chosen: set[str] = set()
  for target in targets:
    hits = [path for path in modules if _hits(target, path)]
    if not hits:
      fixed = [p for p in ("lm_head", "embed_tokens") if _hits(target, p)]
      why = f"{fixed[0]} cannot be adapted" if fixed else "it matches no module"
      raise ValueError(f"target {target!r}: {why}; modules are {', '.join(modules)}")
    chosen.update(hits)
  return [path for path in modules if path in chosen]


def _hits(target: str, path: str) -> bool:
  return f".{path}".endswith(f".{target}") or bool(re.fullmatch(target, path))


def describe(model: Transformer) -> str:
  """A table of what is adapted, and how much of the model that is.

  Raises:
    ValueError: the model has no adapters.
  """
  _require_adapters(model)
  lines, trained = [], 0
  for path, linear in adapted(model).items():
    assert linear.lora_a is not None and linear.lora_b is not None
    size = linear.lora_a.size + linear.lora_b.size
    shape = " x ".join(map(str, linear.kernel.shape))
    lines.append(f"{path:32} {shape:24} rank {linear.lora_a.shape[-1]:<4} {size:>12,}")
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
  _require_adapters(model)
  family = family or families.of_config(model.config)
  modules = adapted(model)
  sizes = {(m.lora_a.shape[-1], m.lora_scale) for m in modules.values()}
  if len(sizes) > 1:
    raise ValueError(
      f"adapters of several (rank, scale) {sorted(sizes)} cannot be saved in one "
      "folder: use one rank and alpha"
    )
  ((rank, scale),) = sizes
  tensors, names = [], {}
  for path, module in modules.items():
    place = params.place(family.names, f"{path}.kernel", model.config.num_layers)
    names[path] = [key.removesuffix(".weight") for key in place.keys]
    for letter, value in (("A", module.lora_a), ("B", module.lora_b)):
      tensors += _adapter_tensors(names[path], letter, value[...], place.stacked)
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


def _adapter_tensors(
  names: list[str], letter: str, value: jax.Array, stacked: bool
) -> list[NewTensor]:
  host = np.asarray(value)
  return [
    NewTensor(
      f"{_PREFIX}{name}.lora_{letter}.weight",
      host.dtype,
      host.shape[-2:][::-1],
      functools.partial(np.transpose, host[i] if stacked else host),
    )
    for i, name in enumerate(names)
  ]


def _peft_targets(model: Transformer, names: dict[str, list[str]]) -> list[str]:
  """PEFT's target_modules: last parts, or full names when only some layers have
  an adapter."""
  short = {path.rpartition(".")[2] for path in names}
  same = [p for p in linears(model) if p.rpartition(".")[2] in short]
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
  rank, alpha = int(peft["r"]), float(peft["lora_alpha"])
  scale = alpha / (math.sqrt(rank) if peft.get("use_rslora") else rank)
  tensors = tensor_files.read_header(path / WEIGHTS_FILE)
  family = family or families.of_config(model.config)
  pairs = _read_pairs(model, family, tensors, rank)
  shardings = _shardings(model, pairs)
  if shardings is not None:
    pairs = jax.device_put(pairs, shardings)
  else:
    pairs = jax.device_put(pairs)
  return _attach(model, pairs, dict.fromkeys(pairs, scale))


def _read_pairs(
  model: Transformer, family: Family, tensors: dict[str, StoredTensor], rank: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """(A, B) of every module that the tensors name."""
  unused, pairs = set(tensors), {}
  modules = {p: m for p, m in linears(model).items() if p.startswith("layers.")}
  for path, module in modules.items():
    place = params.place(family.names, f"{path}.kernel", model.config.num_layers)
    names = [_PREFIX + key.removesuffix(".weight") for key in place.keys]
    wanted = {name: f"{name}.lora_A.weight" for name in names}
    if not unused & set(wanted.values()):
      continue
    rows, columns = module.kernel.shape[-2:]
    pair = []
    for letter, shape in (("A", (rank, rows)), ("B", (columns, rank))):
      layers = []
      for name in names:
        key = f"{name}.lora_{letter}.weight"
        tensor = tensors.get(key)
        if tensor is None or tensor.shape != shape:
          found = "missing" if tensor is None else f"of shape {tensor.shape}"
          raise ValueError(
            f"adapter tensor {key!r} is {found}, {path} needs shape {shape}: the "
            "adapter belongs to another model, or leaves out layers"
          )
        layers.append(tensor.map().T)
        unused.discard(key)
      pair.append(np.stack(layers) if place.stacked else np.array(layers[0]))
    pairs[path] = tuple(pair)
  if unused or not pairs:
    name = min(unused, default="(none)")
    raise ValueError(
      f"adapter tensor {name!r} names no module that can be adapted; modules are "
      f"{', '.join(modules)}"
    )
  return pairs


def _require_adapters(model: Transformer) -> None:
  if not adapted(model):
    raise ValueError("the model has no adapters: call lora.apply first")


def _copy(model: Transformer) -> Transformer:
  """New modules around the same arrays."""
  return nnx.merge(*nnx.split(model))


def _specs(linear: Linear) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Axes of A and B: those of the kernel's dimension that each touches."""
  *stack, rows, columns = linear.kernel.get_metadata()["out_sharding"]
  return (*stack, rows, None), (*stack, None, columns)


def _shardings(model: Transformer, pairs: Any) -> Any:
  """NamedShardings of the (A, B) on the base's mesh, or None without one."""
  mesh = mesh_lib.mesh_of(nnx.state(model))
  if mesh is None:
    return None
  modules = linears(model)

  def place(mesh: Mesh, spec: tuple[Any, ...], shape: tuple[int, ...]):
    return NamedSharding(mesh, mesh_lib.fit_spec(spec, shape, mesh))

  return {
    path: tuple(
      place(mesh, spec, value.shape) for spec, value in zip(_specs(modules[path]), pair)
    )
    for path, pair in pairs.items()
  }


def _attach(
  model: Transformer,
  pairs: dict[str, tuple[jax.Array, jax.Array]],
  scales: dict[str, float],
) -> Transformer:
  """A copy of the model whose modules carry the adapters."""
  if adapted(model):
    raise ValueError(
      "the model has adapters already: merge them first, or adapt the base model"
    )
  out = _copy(model)
  modules = linears(out)
  for path, pair in pairs.items():
    a, b = (
      nnx.LoRAParam(value, out_sharding=spec, eager_sharding=False)
      for value, spec in zip(pair, _specs(modules[path]))
    )
    modules[path].lora_a, modules[path].lora_b = a, b
    modules[path].lora_scale = scales[path]
  return out
