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
    builds_logits: whether `states` are logits: their memory grows with the vocabulary.
  """

  builds_logits: ClassVar[bool]

  model: Any
  parameters: Parameters

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
  def states(
    self,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    attention_mask: Bool[Array, "B T T"] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    remedy: str = "",
  ) -> Float[Array, "B T _"]:
    """Runs the model: final hidden states [B, T, D], or logits [B, T, V].

    Args:
      tokens, positions, segment_ids: of right-padded or packed rows; None: one example
        a row, positions counted from 0.
      attention_mask: True where a query may look; None: causal, inside segments. It
        stands for the segments too, where both are given.
      extra: further arguments by name.
      remedy: what a user can do about a call of another form.

    Raises:
      TypeError: the model's call has another form, or cannot be told of the mask.
    """

  def full_logits(
    self,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    attention_mask: Bool[Array, "B T T"] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    remedy: str = "",
  ) -> Float[Array, "B T V"]:
    """What the model's plain call gives, all of it: logits, or the first of a tuple.

    The call is (tokens, positions, cache, attention_mask), or of tokens alone.

    Args, Raises: see `states`.
    """
    form = self._form(remedy)
    named = dict(extra or {})
    out = form(tokens, positions, segment_ids, attention_mask, named, remedy)
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

  def _form(self, remedy: str) -> Callable[..., Any]:
    """How this model is called."""
    if {"positions", "cache", "attention_mask"} <= self.parameters.keys():
      return self._with_cache
    required = sum(_required(p) for p in self.parameters.values())
    if required <= 1 and self.parameters:
      return self._tokens_alone
    raise TypeError(
      f"{self.name} takes ({', '.join(self.parameters)}): models are called with "
      f"(tokens, positions, cache, attention_mask) or with tokens alone{remedy}"
    )

  def _with_cache(self, tokens, positions, segments, mask, extra, remedy):
    del remedy  # such a call takes everything
    if positions is None:
      positions = (
        jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if segments is None
        else masks.positions_from_segments(segments)
      )
    if mask is None:
      mask = _dense_mask(tokens, segments)
    return self.model(tokens, positions, None, mask, **extra)

  def _tokens_alone(self, tokens, positions, segments, mask, extra, remedy):
    """Whatever else is known is named where the call has a parameter for it."""
    own = self.parameters
    if mask is None and segments is not None and "segment_ids" not in own:
      mask = _dense_mask(tokens, segments)
    if mask is not None and segments is None and "attention_mask" not in own:
      raise TypeError(
        f"there is an attention_mask, which {self.name} does not take{remedy}"
      )
    known = {"positions": positions, "segment_ids": segments, "attention_mask": mask}
    named = {k: v for k, v in known.items() if v is not None and k in own}
    return self.model(tokens, **named, **extra)


class _FromHidden(LanguageModel):
  """A model with the seam: logits are built a chunk of the vocabulary at a time."""

  builds_logits = False

  def states(
    self,
    tokens,
    positions=None,
    segment_ids=None,
    attention_mask=None,
    *,
    extra=None,
    remedy="",
  ):
    del remedy
    segments = None if attention_mask is not None else segment_ids
    named = {"return_hidden": True, **(extra or {})}
    if self.accepts("segment_ids"):
      named["segment_ids"] = segments
      return self.model(tokens, positions, None, attention_mask, **named)[0]
    # Its call may have no places for the others: name those there are.
    known = {
      "positions": positions,
      "segment_ids": segments,
      "attention_mask": attention_mask,
    }
    named |= {k: v for k, v in known.items() if v is not None}
    return self.model(tokens, **named)[0]

  def unembed(self, states):
    build = getattr(self.model, "logits", None)
    if build is not None:
      return build(states)
    # The seam asks a user's model for its unembedding alone.
    table, layout = self.model.unembedding()
    flat = chunk_logits(states.reshape(-1, states.shape[-1]), table, layout)
    return flat.reshape(*states.shape[:-1], -1)

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

  def states(self, *args, **kwargs):
    return self.full_logits(*args, **kwargs)

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


def adapt(model: nnx.Module) -> LanguageModel:
  """A model of any make as losses and scores see it."""
  parameters = call_parameters(model)
  seam = takes(parameters, "return_hidden") and isinstance(model, Unembeds)
  return (_FromHidden if seam else _FromLogits)(model, parameters)


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
