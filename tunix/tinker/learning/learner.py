"""Gradients and updates of LoRA adapters over one frozen base model.

The base is the caller's model; its arrays are shared by all adapters and never change.
An adapter's arrays are arguments of the compiled programs, so adapters of one rank and
one choice of targets share their programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tunix.models import calling, lora
from tunix.models.adapters import lora_modules
from tunix.models.adapters.lora_modules import Adapter
from tunix.models.calling import Sequences
from tunix.models.transformer.model import Transformer
from tunix.sft.steps.module_state import Skeleton
from tunix.tinker.errors import TinkerError
from tunix.tinker.learning import data, losses
from tunix.utils import checks, tree

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSpec:
  """The shape of an adapter.

  Attributes:
    rank: its rank.
    train_attn, train_mlp: True if the linear layers of attention, or of the
      feed-forward, have adapters.
  """

  rank: int
  train_attn: bool = True
  train_mlp: bool = True

  def __post_init__(self):
    checks.fields(self, rank=checks.COUNT)
    if not (self.train_attn or self.train_mlp):
      raise TinkerError(
        "train_attn and train_mlp are False; expected at least one of them, because "
        "the unembedding is not adapted here. Set one of them"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamParams:
  """Settings of one AdamW update (Loshchilov and Hutter 2019, arXiv:1711.05101).

  Attributes:
    learning_rate: the rate.
    beta1, beta2: decay of the two moments.
    eps: added to the root of the second moment.
    weight_decay: decay of the weights, times the rate.
    grad_clip_norm: largest global L2 norm of the gradient; 0 does not clip.
  """

  learning_rate: float = 1e-4
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-12
  weight_decay: float = 0.0
  grad_clip_norm: float = 0.0

  def __post_init__(self):
    share = checks.Range(0, 1, below=True)
    checks.fields(
      self,
      learning_rate=checks.NOT_NEGATIVE,
      beta1=share,
      beta2=share,
      eps=checks.NOT_NEGATIVE,
      weight_decay=checks.NOT_NEGATIVE,
      grad_clip_norm=checks.NOT_NEGATIVE,
    )


@dataclasses.dataclass(kw_only=True)
class AdapterState:
  """The arrays of one trained adapter.

  Attributes:
    params: the factors, nested by module.
    opt_state: the optimizer's state.
    gradient: sum of the gradients since the last update; None: none.
  """

  params: Any
  opt_state: Any
  gradient: Any = None

  @property
  def size_bytes(self) -> int:
    """Device memory of the adapter, its optimizer state and its gradient."""
    return 2 * tree.size_bytes(self.params) + tree.size_bytes(self.opt_state)


class RowOutputs(NamedTuple):
  """Results of one row, float32 [N] each, or [N, K] with K targets for each position.

  Attributes:
    logps: log-probabilities of the targets in nats.
    losses: weighted losses.
  """

  logps: np.ndarray
  losses: np.ndarray


class _Program(NamedTuple):
  """The key of a compiled gradient."""

  spec: AdapterSpec
  loss: str
  config: tuple[tuple[str, float], ...]
  backward: bool


class Learner:
  """Computes with the adapters of one base model.

  Args:
    model: the base, a model without adapters. It is unchanged.
    alpha: alpha of all adapters.
    batch_tokens: see `TinkerSettings.batch_tokens`.
  """

  def __init__(self, model: Transformer, *, alpha: float, batch_tokens: int):
    lora_modules.require_bare(model)
    self.model = model
    self._paths = tuple(lora_modules.adaptable(model))
    self._alpha, self._batch_tokens = alpha, batch_tokens
    self._skeletons: dict[AdapterSpec, tuple[Skeleton, Any, Any]] = {}
    self._programs: dict[_Program, Any] = {}

  def init(self, spec: AdapterSpec, seed: int) -> AdapterState:
    """Returns a fresh adapter: A random, B zero."""
    adapted = lora.apply(self.model, self._lora(spec), seed=seed)
    skeleton = self._parts(spec, adapted)[0]
    params = skeleton.split(adapted)[0]
    return AdapterState(params=params, opt_state=_optimizer().init(params))

  def size_bytes(self, spec: AdapterSpec) -> int:
    """Returns the device memory of an adapter in training, without making it.

    Adapter, both moments of AdamW and the gradient have the same size.
    """
    total = 0
    modules = lora_modules.linears(self.model)
    for path in lora_modules.select(self.model, self._lora(spec).targets):
      *stack, rows, columns = modules[path].kernel.shape
      total += int(np.prod(stack, dtype=np.int64)) * spec.rank * (rows + columns)
    return 4 * 4 * total

  def forward_backward(
    self,
    spec: AdapterSpec,
    state: AdapterState,
    rows: Sequence[data.Row],
    loss: str,
    config: Mapping[str, float],
    *,
    backward: bool,
  ) -> list[RowOutputs]:
    """Computes the loss of rows; adds its gradient to `state.gradient`.

    Args:
      spec: shape of the adapter.
      state: the adapter. Only its gradient changes, and only with `backward`.
      rows: checked rows.
      loss: name of the loss.
      config: its whole configuration.
      backward: compute the gradient.

    Returns:
      The outputs of each row. The loss of the request is the sum of all `losses`.
    """
    program = self._program(_Program(spec, loss, tuple(config.items()), backward))
    _, frozen, rest = self._parts(spec)
    gradient = state.gradient
    if backward and gradient is None:
      gradient = jax.tree.map(jnp.zeros_like, state.params)
    out: list[RowOutputs | None] = [None] * len(rows)
    for batch in data.micro_batches(rows, self._batch_tokens):
      gradient, logps, values = program(
        state.params, gradient, frozen, rest, batch.arrays
      )
      logps, values = np.asarray(logps), np.asarray(values)
      for i, number in enumerate(batch.rows):
        part = (i, *map(slice, rows[number].inputs["target_tokens"].shape))
        # Copies, because a view would keep the padded arrays alive.
        out[number] = RowOutputs(logps[part].copy(), values[part].copy())
    if backward:
      state.gradient = gradient
    return [x for x in out if x is not None]

  def update(self, state: AdapterState, params: AdamParams) -> dict[str, float]:
    """Applies the summed gradient to an adapter, and returns metrics of the update.

    Raises:
      TinkerError: there is no gradient, or the update would make a weight that is not
        finite. The adapter then stays as it was, without a gradient.
    """
    if state.gradient is None:
      raise TinkerError(
        "optim_step has no gradient; expected a forward_backward since the last step. "
        "Send one first"
      )
    values = jnp.array(dataclasses.astuple(params), jnp.float32)
    state.params, state.opt_state, norm, is_finite = _update(
      state.params, state.opt_state, state.gradient, values
    )
    state.gradient = None
    if not is_finite:
      raise TinkerError(
        f"the update makes weights that are not finite, at grad_norm {float(norm):g} "
        f"and learning_rate {params.learning_rate:g}: the weights stay as they were. "
        "Lower the learning rate, or look at the data"
      )
    return {"grad_norm": float(norm), "learning_rate": params.learning_rate}

  def adapted(self, spec: AdapterSpec, params: Any) -> Transformer:
    """Returns the base with an adapter, for writing it as a PEFT folder."""
    skeleton, frozen, rest = self._parts(spec)
    return skeleton.merge(params, frozen, rest)

  def adapters(self, spec: AdapterSpec, flat: Mapping[str, Any]) -> dict[str, Adapter]:
    """Returns the adapter of each module, for the engine.

    Args:
      spec: shape of the adapter.
      flat: its factors by dotted name, see `tree.flatten`.
    """
    config = self._lora(spec)
    return {
      (path := name.removesuffix(".lora_a")): Adapter(
        a=np.asarray(a),
        b=np.asarray(flat[f"{path}.lora_b"]),
        scale=config.scale_of(path),
      )
      for name, a in flat.items()
      if name.endswith(".lora_a")
    }

  def to_arrays(self, state: AdapterState) -> dict[str, np.ndarray]:
    """Returns factors, optimizer state and an open gradient by name, on the host."""
    # Copies, because the next update donates the arrays, and a CPU array may share its
    # memory with a view.
    out = {f"params.{k}": np.array(v) for k, v in tree.flatten(state.params).items()}
    for i, leaf in enumerate(jax.tree.leaves(state.opt_state)):
      out[f"optimizer.{i}"] = np.array(leaf)
    for k, v in tree.flatten(state.gradient or {}).items():
      out[f"gradient.{k}"] = np.array(v)
    return out

  def from_arrays(
    self,
    spec: AdapterSpec,
    arrays: Mapping[str, np.ndarray],
    *,
    optimizer: bool = True,
  ) -> AdapterState:
    """Returns the state of `to_arrays`.

    Args:
      spec: shape of the adapter.
      arrays: the arrays.
      optimizer: take the optimizer's state and the gradient; else a fresh state.
    """

    def nested(prefix):
      return tree.nest(
        {
          name.removeprefix(prefix): jnp.array(x)
          for name, x in arrays.items()
          if name.startswith(prefix)
        }
      )

    params = nested("params.")
    opt_state = _optimizer().init(params)
    if optimizer:
      leaves, structure = jax.tree.flatten(opt_state)
      stored = [jnp.array(arrays[f"optimizer.{i}"]) for i in range(len(leaves))]
      opt_state = structure.unflatten(stored)
    self._parts(spec)
    gradient = (optimizer and nested("gradient.")) or None
    return AdapterState(params=params, opt_state=opt_state, gradient=gradient)

  def _lora(self, spec: AdapterSpec) -> lora.LoraConfig:
    names = (*_ATTENTION * spec.train_attn, *_MLP * spec.train_mlp)
    # Families differ in their layers: some feed-forward layers have no gate.
    targets = tuple(
      x for x in names if any(lora_modules.hits(x, p) for p in self._paths)
    )
    if not targets:
      raise TinkerError(
        f"the model has none of the layers {', '.join(names)}; expected some. "
        "Set train_attn or train_mlp"
      )
    return lora.LoraConfig(rank=spec.rank, alpha=self._alpha, targets=targets)

  def _parts(
    self, spec: AdapterSpec, adapted: Transformer | None = None
  ) -> tuple[Skeleton, Any, Any]:
    """Returns the structure of the adapted model, its frozen arrays and other ones."""
    if spec not in self._skeletons:
      if adapted is None:
        adapted = lora.apply(self.model, self._lora(spec))
      skeleton = Skeleton(adapted)
      self._skeletons[spec] = (skeleton, *skeleton.split(adapted)[1:])
    return self._skeletons[spec]

  def _program(self, key: _Program) -> Any:
    if key not in self._programs:
      skeleton = self._parts(key.spec)[0]
      self._programs[key] = jax.jit(
        _gradient(skeleton, key), donate_argnums=(1,) if key.backward else ()
      )
    return self._programs[key]


def _gradient(skeleton: Skeleton, key: _Program) -> Any:
  """Builds (params, sum, frozen, rest, batch) -> (sum + gradient, logps, losses)."""
  config = dict(key.config)

  def total(params, frozen, rest, batch):
    model: nnx.Module = skeleton.merge(params, frozen, rest)
    model.train()
    language_model = calling.adapt(model)
    states = language_model.states(
      Sequences(batch["tokens"], segment_ids=batch["segment_ids"])
    )
    targets = batch["target_tokens"]
    logps = (
      language_model.token_logps(states, targets).logps
      if targets.ndim == 2
      else language_model.logps_at(states, targets)
    )
    values = losses.weighted(key.loss, logps, batch, config)
    return jnp.sum(values), (logps, values)

  def forward(params, summed, frozen, rest, batch):
    return (summed, *total(params, frozen, rest, batch)[1])

  def backward(params, summed, frozen, rest, batch):
    gradient, outputs = jax.grad(total, has_aux=True)(params, frozen, rest, batch)
    return (jax.tree.map(jnp.add, summed, gradient), *outputs)

  return backward if key.backward else forward


def _optimizer(
  rate: Any = 0.0, b1: Any = 0.9, b2: Any = 0.95, eps: Any = 1e-12, decay: Any = 0.0
) -> optax.GradientTransformation:
  return optax.adamw(rate, b1, b2, eps, weight_decay=decay)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _update(params, opt_state, gradient, values):
  rate, b1, b2, eps, decay, clip = values
  norm = optax.tree.norm(gradient)
  too_large = (clip > 0) & (norm > clip)
  factor = jnp.where(too_large, clip / norm, 1.0)
  gradient = jax.tree.map(lambda g: g * factor, gradient)
  updates, moved = _optimizer(rate, b1, b2, eps, decay).update(
    gradient, opt_state, params
  )
  new = optax.apply_updates(params, updates), moved
  is_finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(new)]).all()
  chosen = jax.tree.map(
    lambda x, before: jnp.where(is_finite, x, before), new, (params, opt_state)
  )
  return *chosen, norm, is_finite
