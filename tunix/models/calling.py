"""One interface to models of any kind: `adapt(model)` returns a `LanguageModel`.

Code that runs a model over whole sequences calls `states`, selects some positions, and
passes their states to a method such as `token_logps`. If the model can return its final
hidden states, these are the states, and no array [B, T, V] is built. For any other
model the states are its logits. Callers do not need to distinguish the two.

A `LanguageModel` holds no arrays besides the module's. It can be made anywhere, also
inside a traced function.
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

from tunix.ops import masks
from tunix.ops.distill import TopK, top_k
from tunix.ops.distill_hidden import hidden_top_k
from tunix.ops.reductions import WeightedSum, weighted_sum
from tunix.ops.vocabulary import logprobs
from tunix.ops.vocabulary.logprobs import TokenScores
from tunix.ops.vocabulary.softmax import Layout, chunk_logits
from tunix.utils import mesh as mesh_lib

Parameters = Mapping[str, inspect.Parameter]


class Unembedded(NamedTuple):
  """Logits in the form of hidden states and an unembedding, without the product.

  Attributes:
    hidden: final hidden states, [B, T, D].
    table, layout: the unembedding and its layout, see `Transformer.unembedding`.
  """

  hidden: jax.Array
  table: jax.Array
  layout: Layout


@dataclasses.dataclass(frozen=True)
class Sequences:
  """The input of a model: right-padded or packed rows.

  Attributes:
    tokens: token ids, int [B, T].
    positions: int [B, T]; None counts from 0 in every segment.
    segment_ids: int [B, T], number of the example in a packed row that each token
      belongs to; None for one example per row.
    attention_mask: bool [B, T, T], True where a query may attend to a key; None for a
      causal mask inside segments. If it is given, `segment_ids` have no effect.
    extra: further arguments of the model's call, by name.
  """

  tokens: Int[Array, "B T"]
  positions: Int[Array, "B T"] | None = None
  segment_ids: Int[Array, "B T"] | None = None
  attention_mask: Bool[Array, "B T T"] | None = None
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Unembeds(Protocol):
  """A model with an accessible unembedding.

  If its call has a parameter `return_hidden`, the final hidden states are used.
  """

  def unembedding(self) -> tuple[Any, Layout]:
    """Returns the table [V, D] or [D, V], and its layout."""
    ...


@dataclasses.dataclass(frozen=True)
class LanguageModel(abc.ABC):
  """The interface of a model to losses and scores; made by `adapt`.

  Attributes:
    model: the module. Only its `__call__` is used, because wrappers of modules (qwix,
      captured layers) intercept nothing else.
    parameters: the parameters of that call, without self.
    remedy: text for messages: what to do if the call has another form.
    builds_logits: True if `states` are logits, whose memory grows with the vocabulary.
  """

  builds_logits: ClassVar[bool]

  model: Any
  parameters: Parameters
  remedy: str = ""

  @property
  def name(self) -> str:
    """The name of the model's call, for messages."""
    return f"{type(self.model).__name__}.__call__"

  def accepts(self, name: str) -> bool:
    """Returns True if the model's call has a parameter of this name."""
    return takes(self.parameters, name)

  @property
  def shares_prompts(self) -> bool:
    """True if a prompt can be computed once for a group of completions."""
    # The blocks of keys that a batch-invariant model adds begin with the prompt.
    is_invariant = config_value(self.model, "batch_invariant", False)
    takes_layout = not self.builds_logits and self.accepts("shared_prompt")
    return takes_layout and not is_invariant

  @abc.abstractmethod
  def states(self, rows: Sequences) -> Float[Array, "B T _"]:
    """Runs the model and returns hidden states [B, T, D], or logits [B, T, V].

    Raises:
      TypeError: the model's call has an unsupported form, or no parameter for a mask.
    """

  def full_logits(self, rows: Sequences) -> Float[Array, "B T V"]:
    """Returns the logits of the model's call, or the first part of a returned tuple.

    The call takes (tokens, positions, cache, attention_mask), or tokens alone.

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
    """Returns the logits of states, or the scores of a model with a score head."""

  @abc.abstractmethod
  def output(self, states: Float[Array, "*B _"]) -> Unembedded | Float[Array, "*B V"]:
    """Returns the logits of states, in the form `Unembedded` if the model allows it."""

  @abc.abstractmethod
  def token_logps(
    self,
    states: Float[Array, "*B _"],
    targets: Int[Array, "*B"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    needed: Bool[Array, "*B"] | None = None,
    exact: bool = False,
  ) -> TokenScores:
    """Returns log-probabilities of the targets in nats, see `ops.logprobs`.

    Args:
      states: the model's states of each token.
      targets: the token to score at each position.
      temperature, entropy, needed: see `ops.logprobs.token_logps`.
      exact: if True, sums over the vocabulary add in the same order in every program
        (`Layout.invariant`), on one CPU. Elsewhere, and for models that return only
        logits, it has no effect.
    """

  @abc.abstractmethod
  def logps_at(
    self,
    states: Float[Array, "B T _"],
    ids: Int[Array, "B T k"],
    *,
    temperature: float = 1.0,
  ) -> Float[Array, "B T k"]:
    """Returns log-probabilities of k tokens at every position, in nats."""

  @abc.abstractmethod
  def cross_entropy(
    self,
    states: Float[Array, "*B _"],
    targets: Int[Array, "*B"],
    weights: Float[Array, "*B"],
  ) -> WeightedSum:
    """Returns the weighted sum of -log p of the targets in nats, and of the weights."""

  @abc.abstractmethod
  def top_k(self, states: Float[Array, "*B _"], k: int, temperature: float) -> TopK:
    """Returns the k most likely tokens at every position."""

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
    """Calls a model with tokens, and with other inputs that it has parameters for."""
    mask, segments, taken = rows.attention_mask, rows.segment_ids, self.parameters
    if mask is None and segments is not None and "segment_ids" not in taken:
      mask = _dense_mask(rows.tokens, segments)
    if mask is not None and segments is None and "attention_mask" not in taken:
      raise TypeError(
        f"there is an attention_mask, which {self.name} does not take{self.remedy}"
      )
    arguments = {
      "positions": rows.positions,
      "segment_ids": segments,
      "attention_mask": mask,
    }
    named = {k: v for k, v in arguments.items() if v is not None and k in taken}
    return self.model(rows.tokens, **named, **rows.extra)


class _FromHidden(LanguageModel):
  """A model that offers hidden states; its logits are built in vocabulary chunks."""

  builds_logits = False

  def states(self, rows):
    extra = {**rows.extra, "return_hidden": True}
    if not self.accepts("segment_ids"):
      return self.full_logits(dataclasses.replace(rows, extra=extra))
    # The model restricts attention to segments itself, without a mask [B, T, T].
    mask = rows.attention_mask
    segments = None if mask is not None else rows.segment_ids
    named = {"segment_ids": segments, **extra}
    return self.model(rows.tokens, rows.positions, None, mask, **named)[0]

  def unembed(self, states):
    logits = getattr(self.model, "logits", None)
    if logits is not None:  # a score head has no unembedding table
      return logits(states)
    table, layout = self.model.unembedding()
    flat = chunk_logits(states.reshape(-1, states.shape[-1]), table, layout)
    return flat.reshape(*states.shape[:-1], flat.shape[-1])

  def output(self, states):
    return Unembedded(states, *self.model.unembedding())

  def token_logps(self, states, targets, *, exact=False, **options):
    table, layout = self.model.unembedding()
    # The sums are matrix products, which other platforms may compute in 16 bits.
    if exact and layout.mesh is None and mesh_lib.context_platform() == "cpu":
      layout = layout._replace(invariant=True)
    return logprobs.token_logps(states, table, targets, layout, **options)

  def logps_at(self, states, ids, **options):
    table, layout = self.model.unembedding()
    return logprobs.logps_at(states, table, ids, layout, **options)

  def cross_entropy(self, states, targets, weights):
    # Unlike that of `token_logps`, its backward pass stores no log-probabilities.
    table, layout = self.model.unembedding()
    total = logprobs.weighted_nll(states, table, targets, weights, layout)
    return WeightedSum(total, jnp.sum(weights))

  def top_k(self, states, k, temperature):
    table, layout = self.model.unembedding()
    return hidden_top_k(states, table, k, temperature, layout)


class _FromLogits(LanguageModel):
  """A model that offers only logits, which are its states."""

  builds_logits = True

  def states(self, rows):
    return self.full_logits(rows)

  def unembed(self, states):
    return states

  def output(self, states):
    return states

  def token_logps(self, states, targets, *, needed=None, exact=False, **options):
    del exact
    out = logprobs.logits_logps(states, targets, **options)
    if needed is None:
      return out
    return jax.tree.map(lambda x: jnp.where(needed, x, 0.0), out)

  def logps_at(self, states, ids, *, temperature=1.0):
    every = jax.nn.log_softmax(states.astype(jnp.float32) / temperature)
    return jnp.take_along_axis(every, ids, axis=-1)

  def cross_entropy(self, states, targets, weights):
    return weighted_sum(-self.token_logps(states, targets).logps, weights)

  def top_k(self, states, k, temperature):
    return top_k(states, k, temperature)


def adapt(model: nnx.Module, remedy: str = "") -> LanguageModel:
  """Returns the interface of a model to losses and scores.

  Args:
    model: a module.
    remedy: see LanguageModel.
  """
  parameters = call_parameters(model)
  offers_hidden = takes(parameters, "return_hidden") and isinstance(model, Unembeds)
  return (_FromHidden if offers_hidden else _FromLogits)(model, parameters, remedy)


def images_of(model: nnx.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the field `images` of a batch as an argument of a model; {} without it.

  Args:
    model: the model that reads the batch.
    batch: fields by name.

  Raises:
    ValueError: the batch has images and the model's call takes none.
  """
  if batch.get("images") is None:
    return {}
  if not takes(call_parameters(model), "images"):
    raise ValueError(
      f"the batch has images, and {type(model).__name__}.__call__ takes none; expected "
      "a model with a vision tower. Load it with images=True, or leave the images out"
    )
  return {"images": batch["images"]}


def vocab_size(model: nnx.Module) -> int | None:
  """Returns the size of a model's vocabulary; None if the model does not state it."""
  return getattr(model, "vocab_size", None) or config_value(model, "vocab_size")


def config_value(model: object, name: str, default: Any = None) -> Any:
  """Returns a field of `model.config`; `default` if the model or its config has none.

  A model of a user may have no config, or one with other fields.
  """
  return getattr(getattr(model, "config", None), name, default)


def call_parameters(model: nnx.Module) -> Parameters:
  """Returns the parameters of the model's `__call__`, without self."""
  return _parameters(type(model).__call__)


# Cached by function and not by type: qwix makes a new subclass for every model.
@functools.lru_cache(maxsize=256)
def _parameters(call: Callable[..., Any]) -> Parameters:
  return dict(list(inspect.signature(call).parameters.items())[1:])


def takes(accepted: Parameters, name: str) -> bool:
  """Returns True if a call with these parameters accepts the argument."""
  anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
  return anything or name in accepted


def _dense_mask(tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
  """Returns the causal mask inside segments, bool [B, T, T]."""
  index = jnp.arange(tokens.shape[1])
  mask = masks.causal_mask(index, index, segments, segments)
  return jnp.broadcast_to(mask, (tokens.shape[0], *mask.shape[1:]))


def _required(parameter: inspect.Parameter) -> bool:
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return parameter.default is parameter.empty and parameter.kind not in variadic
