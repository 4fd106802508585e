"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on the decoder's layers.

y = x W + (alpha / r) x A B, with A [in, r] drawn and B [r, out] zero, so that a fresh
adapter changes nothing. A and B are `nnx.LoRAParam`s beside the kernel that they
adapt; the trainer finds them by that type. The base weights are shared, not copied.
PEFT's folders are read and written by adapter_files.py.
"""

from __future__ import annotations

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

from tunix.models import lora_modules, quantisation, whole_modules
from tunix.models.adapter_files import load_adapter, save_adapter
from tunix.models.lora_modules import Adapter, CastError
from tunix.models.transformer import sharding
from tunix.models.transformer.layers import param
from tunix.models.transformer.model import Transformer
from tunix.utils import checks

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

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Which modules get adapters, and of what size.

  Attributes:
    rank: of the adapters, r.
    alpha: the adapter's output is scaled by alpha / rank; None means rank.
    targets: the adapted modules; by default (in the command also "all-linear") every
      linear layer of attention and feed-forward, experts too, but no router, embedding
      or head. Each is the last parts of a module's path ("q_proj", "attn.q_proj") or a
      regular expression for all of it (r"layers\\..*_proj"); each must match.
    dtype: of A and B; float32 by default also on a bfloat16 base, because small
      updates are lost in bfloat16.
    dropout: probability that an element of A's input is dropped in training.
    use_rslora: scale by alpha / sqrt(rank), which keeps the size of updates at large
      ranks (Kalajdzievski 2023, arXiv:2312.03732).
    use_dora: train a magnitude for every output beside the direction W + scale A B
      (DoRA, Liu et al. 2024, arXiv:2402.09353).
    rank_pattern, alpha_pattern: other values for some of the targets, by patterns like
      `targets`; the first that matches a module counts, each must match one.
    modules_to_save: modules that are trained whole beside the adapters, in `dtype`,
      and saved with them: names like `targets`, such as "score", "lm_head",
      "embed_tokens" or "norm". null: the head of scores, of a model that has one.
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
      try:
        re.compile(target)
      except re.error as error:
        raise ValueError(
          f"target {target!r} is no regular expression: {error}"
        ) from error

  @property
  def scale(self) -> float:
    """alpha / rank (alpha / sqrt(rank) with `use_rslora`) where no pattern matches."""
    return self.scale_of("")

  def rank_of(self, path: str) -> int:
    """The rank of one module."""
    return _by_pattern(self.rank_pattern, path, self.rank)

  def scale_of(self, path: str) -> float:
    """What one module's A B is multiplied by."""
    rank = self.rank_of(path)
    alpha = _by_pattern(self.alpha_pattern, path, self.alpha)
    alpha = rank if alpha is None else alpha
    return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _by_pattern(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
  matching = (v for pattern, v in patterns.items() if lora_modules.hits(pattern, path))
  return next(matching, default)


def apply(
  model: Transformer,
  config: LoraConfig,
  *,
  seed: int = 0,
  rngs: nnx.Rngs | None = None,
) -> Transformer:
  """A model with fresh adapters that shares the base weights of `model`.

  A is uniform in +-1/sqrt(in), B is zero, a magnitude is the norm of its column of the
  kernel. The adapters lie on the base's mesh, split like the dimension of the kernel
  that they touch.

  Args:
    model: not adapted yet; unchanged. Stacked, or unstacked to adapt single layers.
      Its kernels may be quantised.
    config: ranks, scales, targets and kind.
    seed: of A and of the dropout masks; the draw of a module depends on the seed and
      its name only.
    rngs: the source of the key instead of `seed`.

  Raises:
    ValueError: a target or pattern matches nothing that can be adapted (the message
      lists the modules), the model has adapters already, or a module is to be adapted
      and trained whole.
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
  shapes = {}
  for path in chosen:
    *stack, rows, columns = modules[path].kernel.shape
    rank = config.rank_of(path)
    shapes[path] = (*stack, rows, rank), (*stack, rank, columns)
  where = lora_modules.pair_shardings(model, shapes)
  adapters = {}
  for path, (shape_a, shape_b) in shapes.items():
    path_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    draw = jax.jit(_uniform, static_argnums=(1, 2), out_shardings=where[path][0])
    magnitude = None
    if config.use_dora:
      # In float32 always: rounded to bfloat16 it would change a fresh model.
      magnitude = lora_modules.fresh_magnitude(modules[path])
    adapters[path] = Adapter(
      a=draw(path_key, shape_a, jnp.dtype(config.dtype)),
      b=jnp.zeros(shape_b, config.dtype, device=where[path][1]),
      magnitude=magnitude,
      scale=config.scale_of(path),
      dropout=config.dropout,
      rslora=config.use_rslora,
    )
  adapted = lora_modules.attach(model, adapters, jax.random.fold_in(key, 1))
  whole_modules.mark(adapted, whole, config.dtype)
  return sharding.on_users_mesh(adapted)


def _check_patterns(config: LoraConfig, chosen: list[str]) -> None:
  for name in ("rank_pattern", "alpha_pattern"):
    for pattern in getattr(config, name):
      if not any(lora_modules.hits(pattern, path) for path in chosen):
        raise ValueError(
          f"{name} {pattern!r} matches none of the adapted modules; they are "
          f"{', '.join(chosen)}"
        )


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  limit = 1 / math.sqrt(shape[-2])
  return jax.random.uniform(key, shape, jnp.float32, -limit, limit).astype(dtype)


def merge(
  model: Transformer, *, report: Callable[[CastError], None] | None = None
) -> Transformer:
  """A model without adapters, W + scale A B (and DoRA's magnitudes), computed in
  float32 and rounded to the kernel's dtype.

  Quantised kernels become arrays again. Weights that had no adapter are otherwise
  shared with `model`.

  Args:
    model: adapted; unchanged.
    report: is told for each module what the rounding cost; None: the worst is logged.

  Raises:
    ValueError: the model has no adapters.
  """
  lora_modules.require_adapters(model)
  out = lora_modules.copy(model)
  errors = []
  for path, linear in lora_modules.linears(out).items():
    if linear.lora_a is None:
      quantisation.dequantise_kernel(linear)
      continue
    spec = linear.kernel.get_metadata()["out_sharding"]
    value, error = lora_modules.merged_kernel(path, linear, linear.kernel.dtype)
    linear.kernel = nnx.data(param(value, spec))
    lora_modules.detach(linear)
    errors.append(error)
  whole_modules.unmark(out)
  lora_modules.tell(errors, report, _log)
  return out


def match(model: Transformer, targets: tuple[str, ...]) -> list[str]:
  """The modules that the targets name, in the model's order.

  Raises:
    ValueError: see `apply`.
  """
  lora_modules.require_bare(model)
  return lora_modules.select(model, targets)


def describe(model: Transformer) -> str:
  """A table of what is adapted, and how much of the model that is.

  Raises:
    ValueError: the model has no adapters.
  """
  lora_modules.require_adapters(model)
  lines, trained = [], 0
  for path, linear in lora_modules.adapted(model).items():
    leaves = jax.tree.leaves(nnx.state(linear, nnx.LoRAParam))
    size = sum(leaf.size for leaf in leaves)
    assert linear.lora_a is not None  # it is adapted
    rank = linear.lora_a.shape[-1]
    shape = " x ".join(map(str, linear.kernel.shape))
    lines.append(f"{path:32} {shape:24} rank {rank:<4} {size:>12,}")
    trained += size
  for path, variable in whole_modules.of(model).items():
    shape = " x ".join(map(str, variable.shape))
    lines.append(f"{path:32} {shape:24} whole     {variable.size:>12,}")
    trained += variable.size
  total = lora_modules.count(model)
  share = 100 * trained / total
  lines.append(f"trainable {trained:,} of {total:,} parameters ({share:.2f} %)")
  return "\n".join(lines)
