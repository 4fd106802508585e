"""Models of any make, adapted once at the door: `adapt(model)`.

Whoever runs a model over whole sequences asks its `LanguageModel` for `states`, picks
the positions that count, and hands them back to be scored. Of a model that offers its
final hidden states these are the states, and no array [B, T, V] is built; of any other
they are its logits. Callers do not ask which.

An adapter holds no arrays of its own: make one where the model is at hand, inside a
traced function too.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.ops import logprobs, masks
from tunix.ops.distill import TopK, top_k
from tunix.ops.distill_hidden import hidden_top_k
from tunix.ops.logprobs import TokenScores
from tunix.ops.reductions import WeightedSum, weighted_sum
from tunix.ops.vocab_chunks import Layout, chunk_logits

Parameters = Mapping[str, inspect.Parameter]


class Unembedded(NamedTuple):
  """Logits that are not built.

  Attributes:
    hidden: [B, T, D] final hidden states.
    table, layout: what turns them into logits, see `Transformer.unembedding`.
  """

  hidden: Any
  table: Any
  layout: Layout


@dataclasses.dataclass(frozen=True)
class Sequences:
  """What a model is run over: right-padded or packed rows.

  Attributes:
    tokens: int [B, T].
    positions: int [B, T]; None: counted from 0, in every segment.
    segment_ids: int [B, T], the example of a packed row that a token belongs to; None:
      one example a row.
    attention_mask: bool [B, T, T], True where a query may look; None: causal, inside
      segments. It stands for the segments too, where both are given.
    extra: further arguments of the model's call, by name.
  """

  tokens: Int[Array, "B T"]
  positions: Int[Array, "B T"] | None = None
  segment_ids: Int[Array, "B T"] | None = None
  attention_mask: Bool[Array, "B T T"] | None = None
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Unembeds(Protocol):
  """A model whose unembedding is known; with `return_hidden=` in its call it offers its
  final hidden states."""

  def unembedding(self) -> tuple[Any, Layout]:
    """The table [V, D] or [D, V], and how it is stored."""
    ...


@dataclasses.dataclass(frozen=True)
class LanguageModel(abc.ABC):
  """A model as losses and scores see it; made by `adapt`.

  Attributes:
    model: the module itself. Its `__call__` is the one entry: what wraps modules (qwix,
      captured layers) sees nothing else.
    parameters: of that call, without self.
    remedy: what a user can do about a call of another form.
    builds_logits: whether `states` are logits: their memory grows with the vocabulary.
  """

  builds_logits: ClassVar[bool]

  model: Any
  parameters: Parameters
  remedy: str = ""

  @property
  def name(self) -> str:
    """Of the model's call, for messages."""
    return f"{type(self.model).__name__}.__call__"

  def accepts(self, name: str) -> bool:
    """Whether a call may name this argument."""
    return takes(self.parameters, name)

  @property
  def shares_prompts(self) -> bool:
    """Whether a prompt can be computed once for a group of completions."""
    return not self.builds_logits and self.accepts("shared_prompt")

  @abc.abstractmethod
  def states(self, rows: Sequences) -> Float[Array, "B T _"]:
    """Runs the model: final hidden states [B, T, D], or logits [B, T, V].

    Raises:
      TypeError: the model's call has another form, or cannot be told of the mask.
    """

  def full_logits(self, rows: Sequences) -> Float[Array, "B T V"]:
    """What the model's plain call gives, all of it: logits, or the first of a tuple.

    The call is (tokens, positions, cache, attention_mask), or of tokens alone.

    Raises:
      TypeError: see `states`.
    """
    if {"positions", "cache", "attention_mask"} <= self.parameters.keys():
      out = self._with_cache(rows)
    elif self.parameters and sum(map(_required, self.parameters.values())) <= 1:
      out = self._tokens_alone(rows)
    else:
      raise TypeError(
        f"{self.name} takes ({', '.join(self.parameters)}): models are called with "
        f"(tokens, positions, cache, attention_mask) or with tokens alone{self.remedy}"
      )
    return out[0] if isinstance(out, tuple) else out

  @abc.abstractmethod
  def unembed(self, states: Float[Array, "*B _"]) -> Float[Array, "*B V"]:
    """What `states` stand for, built; a head's scores where the model has one."""

  @abc.abstractmethod
  def output(self, states: Float[Array, "*B _"]) -> Unembedded | Float[Array, "*B V"]:
    """The same, not built where the model allows it."""

  @abc.abstractmethod
  def token_logps(
    self,
    states: Float[Array, "*B _"],
    targets: Int[Array, "*B"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
  ) -> TokenScores:
    """Log-probabilities of the targets, in nats; see `ops.logprobs`."""

  @abc.abstractmethod
  def cross_entropy(
    self,
    states: Float[Array, "*B _"],
    targets: Int[Array, "*B"],
    weights: Float[Array, "*B"],
  ) -> WeightedSum:
    """Sum of -log p of the targets by their weights, in nats, and the weights'."""

  @abc.abstractmethod
  def top_k(self, states: Float[Array, "*B _"], k: int, temperature: float) -> TopK:
    """The k most likely words of every position."""

  def _with_cache(self, rows: Sequences) -> Any:
    positions, mask, segments = rows.positions, rows.attention_mask, rows.segment_ids
    if positions is None:
      positions = (
        jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
        if segments is None
        else masks.positions_from_segments(segments)
      )
    if mask is None:
      mask = _dense_mask(rows.tokens, segments)
    return self.model(rows.tokens, positions, None, mask, **rows.extra)

  def _tokens_alone(self, rows: Sequences) -> Any:
    """Whatever else is known is named where the call has a parameter for it."""
    mask, segments, taken = rows.attention_mask, rows.segment_ids, self.parameters
    if mask is None and segments is not None and "segment_ids" not in taken:
      mask = _dense_mask(rows.tokens, segments)
    if mask is not None and segments is None and "attention_mask" not in taken:
      raise TypeError(
        f"there is an attention_mask, which {self.name} does not take{self.remedy}"
      )
    known = {
      "positions": rows.positions,
      "segment_ids": segments,
      "attention_mask": mask,
    }
    named = {k: v for k, v in known.items() if v is not None and k in taken}
    return self.model(rows.tokens, **named, **rows.extra)


class _FromHidden(LanguageModel):
  """A model with the seam: logits are built a chunk of the vocabulary at a time."""

  builds_logits = False

  def states(self, rows):
    extra = {**rows.extra, "return_hidden": True}
    if not self.accepts("segment_ids"):
      return self.full_logits(dataclasses.replace(rows, extra=extra))
    # It reads segments by itself: no mask [B, T, T] is built of them.
    mask = rows.attention_mask
    segments = None if mask is not None else rows.segment_ids
    named = {"segment_ids": segments, **extra}
    return self.model(rows.tokens, rows.positions, None, mask, **named)[0]

  def unembed(self, states):
    logits = getattr(self.model, "logits", None)
    if logits is not None:  # a head of scores has no table to go by
      return logits(states)
    table, layout = self.model.unembedding()
    flat = chunk_logits(states.reshape(-1, states.shape[-1]), table, layout)
    return flat.reshape(*states.shape[:-1], flat.shape[-1])

  def output(self, states):
    return Unembedded(states, *self.model.unembedding())

  def token_logps(self, states, targets, *, temperature=1.0, entropy=False):
    table, layout = self.model.unembedding()
    options = {"temperature": temperature, "entropy": entropy}
    return logprobs.token_logps(states, table, targets, layout, **options)

  def cross_entropy(self, states, targets, weights):
    # Its backward pass holds no log-probability of a token, unlike `token_logps`.
    table, layout = self.model.unembedding()
    total = logprobs.weighted_nll(states, table, targets, weights, layout)
    return WeightedSum(total, jnp.sum(weights))

  def top_k(self, states, k, temperature):
    table, layout = self.model.unembedding()
    return hidden_top_k(states, table, k, temperature, layout)


class _FromLogits(LanguageModel):
  """Any other model: its logits are its states."""

  builds_logits = True

  def states(self, rows):
    return self.full_logits(rows)

  def unembed(self, states):
    return states

  def output(self, states):
    return states

  def token_logps(self, states, targets, *, temperature=1.0, entropy=False):
    options = {"temperature": temperature, "entropy": entropy}
    return logprobs.logits_logps(states, targets, **options)

  def cross_entropy(self, states, targets, weights):
    return weighted_sum(-self.token_logps(states, targets).logps, weights)

  def top_k(self, states, k, temperature):
    return top_k(states, k, temperature)


def adapt(model: nnx.Module, remedy: str = "") -> LanguageModel:
  """A model of any make as losses and scores see it.

  Args:
    model: a module.
    remedy: see LanguageModel.
  """
  parameters = call_parameters(model)
  seam = takes(parameters, "return_hidden") and isinstance(model, Unembeds)
  return (_FromHidden if seam else _FromLogits)(model, parameters, remedy)


def vocab_size(model: Any) -> int | None:
  """Words that a model says it has; None: it does not say."""
  stated = getattr(model, "vocab_size", None)
  return stated or getattr(getattr(model, "config", None), "vocab_size", None)


def call_parameters(model: nnx.Module) -> Parameters:
  """Parameters of the model's `__call__`, without self."""
  return _parameters(type(model).__call__)


# By the function, not the type: qwix makes a new subclass for every model.
@functools.lru_cache(maxsize=256)
def _parameters(call: Callable[..., Any]) -> Parameters:
  return dict(list(inspect.signature(call).parameters.items())[1:])


def takes(accepted: Parameters, name: str) -> bool:
  """Whether a call may name this argument."""
  anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
  return anything or name in accepted


def _dense_mask(tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
  """Causal and inside segments, bool [B, T, T]."""
  index = jnp.arange(tokens.shape[1])
  mask = masks.causal_mask(index, index, segments, segments)
  return jnp.broadcast_to(mask, (tokens.shape[0], *mask.shape[1:]))


def _required(parameter: inspect.Parameter) -> bool:
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return parameter.default is parameter.empty and parameter.kind not in variadic
