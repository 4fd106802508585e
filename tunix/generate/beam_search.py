"""Beam search: finds likely completions by extending K candidates of each prompt.

The candidates are called beams. A beam is live until it ends, by an end-of-sequence
token or at the prompt's limit. The score of an ended beam is the sum of its tokens'
log-probabilities divided by `length ** length_penalty`. (Wu et al. 2016,
arXiv:1609.08144, divide by another function of the length.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.generate.decoders import decoders
from tunix.generate.drawing import sampling
from tunix.generate.padded import decode
from tunix.generate.padded.decode import Generated, Leaf, Plan, Prompts, Rules
from tunix.utils import mesh as mesh_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Beams:
  """K beams of every prompt, best first.

  Attributes:
    tokens: int32 [P, K, N].
    logps: float32 [P, K, N], log-probability of each token under the model's own
      distribution.
    scores: float32 [P, K]. For a live beam, the sum of its log-probabilities; for an
      ended beam, this sum divided by length ** penalty; -inf for an empty entry.
    lengths: int32 [P, K], number of tokens, including the end-of-sequence token.
    stopped: bool [P, K], True if an end-of-sequence token ended the beam.
  """

  tokens: Int[Array, "P K N"]
  logps: Float[Array, "P K N"]
  scores: Float[Array, "P K"]
  lengths: Int[Array, "P K"]
  stopped: Bool[Array, "P K"]

  def pick(self, index: jax.Array) -> Beams:
    """Returns the beams with numbers `index` [P, C] of every prompt."""

    def take(x):
      places = index.reshape(*index.shape, *[1] * (x.ndim - 2))
      return jnp.take_along_axis(x, places, axis=1)

    return jax.tree.map(take, self)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def search(
  graph: nnx.GraphDef[Any],
  state: nnx.State,
  prompts: Prompts,
  rules: Rules,
  plan: Plan,
  beams: int,
  length_penalty: Leaf,
) -> Generated:
  """Returns the best completions of every prompt, best first, as rows [P * K].

  Each step takes the best continuations of a prompt's live beams, best first:

  1. Of the first K continuations, those that end (by an end-of-sequence token or at the
     prompt's limit) join the ended beams. The best K ended beams are kept.
  2. The best K continuations that do not end become the live beams.
  3. The prompt is done if it is at its limit, or if there are K ended beams and the
     best live beam, scored at its present length, is no better than the worst of them.

  The result of a prompt does not depend on the other prompts of the batch.

  Args:
    graph: graph definition, from `decode.opened`.
    state: state of the module, from `decode.opened`.
    prompts: as for `decode.start`, with K rows for each prompt.
    rules: as for `decode.start`. Forbidden tokens are left out; the probabilities of
      the other tokens are not renormalized.
    plan: as for `decode.start`.
    beams: K, number of beams per prompt.
    length_penalty: float32 scalar. Above 0 it favors long beams, below 0 short ones.
  """
  # A single program, unlike `start` and `advance`: the caller cannot read any row
  # before the end, because the best beam may still change.
  model = nnx.merge(graph, state)
  logits, memory = decode.prefilled(model, prompts, plan)
  limits = rules.limits.reshape(-1, beams)[:, 0]
  empty = _empty(limits.shape[0], beams, plan.columns)
  # The K rows of a prompt are equal at first. Beams 1 to K - 1 start with score -inf,
  # so that all continuations come from beam 0; otherwise all beams would be the same.
  first = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
  live = dataclasses.replace(empty, scores=jnp.broadcast_to(first, empty.scores.shape))
  decoder = decoders.decoder_of(model)

  def choose(logits, live, ended, done, steps):
    # Continuations come sorted by their sums, so the first K columns are the best K.
    # All have the same length, steps + 1, so this is also the order of their scores.
    grown, source, ends = _grow(logits, live, rules, limits, steps)
    score = grown.scores / (steps + 1.0) ** length_penalty
    score = jnp.where(ends & ~done[:, None], score, -jnp.inf)[:, :beams]
    top = jax.tree.map(lambda x: x[:, :beams], grown)
    new = dataclasses.replace(top, scores=score)
    ended = _best(jax.tree.map(lambda *x: jnp.concatenate(x, 1), ended, new), beams)[0]
    open_scores = jnp.where(ends, -jnp.inf, grown.scores)
    live, index = _best(dataclasses.replace(grown, scores=open_scores), beams)
    source = jnp.take_along_axis(source, index, axis=1)
    # This stop is a heuristic, the same as in the library transformers: with a length
    # penalty above 0, a live beam could still exceed the worst ended beam at a larger
    # length.
    reachable = live.scores[:, 0] / (steps + 1.0) ** length_penalty
    done = done | (reachable <= ended.scores[:, -1]) | (steps + 1 >= limits)
    return live, ended, done, steps + 1, source

  def body(carry):
    memory, live, ended, done, steps, source = carry
    # Each beam gets a copy of the cache row of the beam that it continues.
    rows = (jnp.arange(limits.shape[0])[:, None] * beams + source).reshape(-1)
    memory = decoder.repeat(model, memory, rows)
    last = jax.lax.dynamic_index_in_dim(live.tokens, steps - 1, 2, keepdims=False)
    logits, memory = decoder.step(nnx.merge(graph, state), last.reshape(-1), memory)
    return memory, *choose(logits, live, ended, done, steps)

  start = choose(logits, live, empty, limits <= 0, jnp.zeros((), jnp.int32))
  carry = jax.lax.while_loop(lambda c: ~jnp.all(c[3]), body, (memory, *start))
  return _generated(carry[2], carry[4], plan)


def _grow(logits, live: Beams, rules: Rules, limits, steps):
  """Returns the best C continuations of each prompt's live beams.

  Returns:
    The continuations as Beams [P, C], the beam that each one continues, int32 [P, C],
    and bool [P, C], True if it ends.
  """
  prompts, beams = live.scores.shape
  logps = jax.nn.log_softmax(logits)
  allowed = logps
  if rules.draw.forbidden is not None:
    allowed = sampling.forbid(logps, rules.draw.forbidden)
  vocab = logits.shape[-1]
  sums = live.scores[:, :, None] + allowed.reshape(prompts, beams, vocab)
  # At most E continuations of each beam end, one for each end-of-sequence id. Of the
  # best K * (1 + E) continuations, at most K * E end, so at least K do not.
  count = min(beams * (1 + rules.eos.shape[0]), beams * vocab)
  scores, index = jax.lax.top_k(sums.reshape(prompts, -1), count)
  source, tokens = index // vocab, (index % vocab).astype(jnp.int32)
  chosen = jnp.take_along_axis(logps.reshape(prompts, -1), index, axis=1)
  grown = live.pick(source)
  stopped = sampling.is_in(tokens.reshape(-1), rules.eos).reshape(tokens.shape)

  def write(buffer, column):
    return jax.lax.dynamic_update_slice(buffer, column[:, :, None], (0, 0, steps))

  grown = Beams(
    tokens=write(grown.tokens, tokens),
    logps=write(grown.logps, chosen),
    scores=scores,
    lengths=grown.lengths + 1,
    stopped=stopped,
  )
  return grown, source, stopped | (steps + 1 >= limits)[:, None]


def _best(beams: Beams, count: int) -> tuple[Beams, jax.Array]:
  """Returns the `count` beams with the highest scores, best first, and their index."""
  index = jax.lax.top_k(beams.scores, count)[1]
  return beams.pick(index), index


def _empty(prompts: int, beams: int, columns: int) -> Beams:
  """Returns K empty entries per prompt, all with score -inf."""
  shape = (prompts, beams)
  return Beams(
    tokens=jnp.zeros((*shape, columns), jnp.int32),
    logps=jnp.zeros((*shape, columns), jnp.float32),
    scores=jnp.full(shape, -jnp.inf),
    lengths=jnp.zeros(shape, jnp.int32),
    stopped=jnp.zeros(shape, bool),
  )


def _generated(ended: Beams, steps: jax.Array, plan: Plan) -> Generated:
  """Returns the ended beams as rows [P * K]."""
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), ended)
  out = Generated(
    tokens=flat.tokens,
    lengths=flat.lengths,
    stopped=flat.stopped,
    done=jnp.ones_like(flat.stopped),
    steps=steps,
    logps=flat.logps if plan.return_logps else None,
    sampling_logps=None,
    logits=None,
  )
  return jax.tree.map(mesh_lib.constrain, out)
