"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on the layers of a model.

y = x W + (alpha / r) x A B, where A [in, r] is random and B [r, out] is zero at first,
so that a new adapter changes nothing. A and B are `nnx.LoRAParam`s in the module whose
kernel they adapt, and trainers find them by this type. The base weights are shared, not
copied. adapters/files.py reads and writes folders of PEFT.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tunix.models import quantization
from tunix.models.adapters import lora_modules, token_rows, whole_modules
from tunix.models.adapters.files import load_adapter, save_adapter
from tunix.models.adapters.lora_modules import Adapter, CastError
from tunix.models.transformer.dense.layers import param
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.recurrences.mamba2 import Mamba2
from tunix.models.transformer.shards import sharding
from tunix.utils import checks, mesh as mesh_lib
from tunix.utils.setting import named_values

__all__ = [
  "ALL_LINEAR",
  "CastError",
  "LoraConfig",
  "apply",
  "describe",
  "load_adapter",
  "match",
  "merge",
  "save_adapter",
]

ALL_LINEAR = (
  "q_proj",
  "k_proj",
  "v_proj",
  "o_proj",
  "gate_proj",
  "up_proj",
  "down_proj",
)
_EVERY = "all-linear"
# What models of some families have in their place, or besides: fused projections,
# latent attention and recurrent mixers. The small maps of a gated delta net (a rate and
# a decay for each head) get no adapter by default.
_OF_SOME = (
  *("qkv_proj", "gate_up_proj"),
  *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
  *("in_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """The modules that get adapters, and the adapters' size and kind.

  Attributes:
    rank: rank r of the adapters.
    alpha: the adapter's output is scaled by alpha / rank; None means alpha = rank.
    targets: the adapted modules. The default ("all-linear") is every linear layer of
      attention and feed-forward of the text model, experts included, and no router,
      embedding or head. Each target is the last parts of a module's path ("q_proj",
      "attn.q_proj") or a regular expression for a whole path (r"layers\\..*_proj").
      "vision_tower" and "multi_modal_projector" are all linear layers of these modules,
      to which last parts do not apply. Each target must match a module.
    dtype: dtype of A and B. It is float32 by default on a bfloat16 base too, because
      bfloat16 loses small updates.
    dropout: probability that an element of A's input is dropped in training.
    use_rslora: if True, the scale is alpha / sqrt(rank), which keeps the size of
      updates at large ranks (Kalajdzievski 2023, arXiv:2312.03732).
    use_dora: if True, a magnitude per output is trained beside the direction
      W + scale A B (DoRA, Liu et al. 2024, arXiv:2402.09353).
    rank_pattern, alpha_pattern: other values for some of the targets, by patterns as in
      `targets`. The first pattern that matches a module applies. Each must match one.
    modules_to_save: modules that are trained whole beside the adapters, in `dtype`, and
      saved with them, by names as in `targets`: "score", "lm_head", "embed_tokens",
      "norm". null selects the score head of a model that has one.
    trainable_token_indices: ids of tokens whose rows of the embedding, and of an untied
      unembedding, are trained beside the adapters, and saved with them. All other rows
      stay frozen. tokenizer.add_tokens adds the ids of new tokens.
  """

  rank: int
  alpha: float | None = None
  targets: tuple[str, ...] = ALL_LINEAR
  dtype: DTypeLike = jnp.float32
  dropout: float = 0.0
  use_rslora: bool = False
  use_dora: bool = False
  rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
  alpha_pattern: Mapping[str, float] = dataclasses.field(
    default_factory=dict, hash=False
  )
  modules_to_save: tuple[str, ...] | None = None
  trainable_token_indices: tuple[int, ...] = ()

  def __post_init__(self):
    checks.fields(
      self,
      rank=checks.COUNT,
      alpha=checks.POSITIVE,
      dropout=checks.Range(0, 1, below=True),
    )
    for name, rank in self.rank_pattern.items():
      checks.number(f"rank_pattern.{name}", rank, checks.COUNT, whole=True)
    for name, alpha in self.alpha_pattern.items():
      checks.number(f"alpha_pattern.{name}", alpha, checks.POSITIVE)
    if not self.targets:
      raise ValueError(
        "targets is empty: name modules, or leave it out for all linear ones"
      )
    patterns = (*self.rank_pattern, *self.alpha_pattern, *(self.modules_to_save or ()))
    for target in (*self.targets, *patterns):
      checks.pattern("target", target)

  @property
  def scale(self) -> float:
    """Factor of A B where no pattern matches: alpha / rank, or alpha / sqrt(rank)."""
    return self.scale_of("")

  def rank_of(self, path: str) -> int:
    """Returns the rank of one module, given its path."""
    return _by_pattern(self.rank_pattern, path, self.rank)

  def scale_of(self, path: str) -> float:
    """Returns the factor of one module's A B, given its path."""
    rank = self.rank_of(path)
    alpha = _by_pattern(self.alpha_pattern, path, self.alpha)
    alpha = rank if alpha is None else alpha
    return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _by_pattern(patterns: Mapping[str, Any], path: str, default: object) -> Any:
  matching = (v for pattern, v in patterns.items() if lora_modules.hits(pattern, path))
  return next(matching, default)


def apply(
  model: Transformer,
  config: LoraConfig,
  *,
  seed: int = 0,
  rngs: nnx.Rngs | None = None,
) -> Transformer:
  """Returns a model with fresh adapters that shares the base weights of `model`.

  A is uniform in +-1/sqrt(in), B is zero, and a magnitude is the norm of its column of
  the kernel. The adapters are on the base's mesh, sharded like the dimension of the
  kernel that they touch.

  Args:
    model: a model without adapters. It is unchanged. It may be stacked, or unstacked to
      adapt single layers, and its kernels may be quantized.
    config: ranks, scales, targets and kind.
    seed: seed of A and of the dropout masks. The draw of a module depends only on the
      seed and on the module's name.
    rngs: source of the key, used instead of `seed`.

  Raises:
    ValueError: a target or pattern matches no module that can be adapted (the message
      lists the modules), the model has adapters already, a module is named both in
      `targets` and in `modules_to_save`, or a token id is not in the vocabulary.
  """
  chosen = match(model, config.targets)
  _check_patterns(config, chosen)
  whole = whole_modules.choose(model, config.modules_to_save)
  if both := sorted(set(whole) & set(chosen)):
    raise ValueError(
      f"{both[0]} is in targets and in modules_to_save: name it in one of them"
    )
  key = jax.random.key(seed) if rngs is None else rngs.params()
  modules = lora_modules.linears(model)
  mesh = mesh_lib.mesh_of(nnx.state(model))
  adapters = {}
  for path in chosen:
    *stack, rows, columns = modules[path].kernel.shape
    rank = config.rank_of(path)
    where = lora_modules.adapter_shardings(modules[path], rank, mesh)
    path_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    draw = jax.jit(_uniform, static_argnums=(1, 2), out_shardings=where[0])
    magnitude = None
    if config.use_dora:
      # Magnitudes are always float32. Rounded to bfloat16, they would change the output
      # of a model whose adapters are new.
      magnitude = lora_modules.fresh_magnitude(modules[path], where[2])
    adapters[path] = Adapter(
      a=draw(path_key, (*stack, rows, rank), jnp.dtype(config.dtype)),
      b=jnp.zeros((*stack, rank, columns), config.dtype, device=where[1]),
      magnitude=magnitude,
      scale=config.scale_of(path),
      dropout=config.dropout,
      rslora=config.use_rslora,
    )
  adapted = lora_modules.attach(model, adapters, jax.random.fold_in(key, 1))
  whole_modules.mark(adapted, whole, config.dtype)
  token_rows.attach(adapted, config.trainable_token_indices, config.dtype, whole)
  return sharding.on_users_mesh(adapted)


def _check_patterns(config: LoraConfig, chosen: list[str]) -> None:
  tables = named_values(config, ("rank_pattern", "alpha_pattern"))
  for name, patterns in tables.items():
    for pattern in patterns:
      if not any(lora_modules.hits(pattern, path) for path in chosen):
        raise ValueError(
          f"{name} {pattern!r} matches none of the adapted modules; they are "
          f"{', '.join(chosen)}"
        )


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
  limit = 1 / math.sqrt(shape[-2])
  return jax.random.uniform(key, shape, jnp.float32, -limit, limit).astype(dtype)


def merge(
  model: Transformer, *, report: Callable[[CastError], None] | None = None
) -> Transformer:
  """Returns a model whose adapters are merged into its kernels.

  A merged kernel is W + scale A B, with DoRA's magnitudes, computed in float32 and
  rounded to the kernel's dtype. Quantized kernels become arrays. All other weights are
  shared with `model`.

  Args:
    model: a model with adapters. It is unchanged.
    report: called with the rounding error of each module; None logs the largest one.

  Raises:
    ValueError: the model has no adapters.
  """
  lora_modules.require_adapters(model)
  out = nnx.clone(model)
  errors = []
  for path, linear in lora_modules.linears(out).items():
    if linear.lora_a is None:
      quantization.dequantize_kernel(linear)
      continue
    spec = linear.stored.get_metadata()["out_sharding"]
    value, error = lora_modules.merged_kernel(path, linear, linear.stored.dtype)
    linear.kernel = nnx.data(param(value, spec))
    lora_modules.detach(linear)
    errors.append(error)
  whole_modules.unmark(out)
  token_rows.merge(out)
  lora_modules.report_errors(errors, report, _log)
  return out


def config_of(model: Transformer) -> LoraConfig | None:
  """Returns the configuration of a model's adapters; None without adapters.

  `rank` and `alpha` are the most common ones; patterns of full paths hold the others.
  """
  adapters = lora_modules.adapted(model)
  if not adapters:
    return None
  first = next(iter(adapters.values()))
  rslora = all(linear.lora_rslora for linear in adapters.values())
  ranks = {p: lora_modules.pair_of(x)[0].shape[-1] for p, x in adapters.items()}
  alphas = {
    path: linear.lora_scale * (math.sqrt(ranks[path]) if rslora else ranks[path])
    for path, linear in adapters.items()
  }
  rank = collections.Counter(ranks.values()).most_common(1)[0][0]
  alpha = collections.Counter(alphas.values()).most_common(1)[0][0]
  return LoraConfig(
    rank=rank,
    alpha=alpha,
    targets=tuple(dict.fromkeys(map(_target_of, adapters))),
    dtype=lora_modules.pair_of(first)[0].dtype,
    dropout=first.lora_dropout,
    use_rslora=rslora,
    use_dora=first.lora_magnitude is not None,
    rank_pattern={re.escape(p): r for p, r in ranks.items() if r != rank},
    alpha_pattern={re.escape(p): a for p, a in alphas.items() if a != alpha},
    modules_to_save=tuple(p.rpartition(".")[0] for p in whole_modules.of(model)),
    trainable_token_indices=model.token_rows.ids if model.token_rows else (),
  )


def _target_of(path: str) -> str:
  last = path.rpartition(".")[2]
  return last if lora_modules.hits(last, path) else re.escape(path)


def match(model: Transformer, targets: tuple[str, ...]) -> list[str]:
  """Returns the paths of the modules that the targets select, in the model's order.

  Raises:
    ValueError: see `apply`.
  """
  lora_modules.require_bare(model)
  if targets == ALL_LINEAR:
    targets = (_EVERY,)
  if _EVERY in targets:  # a model has some of these names
    paths = list(lora_modules.adaptable(model))
    names = [*ALL_LINEAR, *_OF_SOME]
    if any(isinstance(module, Mamba2) for _, module in nnx.iter_modules(model)):
      names.remove("out_proj")  # kernels of Mamba read the bare weight; PEFT refuses it
    every = (x for x in names if any(lora_modules.hits(x, p) for p in paths))
    targets = (*every, *(x for x in targets if x != _EVERY))
  return lora_modules.select(model, targets, images=True)


def describe(model: Transformer) -> str:
  """Returns a table of the adapted modules and the share of trained parameters.

  Raises:
    ValueError: the model has no adapters.
  """
  lora_modules.require_adapters(model)
  lines, trained = [], 0
  for path, linear in lora_modules.adapted(model).items():
    leaves = jax.tree.leaves(nnx.state(linear, nnx.LoRAParam))
    size = sum(leaf.size for leaf in leaves)
    assert linear.lora_a is not None
    rank = linear.lora_a.shape[-1]
    shape = " x ".join(map(str, linear.kernel.shape))
    lines.append(f"{path:32} {shape:24} rank {rank:<4} {size:>12,}")
    trained += size
  for path, variable in (whole_modules.of(model) | token_rows.of(model)).items():
    shape = " x ".join(map(str, variable.shape))
    kind = "rows" if path in token_rows.TABLES else "whole"
    lines.append(f"{path:32} {shape:24} {kind:9} {variable.size:>12,}")
    trained += variable.size
  total = lora_modules.count(model)
  share = 100 * trained / total
  lines.append(f"trainable {trained:,} of {total:,} parameters ({share:.2f} %)")
  return "\n".join(lines)
