"""The implementations of attention, their features and the choice between them.

A path never runs a call that it does not support: a path named by the caller raises an
error, and "auto" chooses another one. docs/attention.md has the table and measurements.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tunix.models.transformer.attention import blockwise, fused, split_tokens
from tunix.models.transformer.attention.split_tokens import Split
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.visibility import Visibility
from tunix.ops import sinks as sink_ops
from tunix.utils import mesh as mesh_lib

# Score of a hidden key. It is finite, so that a query without a visible key has finite
# outputs and gradients.
NEVER = -1e30

# Largest number of scores of one head and row (T * S) that "auto" computes at once. On
# a CPU blocks are faster above 256 x 256. On an H200, cuDNN takes a third of the time
# at 512 x 512, and less was not measured. Nor was the limit elsewhere.
PLAIN_SCORES = {"cpu": 256 * 256, "gpu": 256 * 256}
PLAIN_SCORES_ELSEWHERE = 512 * 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """The features of one call of attention.

  Attributes:
    platform: platform that the program runs on.
    dtype: dtype of the queries.
    head_dim: H.
    scores: number of scores per head and row, T * S.
    features: names in `FEATURES` that apply to the call.
  """

  platform: str
  dtype: str
  head_dim: int
  scores: int
  features: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
  """An implementation of attention.

  Attributes:
    run: called with (query, key, value, visible, scale, softcap, window, rules),
      and with `sinks=` if the call has them; returns the output. If the tokens are
      split over devices, the arrays are those of one device, and a `Split` replaces the
      rules.
    lacks: names in `FEATURES` that it does not support.
    unmeasured: names of features for which "auto" does not choose it.
    platforms: platforms that it runs on; None for all.
    dtypes: supported dtypes of queries, keys and values; None for all.
    head_multiple, head_most: the head dimension must be a multiple of the first and at
      most the second.
  """

  run: Callable[..., jax.Array]
  lacks: tuple[str, ...] = ()
  unmeasured: tuple[str, ...] = ()
  platforms: tuple[str, ...] | None = None
  dtypes: tuple[str, ...] | None = None
  head_multiple: int = 1
  head_most: int | None = None

  def refusals(self, call: Call) -> list[str]:
    """Returns the unsupported features of a call; empty if the path can run it."""
    out = [FEATURES[name] for name in self.lacks if name in call.features]
    if self.platforms is not None and call.platform not in self.platforms:
      out.append(f"platform {call.platform} (it runs on {', '.join(self.platforms)})")
    if self.dtypes is not None and call.dtype not in self.dtypes:
      out.append(f"dtype {call.dtype} (it takes {', '.join(self.dtypes)})")
    if call.head_dim % self.head_multiple:
      out.append(f"head_dim {call.head_dim} (a multiple of {self.head_multiple})")
    if self.head_most is not None and call.head_dim > self.head_most:
      out.append(f"head_dim {call.head_dim} (at most {self.head_most})")
    return out


# Optional features of a call, with their names in messages.
FEATURES = {
  "softcap": "a soft cap",
  "window": "a window",
  "segments": "segment ids",
  "mask": "a mask given as an array",
  "groups": "bidirectional groups",
  "cache": "a cache",
  "shared": "a shared prompt",
  "split": "tokens split over devices (the mesh axis cp)",
  "sinks": "attention sinks",
}


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K H"],
  visible: Visibility | Bool[Array, "B T S"],
  *,
  scale: float | None = None,
  softcap: float | None = None,
  window: int | None = None,
  implementation: str = "auto",
  rules: ShardingRules | None = None,
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
  """Returns softmax(scale * q k^T) v over the visible keys of each query.

  Scores and softmax are float32. The output of a query without a visible key is not
  defined; it is finite, and so are its gradients. With sinks it is 0.

  Args:
    query, key, value: N must be a multiple of K; query heads n * N/K to (n + 1) * N/K
      - 1 share key head n.
    visible: the keys that each query attends to; an array is a mask, with slots counted
      from 0.
    scale: factor of the scores; None for H ** -0.5.
    softcap: a number c; scores become c * tanh(scores / c) before the mask (Gemma 2,
      arXiv:2408.00118). None for no cap.
    window: number of keys that a query attends to: its own slot and the `window - 1`
      before it. None for no limit.
    implementation: "auto", or a name in `PATHS`.
    rules: mesh axes of rows, heads and tokens.
    sinks: a logit per query head that every softmax has beside the keys' scores (see
      `ops.sinks`); a soft cap does not apply to it. None for no sinks.

  Raises:
    ValueError: the named path does not support the call, or the arguments contradict
      each other.
  """
  if not isinstance(visible, Visibility):
    visible = _from_array(visible, window)
  if visible.windowed_groups and window is None:
    visible = dataclasses.replace(visible, groups=None, key_groups=None)
  _check(query, key, visible, softcap, window)
  rules = ShardingRules() if rules is None else rules
  split = split_tokens.split_of(query, visible, window, rules)
  call = _describe(query, key, visible, softcap, window, split, sinks)
  name = choose(call, implementation)
  if visible.shared is not None:
    part = functools.partial(
      attend,
      scale=scale,
      softcap=softcap,
      window=window,
      implementation=implementation,
      rules=rules,
      sinks=sinks,
    )
    return _by_parts(part, query, key, value, visible)
  path = PATHS[name]
  scale = query.shape[-1] ** -0.5 if scale is None else scale
  if split is None:
    options = scale, softcap, window, rules
    return path.run(query, key, value, visible, *options, sinks=sinks)

  def run(*local, sinks=None):
    return path.run(*local, scale, softcap, window, split, sinks=sinks)

  return split_tokens.attend(run, query, key, value, visible, split, rules, sinks)


def _by_parts(part, query, key, value, visible: Visibility) -> jax.Array:
  """Runs attention on rows with a shared prompt.

  The prompt attends to itself, and every completion attends to the prompt and to
  itself. The path is chosen for each part separately.

  Args:
    part: `attend` with all options set.
    query, key, value, visible: see `attend`.
  """
  shared = visible.shared
  assert shared is not None
  with jax.named_scope("prompt"):
    whole = (shared.prompts(x) for x in (query, key, value))
    prompts = part(*whole, visible.of_prompt())
  with jax.named_scope("completions"):
    keys, values = shared.sequences(key), shared.sequences(value)
    queries = shared.completions(query)
    completions = part(queries, keys, values, visible.of_completions())
  return shared.rows(prompts, completions)


def choose(call: Call, implementation: str = "auto") -> str:
  """Returns the name of the path for a call.

  Args:
    call: the features of the call.
    implementation: "auto", or the name of a path.

  Raises:
    ValueError: the name is unknown, or the named path does not support the call.
  """
  if implementation == "auto":
    limit = PLAIN_SCORES.get(call.platform, PLAIN_SCORES_ELSEWHERE)
    if call.scores <= limit:
      return "plain"
    for name in ("splash", "cudnn"):
      path = PATHS[name]
      if not path.refusals(call) and call.features.isdisjoint(path.unmeasured):
        return name
    return "blockwise"
  if implementation not in PATHS:
    raise ValueError(
      f"attention implementation {implementation!r} is unknown: use 'auto' or one of "
      f"{sorted(_NAMED)}"
    )
  refusals = PATHS[implementation].refusals(call)
  if refusals and implementation == "invariant":
    raise ValueError(
      f"a batch-invariant model cannot do {'; '.join(refusals)}: leave it out, or set "
      "batch_invariant to False"
    )
  if refusals:
    able = [name for name in _NAMED if not PATHS[name].refusals(call)]
    raise ValueError(
      f"attention implementation {implementation!r} cannot do {'; '.join(refusals)}: "
      f"use 'auto' or one of {able}"
    )
  return implementation


def plain(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  visible: Visibility,
  scale: float,
  softcap: float | None,
  window: int | None,
  rules: ShardingRules | Split,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Computes all scores at once, [B, N, T, S]; see `Path.run` for the arguments."""
  del rules
  b, t, n, h = query.shape
  mask = visible.dense(key.shape[1], window)
  query = query.reshape(b, t, key.shape[2], n // key.shape[2], h)
  with jax.named_scope("scores"):
    scores = _scores(query, key) * scale
    if softcap is not None:
      scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None], scores, NEVER)
    by_group = None if sinks is None else sinks.reshape(key.shape[2], -1, 1)
    weights = sink_ops.softmax(scores, by_group).astype(value.dtype)
  with jax.named_scope("values"):
    out = _values(weights, value)
  return out.reshape(b, t, n, h)


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
  """Returns q k^T, float32 [B, K, G, T, S], of [B, T, K, G, H] and [B, S, K, H]."""
  return jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)


def _values(weights: jax.Array, value: jax.Array) -> jax.Array:
  """Returns weights times values, [B, T, K, G, H].

  Args:
    weights: [B, K, G, T, S].
    value: [B, S, K, H].
  """
  is_step = weights.shape[-2] == 1 and weights.shape[2] > 1
  if is_step and mesh_lib.context_platform() == "cpu":
    # With one token per row (a decode step), XLA's CPU backend would copy the whole
    # cache into another layout for a matrix product. This sum reads the cache in its
    # own layout and takes half the time. With one query head to a key head (G = 1), XLA
    # does not see a product in the sum, which takes three to five times as long as one.
    heads_first = value.swapaxes(1, 2)[:, :, None]
    by_slot = weights[:, :, :, 0, :, None]
    out = jnp.sum(by_slot * heads_first, axis=3, dtype=jnp.float32)
    return out[:, None].astype(value.dtype)
  return jnp.einsum("bkgts,bskh->btkgh", weights, value)


def _blockwise(
  query,
  key,
  value,
  visible,
  scale,
  softcap,
  window,
  rules,
  sinks=None,
  *,
  invariant=False,
):
  del rules
  largest = 256 if mesh_lib.context_platform() == "cpu" else 512
  largest = blockwise.INVARIANT_KEYS if invariant else largest
  return blockwise.attend(
    query,
    key,
    value,
    visible,
    scale=scale,
    softcap=softcap,
    window=window,
    query_block=largest,
    key_block=largest,
    sinks=sinks,
    is_invariant=invariant,
  )


PATHS = {
  "plain": Path(run=plain),
  "blockwise": Path(run=_blockwise),
  "invariant": Path(
    run=functools.partial(_blockwise, invariant=True),
    lacks=("shared", "split"),
    platforms=("cpu",),
  ),
  "splash": Path(
    run=fused.splash, lacks=("mask", "groups", "cache", "shared"), platforms=("tpu",)
  ),
  "cudnn": Path(
    run=fused.cudnn,
    lacks=("softcap", "mask", "groups", "cache", "shared", "split", "sinks"),
    unmeasured=("segments",),
    platforms=("gpu",),
    dtypes=("bfloat16", "float16"),
    head_multiple=8,
    head_most=128,  # some chips support 256
  ),
}


# "invariant" is chosen by `TransformerConfig.batch_invariant`, not by name.
_NAMED = [name for name in PATHS if name != "invariant"]


def _from_array(mask: jax.Array, window: int | None) -> Visibility:
  if window is not None and mask.shape[1] != mask.shape[2]:
    raise ValueError(
      f"mask has shape {mask.shape}, which does not give the queries' slots that a "
      "window counts from: pass Visibility(query_index, mask)"
    )
  index = jnp.arange(mask.shape[1], dtype=jnp.int32)
  return Visibility(index, mask)


def _check(query, key, visible, softcap, window):
  """Refuses arguments that contradict each other."""
  if query.shape[2] % key.shape[2]:
    raise ValueError(
      f"{query.shape[2]} query heads cannot share {key.shape[2]} key heads: N must be "
      "a multiple of K"
    )
  if window is not None and window < 1:
    raise ValueError(f"window {window} must be at least 1, the query's own slot")
  if softcap is not None and softcap <= 0:
    raise ValueError(f"softcap {softcap} must be positive; None means no cap")
  if visible.aligned and query.shape[1] != key.shape[1]:
    raise ValueError(
      f"{query.shape[1]} queries are not the {key.shape[1]} keys: build the Visibility "
      "with aligned=False"
    )


def _describe(query, key, visible, softcap, window, split, sinks) -> Call:
  has = {
    "softcap": softcap is not None,
    "window": window is not None,
    "segments": visible.segment_ids is not None,
    "mask": visible.mask is not None,
    "groups": visible.groups is not None,
    "cache": not visible.aligned,
    "shared": visible.shared is not None,
    "split": split is not None,
    "sinks": sinks is not None,
  }
  return Call(
    platform=mesh_lib.context_platform(),
    dtype=str(query.dtype),
    head_dim=query.shape[-1],
    scores=query.shape[1] * key.shape[1],
    features=frozenset(name for name in FEATURES if has[name]),
  )
