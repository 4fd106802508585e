"""The decoder that every family shares.

Equal layers are stored stacked ([L, ...]) and run by `lax.scan` or unrolled; with a
cache they always run unrolled. `unstack` gives the same model with one module a layer,
so that a decode loop takes the slices once, outside the loop.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tunix.models.transformer import (
  cache as cache_lib,
  dropout,
  explicit,
  qwix_seam,
  rope,
  sharding,
)
from tunix.models.transformer.cache import KVCache
from tunix.models.transformer.config import (
  LAYER_INPUT,
  REMAT_POLICIES,
  TransformerConfig,
)
from tunix.models.transformer.decoder_layer import DecoderLayer
from tunix.models.transformer.layers import Embedding, Linear, RMSNorm
from tunix.models.transformer.shared_prompt import SharedPrompt
from tunix.models.transformer.unstack import unstack
from tunix.models.transformer.visibility import Visibility
from tunix.ops.masks import positions_from_segments
from tunix.ops.vocab_chunks import Layout, soft_cap
from tunix.utils import mesh as mesh_lib


class Transformer(nnx.Module):
  """Decoder-only language model.

  Attributes:
    config: shape and options.
    embed_tokens, layers, norm, lm_head, score: the weights; `lm_head` is None when tied
      or when there is a `score` head, see `TransformerConfig.num_scores`.
      `layers` is one module of stacked weights, or a list after `unstack`.
  """

  def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
    c, rules = config, config.sharding
    self.config = config
    self.embed_tokens = Embedding(
      c.vocab_size,
      c.embed_dim,
      spec=sharding.weight_spec("out_in", rules, False),
      scale=c.embed_dim**0.5 if c.scale_embeddings else None,
      param_dtype=c.param_dtype,
      rngs=rngs,
    )
    self.layers = nnx.data(DecoderLayer(c, (c.num_layers,), rngs))
    self.norm = RMSNorm(
      c.embed_dim,
      c.norm_eps,
      offset=c.norm_offset,
      spec=sharding.weight_spec("norm", rules, False),
      param_dtype=c.param_dtype,
    )

    def head(width: int, kind: str) -> Linear:
      return Linear(
        c.embed_dim,
        width,
        spec=sharding.weight_spec(kind, rules, False),
        param_dtype=c.param_dtype,
        rngs=rngs,
      )

    untied = not c.tie_embeddings and c.num_scores is None
    self.lm_head = nnx.data(head(c.vocab_size, "in_out") if untied else None)
    scores = head(c.num_scores, "router") if c.num_scores is not None else None
    self.score = nnx.data(scores)

  @explicit.auto_inside(explicit.of_call)
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
    return_hidden: bool = False,
  ) -> tuple[Float[Array, "B T V"] | Float[Array, "B T D"], KVCache | None]:
    """Runs the decoder.

    Args:
      input_tokens: token ids.
      positions: rotary positions; None counts from 0 (from the cache's index, or
        restarting with each segment).
      cache: keys and values so far; T tokens are added at its index.
      attention_mask: True where a query may look at a key; S is T, or the cache's
        size. None means causal, by slot, within segments.
      segment_ids: packed rows: attention stays inside a segment. Not with a cache.
      input_embeddings: instead of the embedded tokens, scaled as the family scales
        them; see `embed`.
      groups: tokens of one nonzero group see each other whatever their order (the parts
        of an image); see `Visibility`.
      shared_prompt: the rows are a prompt and several completions of it, none of which
        sees another; `segment_ids` are then 0 on padding and 1 on tokens. Not with a
        cache, a mask or groups.
      return_hidden: stop before the unembedding (see `unembedding`), so that a loss
        never holds [B, T, V].

    Returns:
      (float32 logits, or the final normalised hidden states; the new cache or None).

    Raises:
      ValueError: segment ids together with a cache or a mask, a shared prompt with
        what it excludes, or a mask of another number of dimensions.
    """
    c = self.config
    _check_call(cache, attention_mask, segment_ids, groups, shared_prompt)
    index = jnp.arange(input_tokens.shape[1], dtype=jnp.int32)
    if cache is not None:
      index = index + cache.index
    if positions is None:
      positions = _positions(index, input_tokens, segment_ids, shared_prompt)
    x = self.embed(input_tokens) if input_embeddings is None else input_embeddings
    x = sharding.pin_activations(x.astype(c.dtype), c.sharding)
    by_kind = [rope.angles(positions, c.head_dim, kind.rope) for kind in c.kinds]
    sin_cos = jax.tree.map(lambda *kinds: jnp.stack(kinds), *by_kind)
    visible = Visibility(
      index, attention_mask, segment_ids, groups, shared=shared_prompt
    )
    if cache is not None:
      x, cache = self._run_cached(x, sin_cos, visible, cache)
    else:
      x = self._run(x, sin_cos, visible)
      dropout.advance(self.layers, x.shape[0])
    with jax.named_scope("final_norm"):
      x = self.norm(x)
    return (x if return_hidden else self.logits(x)), cache

  @explicit.auto_inside(explicit.of_hidden)
  def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Embedded tokens, as the first layer takes them."""
    with jax.named_scope("embed"):
      rules = self.config.sharding
      x = self.embed_tokens(sharding.pin_lookup(tokens, rules), self.config.dtype)
      return sharding.pin_lookup(x, rules)

  def _run(self, x, sin_cos, visible):
    """All layers, without a cache."""
    kinds = self.config.layer_kinds
    adding = qwix_seam.is_initialising(self)
    if adding and isinstance(self.layers, DecoderLayer):
      one = lambda layer, x: layer(x, sin_cos, visible)[0]
      return qwix_seam.run_apart(self.layers, self.config.num_layers, one, x)

    offloads = self.config.remat == "offload"
    if offloads:
      _check_offload()

    def call(graph, kind, state, x):
      x = checkpoint_name(x, LAYER_INPUT) if offloads else x
      return nnx.merge(graph, state)(x, sin_cos, visible, kind=kind)[0]

    if self.config.remat != "none":
      policy = REMAT_POLICIES[self.config.remat]
      scanned = isinstance(self.layers, DecoderLayer) and self.config.scanned
      fixed = (0,) if scanned else (0, 1)
      call = jax.checkpoint(call, policy=policy, static_argnums=fixed)
    if isinstance(self.layers, DecoderLayer) and self.config.scanned:
      graph, state = nnx.split(self.layers)
      with jax.named_scope("layers"):
        steps = (jnp.asarray(kinds, jnp.int32), state) if any(kinds) else (None, state)
        x, _ = jax.lax.scan(
          lambda x, xs: (call(graph, 0 if xs[0] is None else xs[0], xs[1], x), None),
          x,
          steps,
        )
      return x
    plain = adding or self.config.remat == "none"
    for i, layer in enumerate(self._layer_list()):
      with jax.named_scope(f"layer_{i}"):
        if plain:  # the module itself, so that qwix finds it
          x = layer(x, sin_cos, visible, kind=kinds[i])[0]
        else:
          graph, state = nnx.split(layer)
          x = call(graph, kinds[i], state, x)
    return x

  def _run_cached(self, x, sin_cos, visible, cache):
    """All layers, unrolled, each writing its own buffers."""
    written, visible = [], dataclasses.replace(visible, slots=cache.size)
    for i, layer in enumerate(self._layer_list()):
      with jax.named_scope(f"layer_{i}"):
        pair = cache.k[i], cache.v[i]
        kind = self.config.layer_kinds[i]
        x, pair = layer(x, sin_cos, visible, pair, kind)
        written.append(pair)
    keys, values = zip(*written)
    index = cache.index + x.shape[1]
    return x, dataclasses.replace(cache, k=keys, v=values, index=index)

  def _layer_list(self) -> list[DecoderLayer]:
    """One module a layer: slices of the stack."""
    if not isinstance(self.layers, DecoderLayer):
      return list(self.layers)
    graph, state = nnx.split(self.layers)
    leaves, treedef = jax.tree.flatten(state)
    parts = [unstack(leaf) for leaf in leaves]
    return [
      nnx.merge(graph, treedef.unflatten([p[i].squeeze(0) for p in parts]))
      for i in range(self.config.num_layers)
    ]

  def unstack(self) -> Transformer:
    """The same model with a list of layer modules, which runs unrolled.

    Call it inside `jax.jit`, outside a decode loop. The slices are copies.
    """
    if not isinstance(self.layers, DecoderLayer):
      return self
    model = nnx.clone(self)
    layers = self._layer_list()
    qwix_seam.drop_layer_axis(layers)
    model.layers = nnx.data(nnx.List(layers))
    return model

  @explicit.auto_inside(explicit.of_logits)
  def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Unembeds hidden states; float32. With a `score` head: the scores, [B, T, n]."""
    if self.score is not None:
      with jax.named_scope("score"):
        return self.score(hidden.astype(jnp.float32))
    table, layout = self.unembedding()
    spec = "btd,vd->btv" if layout.transposed else "btd,dv->btv"
    with jax.named_scope("unembed"):
      out = jnp.einsum(
        spec,
        hidden,
        table.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
      )
      out = sharding.pin_features(out, self.config.sharding)
      out = sharding.pin_rows(out, self.config.sharding)
      return out if layout.softcap is None else soft_cap(out, layout.softcap)

  def unembedding(self) -> tuple[jax.Array, Layout]:
    """The matrix that turns hidden states into logits, and how it is laid out:
    [D, V], or the embedding table [V, D] when tied.

    Raises:
      ValueError: the model scores and has none.
    """
    if self.score is not None:
      raise ValueError(
        f"the model gives {self.config.num_scores} score(s) a position and no logits "
        "over the vocabulary: a loss on tokens needs a model without num_scores"
      )
    head = self.lm_head
    tied = head is None
    variable = self.embed_tokens.embedding if head is None else head.kernel
    table = variable.get_value()  # also of shapes, which have no index
    mesh, rules = mesh_lib.context_mesh(), self.config.sharding
    if mesh is None:
      return table, Layout(transposed=tied, softcap=self.config.final_softcap)
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
    )

  def get_model_input(self) -> dict[str, jax.Array]:
    """Small arguments of a call, for `qwix.apply_lora_to_model(model, provider,
    **model.get_model_input())`: qwix traces the call (see qwix_seam.py)."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return {"input_tokens": tokens, "positions": tokens}

  def init_cache(
    self, batch_size: int, cache_size: int, dtype: DTypeLike | None = None
  ) -> KVCache:
    """An empty cache of `cache_size` tokens; `dtype` defaults to the compute dtype."""
    c = self.config
    return cache_lib.init_cache(
      windows=[c.kinds[kind].window for kind in c.layer_kinds],
      batch_size=batch_size,
      cache_size=cache_size,
      num_kv_heads=c.num_kv_heads,
      head_dim=c.head_dim,
      dtype=dtype or c.dtype,
    )


def _check_offload() -> None:
  """Refuses a backend that cannot keep arrays in the host's memory; of topologies,
  which are not here, the compiler knows."""
  platform = mesh_lib.context_platform()
  if platform != jax.default_backend():
    return
  kinds = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
  if "pinned_host" not in kinds:
    raise ValueError(
      f"remat 'offload' keeps what layers are given in pinned host memory, {platform} "
      f"devices here have {', '.join(sorted(kinds))} only: use remat 'block'"
    )


def _check_call(cache, attention_mask, segment_ids, groups, shared_prompt) -> None:
  """Refuses arguments that cannot be combined."""
  if segment_ids is not None and (cache is not None or attention_mask is not None):
    raise ValueError(
      "segment_ids cannot be combined with a cache or an attention_mask: they "
      "describe packed training rows; put the segments into the mask instead"
    )
  if attention_mask is not None and attention_mask.ndim != 3:
    raise ValueError(
      f"attention_mask has shape {attention_mask.shape}, expected [B, T, S], True "
      "where a query may look at a key; None means causal"
    )
  excluded = {"a cache": cache, "an attention_mask": attention_mask, "groups": groups}
  met = [name for name, value in excluded.items() if value is not None]
  if shared_prompt is not None and met:
    raise ValueError(
      f"a shared_prompt cannot be combined with {' or '.join(met)} (images make "
      "groups): give every completion a row of its own"
    )


def _positions(index, tokens, segment_ids, shared_prompt) -> jax.Array:
  """Of tokens whose positions nobody gave."""
  if shared_prompt is not None:
    valid = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids != 0
    return shared_prompt.positions(valid)
  if segment_ids is not None:
    return positions_from_segments(segment_ids)
  return jnp.broadcast_to(index, tokens.shape)
