"""Per-layer embeddings: a vector for each token and layer, beside the residual stream.

The vector of layer l is (norm(W x / sqrt(D)) + sqrt(P) e) / sqrt(2), each reshaped to
[L, P]: x is the embedding of the token and e a row of a second table (Gemma 3n and 4).
The layer adds norm(V (activation(G h) * vector)) to its residual stream h.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.dense.layers import ACTIVATIONS
from tunix.models.transformer.layer_maker import LayerMaker


class LayerInputs(nnx.Module):
  """The vectors of all layers.

  Attributes:
    table: embedding table [V, L*P].
    projection: linear map [D, L*P] of the embeddings.
    norm: RMS norm of a projected vector.
    num_layers: number of layers L.
  """

  def __init__(self, config: TransformerConfig, make: LayerMaker):
    c, size = config, config.layer_input_dim
    assert size is not None
    width = c.num_layers * size
    self.table = make.embedding(c.layer_input_vocab or c.vocab_size, width, size**0.5)
    self.projection = make.linear(c.embed_dim, width, "in_out")
    self.norm = make.norm(size, c.norm_eps, c.norm_offset)
    self.num_layers = c.num_layers

  def __call__(
    self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
  ) -> Float[Array, "L B T P"]:
    """Returns the vectors of a call.

    Args:
      tokens: token ids.
      x: embeddings of the tokens, the input of the first layer.
    """
    with jax.named_scope("layer_inputs"):

      def by_layer(y):
        return y.reshape(*tokens.shape, self.num_layers, -1)

      factor = jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
      projected = self.norm(by_layer(self.projection(x) * factor))
      own = by_layer(self.table(tokens, x.dtype))
      both = (projected + own) * jnp.asarray(math.sqrt(0.5), x.dtype)
      return jnp.moveaxis(both, 2, 0)


class LayerInputGate(nnx.Module):
  """The use of a layer's vectors.

  Attributes:
    gate, projection: linear maps [D, P] and [P, D].
    norm: RMS norm of the result.
  """

  def __init__(self, config: TransformerConfig, make: LayerMaker):
    c, size = config, config.layer_input_dim
    assert size is not None
    self.gate = make.linear(c.embed_dim, size, "in_out")
    self.projection = make.linear(size, c.embed_dim, "out_in")
    self.norm = make.norm(c.embed_dim, c.norm_eps, c.norm_offset)
    self.activation = ACTIVATIONS[c.activation]

  def __call__(
    self, x: Float[Array, "B T D"], vector: Float[Array, "B T P"]
  ) -> Float[Array, "B T D"]:
    """Returns the addition to the residual stream x."""
    hidden = self.activation(self.gate(x)) * vector
    return self.norm(self.projection(hidden))
