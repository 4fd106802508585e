"""Records of routes: the experts of tokens, in few bytes, from sampling to training.

A record has, for each token, each layer with experts and each of the token's k experts,
1 + the number of the expert. 0 says that nothing is recorded, and the router of a
replay chooses. Padding with 0 is therefore harmless.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, UInt

from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.experts import routing

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RouteForm:
  """The form of the records of a model.

  Attributes:
    layers: numbers of the layers with experts, M of the L layers.
    num_layers: L.
    experts_per_token: k.
    num_experts: E.
  """

  layers: tuple[int, ...]
  num_layers: int
  experts_per_token: int
  num_experts: int

  @property
  def shape(self) -> tuple[int, int]:
    """(M, k), the shape of one token's record."""
    return len(self.layers), self.experts_per_token

  @property
  def dtype(self) -> np.dtype:
    """uint8 for up to 255 experts, else uint16: E + 1 values must fit."""
    return np.dtype(np.uint8 if self.num_experts < 2**8 else np.uint16)

  @property
  def token_bytes(self) -> int:
    """Bytes of one token's record."""
    return math.prod(self.shape) * self.dtype.itemsize

  def empty(self, *tokens: int) -> np.ndarray:
    """Returns a record [*tokens, M, k] without routes."""
    return np.zeros((*tokens, *self.shape), self.dtype)

  def packed(self, choice: Int[Array, "L B T k"]) -> UInt[Array, "B T M k"]:
    """Returns the record of the experts that `routing.logged` recorded."""
    own = choice[np.array(self.layers)] + 1
    return own.astype(self.dtype).transpose(1, 2, 0, 3)

  def expert_choice(self, routes: UInt[Array, "B T M k"]) -> Int[Array, "L B T k"]:
    """Returns a record as the argument `expert_choice` of the decoder, int16.

    Raises:
      ValueError: the record is one of another model.
    """
    if routes.shape[2:] != self.shape:
      raise ValueError(
        f"the recorded routes have shape {routes.shape}; expected [rows, tokens, "
        f"{self.shape[0]}, {self.shape[1]}], the layers with experts and the experts "
        "of a token. Sample with the model that is trained"
      )
    own = routes.transpose(2, 0, 1, 3).astype(jnp.int16) - jnp.int16(1)
    if len(self.layers) == self.num_layers:
      return own
    every = jnp.full((self.num_layers, *own.shape[1:]), -1, jnp.int16)
    return every.at[np.array(self.layers)].set(own)


def form_of(model: nnx.Module) -> RouteForm:
  """Returns the form of a model's records.

  Raises:
    ValueError: the model is not our decoder, or has no experts.
  """
  config = getattr(model, "config", None)
  if not isinstance(config, TransformerConfig) or config.moe is None:
    raise ValueError(
      f"{type(model).__name__} has no experts whose routes can be recorded; expected a "
      "mixture of experts of tunix. Leave the recording of routes out"
    )
  layers = range(config.num_layers)
  return RouteForm(
    layers=tuple(i for i in layers if config.of_layer(i).has_experts),
    num_layers=config.num_layers,
    experts_per_token=config.moe.experts_per_token,
    num_experts=config.moe.num_experts,
  )


def recorded(
  model: nnx.Module, call: Callable[[], T]
) -> tuple[T, UInt[Array, "B T M k"]]:
  """Returns the result of a function, and the routes of the model's last call in it.

  Args:
    model: the decoder.
    call: a function that calls the decoder. It must not be differentiated.
  """
  form = form_of(model)
  with routing.logged(model, records=True) as logs:
    out = call()
    (log,) = logs
    assert log.choice is not None
    return out, form.packed(log.choice[...])


def replayed(
  model: nnx.Module, routes: UInt[Array, "B T M k"] | None
) -> dict[str, jax.Array]:
  """Returns the arguments of a call of the decoder that replays a record."""
  if routes is None:
    return {}
  return {"expert_choice": form_of(model).expert_choice(routes)}
