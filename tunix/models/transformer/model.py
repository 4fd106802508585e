"""The decoder that all families share.

The weights of all layers are stacked, see decoder_layers.py. `unstack` returns the same
model with one module per layer, so that a decode loop takes the slices once, outside
the loop.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tunix.models.transformer import cache as cache_lib
from tunix.models.transformer.attention import kv_sharing, rope
from tunix.models.transformer.attention.layer import Attention
from tunix.models.transformer.cache import KVCache
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.configs import checks
from tunix.models.transformer.decoder_layer import DecoderLayer
from tunix.models.transformer.decoder_layers import DecoderLayers
from tunix.models.transformer.dense import cpu_products, dropout, qwix_seam
from tunix.models.transformer.dense.cpu_products import TransposedKernel
from tunix.models.transformer.dense.layers import Linear, RMSNorm
from tunix.models.transformer.experts import routing
from tunix.models.transformer.layer_inputs import LayerInputs
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.shards import explicit, sharding
from tunix.models.transformer.shared_prompt import SharedPrompt
from tunix.models.transformer.token_rows import TokenRows
from tunix.models.transformer.visibility import Visibility
from tunix.ops.masks import positions_from_segments
from tunix.ops.vocabulary.invariant import LANES, kept
from tunix.ops.vocabulary.softmax import Layout, soft_cap
from tunix.utils import mesh as mesh_lib


class Transformer(DecoderLayers):
  """Decoder-only language model.

  Attributes:
    config: shape and options.
    embed_tokens, layers, norm, lm_head, score: the modules. `layers` is one module of
      stacked weights, or a dictionary of them by structure (see
      `TransformerConfig.structures`), or a list after `unstack`. `lm_head` is None if
      the embeddings are tied or if there is a `score` head, see
      `TransformerConfig.num_scores`.
    layer_inputs: makes the vectors of the layers, see layer_inputs.py; or None.
    token_rows: trained rows of some tokens below a frozen embedding, or None.
    router_log: the log of the routers that `routing.logged` opened, or None.
  """

  def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
    c = self.config = config
    make = LayerMaker(c.sharding, c.param_dtype, rngs, invariant=c.batch_invariant)
    scale = c.embed_dim**0.5 if c.scale_embeddings else c.embedding_multiplier
    self.embed_tokens = make.embedding(c.vocab_size, c.embed_dim, scale)
    has_inputs = c.layer_input_dim is not None
    self.layer_inputs = nnx.data(LayerInputs(c, make) if has_inputs else None)
    stacks = {
      name: DecoderLayer(c.of_layer(numbers[0]), (len(numbers),), rngs)
      for name, numbers in c.stacks.items()
    }
    self.layers = nnx.data(stacks[""] if "" in stacks else nnx.Dict(stacks))
    self.norm = make.norm(c.embed_dim, c.norm_eps, c.norm_offset)
    lm_head: Linear | None = None
    score: Linear | None = None
    if c.num_scores is not None:
      score = make.linear(c.embed_dim, c.num_scores, "router")
    elif not c.tie_embeddings:
      lm_head = make.linear(c.embed_dim, c.vocab_size, "in_out")
    self.lm_head, self.score = nnx.data(lm_head), nnx.data(score)
    self.token_rows: TokenRows | None = nnx.data(None)
    self.router_log: routing.RouterLog | None = nnx.data(None)

  @explicit.auto_inside(explicit.call_specs)
  def __call__(
    self,
    input_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    attention_mask: Bool[Array, "B T S"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    input_embeddings: Float[Array, "B T D"] | None = None,
    groups: Int[Array, "B T"] | None = None,
    shared_prompt: SharedPrompt | None = None,
    expert_choice: Int[Array, "L B T k"] | None = None,
    rope_offsets: Int[Array, "B T R/2"] | None = None,
    deepstack: Float[Array, "n B T D"] | None = None,
    return_hidden: bool = False,
  ) -> tuple[Float[Array, "B T V"] | Float[Array, "B T D"], KVCache | None]:
    """Runs the decoder.

    Args:
      input_tokens: token ids.
      positions: rotary positions. None counts from the cache's index, or from 0 in
        every segment.
      cache: keys and values of earlier tokens; the T tokens are added at its index.
      attention_mask: True where a query attends to a key; S is T, or the cache's size.
        None for a causal mask by slot, inside segments.
      segment_ids: segment of each token in packed rows; attention stays inside a
        segment. Not with a cache or a mask.
      input_embeddings: embeddings that replace those of the tokens, scaled as the
        family scales them; see `embed`.
      groups: group of each token; tokens of one nonzero group attend to each other in
        both directions (the parts of an image). See `Visibility`.
      shared_prompt: layout of rows that hold a prompt and several completions of it.
        A completion does not attend to another one. `segment_ids` are then 0 on padding
        and 1 on tokens. Not with a cache or a mask; groups are of the prompt alone.
      expert_choice: numbers of the experts that each layer's tokens use, as an earlier
        call recorded them (see `routing`); None lets the routers choose.
      rope_offsets: numbers that are added to the rotary positions of each rotated pair
        of dimensions (places of image tokens in their images).
      deepstack: vectors that are added to the residual stream after each of the first n
        layers (features of images; Meng et al. 2024, arXiv:2406.04334).
      return_hidden: if True, the unembedding is left out (see `unembedding`), so that a
        loss never holds [B, T, V].

    Returns:
      The logits in float32, or the final normalized hidden states; and the new cache,
      or None.

    Raises:
      ValueError: arguments that exclude each other were given, or the mask has another
        number of dimensions, or a `batch_invariant` model does not run on a CPU.
    """
    c = self.config
    _check_platform(c.batch_invariant)
    _check_call(cache, attention_mask, segment_ids, shared_prompt)
    index = jnp.arange(input_tokens.shape[1], dtype=jnp.int32)
    if cache is not None:
      index = index + cache.index
    if positions is None:
      positions = _positions(index, input_tokens, segment_ids, shared_prompt)
    x = self.embed(input_tokens) if input_embeddings is None else input_embeddings
    x = sharding.pin_activations(x.astype(c.dtype), c.sharding)
    rotated = None if c.mla is None else c.mla.rope_dim
    ropes = [(rotated or kind.head_dim, kind.rope) for kind in c.kinds]
    if rope_offsets is not None:
      positions = positions[..., None] + rope_offsets
    angles = rope.angles_by_kind(positions, ropes)
    visible = Visibility(
      index,
      attention_mask,
      segment_ids,
      groups,
      windowed_groups=c.grouped_layers == "sliding",
      shared=shared_prompt,
    )
    routes = routing.of_call(self, (x.shape[0], x.shape[1]), visible, expert_choice)
    vectors = self.layer_inputs and self.layer_inputs(input_tokens, x)
    if cache is not None:
      x, cache = self.run_cached(x, angles, visible, cache, routes, vectors, deepstack)
    else:
      x = self.run(x, angles, visible, routes, vectors, deepstack)
      dropout.advance(self.layers, x.shape[0])
    with jax.named_scope("final_norm"):
      x = self.norm(x)
      if c.logits_divisor != 1 and self.score is None:
        # Here and not at the logits: every loss and sampler then has the same logits.
        x = (x.astype(jnp.float32) / c.logits_divisor).astype(x.dtype)
        x = kept(x, c.batch_invariant)
    return (x if return_hidden else self.logits(x)), cache

  @explicit.auto_inside(explicit.hidden_spec)
  def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the embeddings of tokens, the input of the first layer."""
    with jax.named_scope("embed"):
      rules = self.config.sharding
      tokens = sharding.pin_lookup(tokens, rules)
      x = self.embed_tokens(tokens, self.config.dtype, self.token_rows)
      x = kept(x, self.config.batch_invariant)
      return sharding.pin_lookup(x, rules)

  def unstack(self) -> Transformer:
    """Returns the same model with a list of layer modules, which runs unrolled.

    The slices are copies: call it inside `jax.jit`, outside of a decode loop.
    """
    if not self.is_stacked:
      return self
    model = nnx.clone(self)
    layers = self._layer_list()
    qwix_seam.drop_layer_axis(layers)
    model.layers = nnx.data(nnx.List(layers))
    return model

  @explicit.auto_inside(explicit.logits_spec)
  def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Returns the float32 logits of hidden states, or the scores [B, T, n]."""
    if self.score is not None:
      with jax.named_scope("score"):
        return self.score(hidden.astype(jnp.float32))
    table, layout = self._frozen_unembedding()
    spec = "btd,vd->btv" if layout.transposed else "btd,dv->btv"
    invariant = self.config.batch_invariant

    def product(x, table):
      if invariant:
        table = (table.T if layout.transposed else table).astype(x.dtype)
        return cpu_products.invariant_product(x, table, jnp.float32)
      return jnp.einsum(
        spec, x, table.astype(x.dtype), preferred_element_type=jnp.float32
      )

    is_whole, head = layout.vocab_axis is None, self.lm_head
    with jax.named_scope("unembed"):
      if head is not None and isinstance(head.kernel, TransposedKernel):
        out = head.kernel.product(hidden, product, invariant)
      elif (
        layout.transposed
        and is_whole
        and cpu_products.suits(hidden)
        and not (invariant and (table.shape[0] < LANES or layout.mesh))
      ):
        out = cpu_products.few_rows(hidden, table.astype(hidden.dtype), invariant)
      else:
        out = product(cpu_products.doubled(hidden), table)[:, : hidden.shape[1]]
      if self.token_rows is not None:
        out = self.token_rows.in_logits(
          out, hidden, self.embed_tokens.embedding.dtype, tied=layout.transposed
        )
      out = sharding.pin_features(out, self.config.sharding)
      out = sharding.pin_rows(out, self.config.sharding)
      if layout.softcap is None:
        return out
      out = soft_cap(out, layout.softcap)
      return kept(out, invariant)

  def unembedding(self) -> tuple[jax.Array, Layout]:
    """Returns the matrix that turns hidden states into logits, and its layout.

    The matrix is [D, V], or the embedding table [V, D] if the embeddings are tied.

    Raises:
      ValueError: the model has a score head and no unembedding.
    """
    table, layout = self._frozen_unembedding()
    if self.token_rows is not None:
      table = self.token_rows.in_table(table, tied=layout.transposed)
    return table, layout

  def _frozen_unembedding(self) -> tuple[Any, Layout]:
    """Returns the unembedding without the trained rows of `token_rows`."""
    if self.score is not None:
      raise ValueError(
        f"num_scores is {self.config.num_scores}, so the model has scores instead of "
        "logits over the vocabulary. A loss on tokens needs a model without num_scores"
      )
    head = self.lm_head
    tied = head is None
    variable: Any = self.embed_tokens.embedding if head is None else head.kernel
    is_transposed = isinstance(variable, TransposedKernel)
    # variable[...] fails for a model of shapes
    table = variable[...] if is_transposed else variable.get_value()
    mesh, rules = mesh_lib.context_mesh(), self.config.sharding
    if mesh is None:
      return table, Layout(
        transposed=tied,
        softcap=self.config.final_softcap,
        invariant=self.config.batch_invariant,
      )
    splits_vocab = (
      rules.tp in mesh.shape and self.config.vocab_size % mesh.shape[rules.tp] == 0
    )
    return table, Layout(
      transposed=tied,
      softcap=self.config.final_softcap,
      mesh=mesh,
      batch_axes=sharding.batch_axes(rules),
      token_axis=sharding.token_axis(rules),
      vocab_axis=rules.tp if splits_vocab else None,
      invariant=self.config.batch_invariant,
    )

  def set_invariant_if_possible(self) -> None:
    """Sets `batch_invariant` of a built model, on a CPU without a mesh.

    Does nothing if a field, a trained token row, a dtype of 16 bits other than bfloat16
    or a `Linear` excludes it.
    """
    is_alone = mesh_lib.context_mesh() is None
    if not (is_alone and mesh_lib.context_platform() == "cpu"):
      return
    if checks.invariance_conflict(self.config) or self.token_rows is not None:
      return
    nodes = [node for _, node in nnx.iter_graph(self) if isinstance(node, nnx.Module)]
    linears = [node for node in nodes if isinstance(node, Linear)]
    is_half = self.config.dtype == jnp.float16
    if is_half or not all(x.can_be_invariant for x in linears):
      return
    self.config = dataclasses.replace(self.config, batch_invariant=True)
    for node in nodes:
      if isinstance(node, Attention):
        node.implementation = "invariant"
      elif isinstance(node, Linear | RMSNorm | DecoderLayer):
        node.invariant = True

  def get_model_input(self) -> dict[str, jax.Array]:
    """Returns small arguments of a call, which qwix traces (see dense/qwix_seam.py).

    Use: `qwix.apply_lora_to_model(model, provider, **model.get_model_input())`.
    """
    tokens = jnp.zeros((1, 2), jnp.int32)
    return {"input_tokens": tokens, "positions": tokens}

  def init_cache(
    self, batch_size: int, cache_size: int, dtype: DTypeLike | None = None
  ) -> KVCache:
    """Returns an empty cache.

    Args:
      batch_size: number of rows.
      cache_size: largest number of tokens of a row.
      dtype: dtype of keys and values; None for the compute dtype.
    """
    c = self.config
    makers = [getattr(x.attn, "empty_state", None) for x in self.layer_modules()]
    states = [None if make is None else make(batch_size) for make in makers]
    return cache_lib.init_cache(
      kv_sharing.cache_kinds(c),
      batch_size=batch_size,
      cache_size=cache_size,
      dtype=dtype or c.dtype,
      states=states if any(makers) else (),
    )


def _check_platform(invariant: bool) -> None:
  """Refuses batch invariance where no product has it."""
  if invariant and (platform := mesh_lib.context_platform()) != "cpu":
    raise ValueError(
      f"batch_invariant is True and the model runs on {platform!r}; expected a CPU, "
      "whose products were measured. Set it to False"
    )


def _check_call(cache, attention_mask, segment_ids, shared_prompt) -> None:
  """Refuses arguments that cannot be combined."""
  if segment_ids is not None and (cache is not None or attention_mask is not None):
    raise ValueError(
      "segment_ids cannot be combined with a cache or an attention_mask: they "
      "describe packed training rows; put the segments into the mask instead"
    )
  if attention_mask is not None and attention_mask.ndim != 3:
    raise ValueError(
      f"attention_mask has shape {attention_mask.shape}, expected [B, T, S], True "
      "where a query may attend to a key; None means causal"
    )
  excluded = {"a cache": cache, "an attention_mask": attention_mask}
  present = [name for name, value in excluded.items() if value is not None]
  if shared_prompt is not None and present:
    raise ValueError(
      f"a shared_prompt cannot be combined with {' or '.join(present)}: give every "
      "completion a row of its own"
    )


def _positions(index, tokens, segment_ids, shared_prompt) -> jax.Array:
  """Returns the default positions of tokens."""
  if shared_prompt is not None:
    valid = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids != 0
    return shared_prompt.positions(valid)
  if segment_ids is not None:
    return positions_from_segments(segment_ids)
  return jnp.broadcast_to(index, tokens.shape)
