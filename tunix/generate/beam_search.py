"""Beam search: the completions of highest probability that a beam finds.

A beam's score is the sum of its tokens' log-probabilities over its length to the power
of a length penalty (in the place of the one of Wu et al. 2016, arXiv:1609.08144).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.generate import decode, sampling
from tunix.generate.decode import Generated, Leaf, Plan, Prompts, Rules
from tunix.utils import mesh as mesh_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Beams:
  """K beams of every prompt, best first.

  Attributes:
    tokens: int32 [P, K, N].
    logps: float32 [P, K, N], of the tokens under the model's own distribution.
    scores: float32 [P, K]: sums of log-probabilities while a beam goes on, over
      length ** penalty once it has ended; -inf where there is no beam yet.
    lengths: int32 [P, K], tokens, an end-of-sequence token included.
    stopped: bool [P, K], whether one came.
  """

  tokens: Int[Array, "P K N"]
  logps: Float[Array, "P K N"]
  scores: Float[Array, "P K"]
  lengths: Int[Array, "P K"]
  stopped: Bool[Array, "P K"]

  def pick(self, index: jax.Array) -> Beams:
    """Beams index[p, k] of every prompt."""

    def take(x):
      places = index.reshape(*index.shape, *[1] * (x.ndim - 2))
      return jnp.take_along_axis(x, places, axis=1)

    return jax.tree.map(take, self)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def search(
  graph: Any,
  state: Any,
  prompts: Prompts,
  rules: Rules,
  plan: Plan,
  beams: int,
  length_penalty: Leaf,
) -> Generated:
  """The `beams` best completions of every prompt, best first: rows [P * beams].

  In every step the best continuations of a prompt's beams are taken. Those of the
  first `beams` that end, by an end-of-sequence token or at the prompt's limit, join
  the ended ones, of which the best are kept; the best of the others go on. A prompt is
  done when its best beam, at its present length, scores no better than the worst of
  `beams` ended ones, or at its limit. What it finds depends on no other prompt.

  Args:
    graph, state: see `decode.opened`.
    prompts, rules, plan: as for `decode.start`, with `beams` rows a prompt. Forbidden
      tokens never come; probabilities are not made larger for that.
    beams: K.
    length_penalty: float32 scalar; above 0 longer ones gain, below 0 they lose.
  """
  model = nnx.merge(graph, state)
  logits, memory = decode.prefilled(model, prompts, plan)
  limits = rules.limits.reshape(-1, beams)[:, 0]
  empty = _nothing(limits.shape[0], beams, plan.columns)
  first = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)  # all are equal as yet
  live = dataclasses.replace(empty, scores=jnp.broadcast_to(first, empty.scores.shape))
  way = decode.way_of(model)

  def choose(logits, live, ended, done, steps):
    grown, source, ends = _grow(logits, live, rules, limits, steps)
    score = grown.scores / (steps + 1.0) ** length_penalty
    score = jnp.where(ends & ~done[:, None], score, -jnp.inf)[:, :beams]
    new = dataclasses.replace(grown.pick(_first(grown, beams)), scores=score)
    ended = _best(jax.tree.map(lambda *x: jnp.concatenate(x, 1), ended, new), beams)[0]
    going = jnp.where(ends, -jnp.inf, grown.scores)
    live, index = _best(dataclasses.replace(grown, scores=going), beams)
    source = jnp.take_along_axis(source, index, axis=1)
    reachable = live.scores[:, 0] / (steps + 1.0) ** length_penalty
    done = done | (reachable <= ended.scores[:, -1]) | (steps + 1 >= limits)
    return live, ended, done, steps + 1, source

  def body(carry):
    memory, live, ended, done, steps, source = carry
    rows = (jnp.arange(limits.shape[0])[:, None] * beams + source).reshape(-1)
    memory = way.repeat(model, memory, rows)
    last = jax.lax.dynamic_index_in_dim(live.tokens, steps - 1, 2, keepdims=False)
    logits, memory = way.step(nnx.merge(graph, state), last.reshape(-1), memory)
    return memory, *choose(logits, live, ended, done, steps)

  start = choose(logits, live, empty, limits <= 0, jnp.zeros((), jnp.int32))
  carry = jax.lax.while_loop(lambda c: ~jnp.all(c[3]), body, (memory, *start))
  return _generated(carry[2], carry[4], plan)


def _grow(logits, live: Beams, rules: Rules, limits, steps):
  """The best continuations [P, C] of the live beams, the beam that each continues, and
  whether it ends. C is large enough for K that go on, whatever the others do."""
  prompts, beams = live.scores.shape
  logps = jax.nn.log_softmax(logits)
  allowed = logps
  if rules.draw.forbidden is not None:
    allowed = sampling.forbid(logps, rules.draw.forbidden)
  vocab = logits.shape[-1]
  sums = live.scores[:, :, None] + allowed.reshape(prompts, beams, vocab)
  count = min(beams * (1 + rules.eos.shape[0]), beams * vocab)
  scores, index = jax.lax.top_k(sums.reshape(prompts, -1), count)
  source, tokens = index // vocab, (index % vocab).astype(jnp.int32)
  chosen = jnp.take_along_axis(logps.reshape(prompts, -1), index, axis=1)
  grown = live.pick(source)
  stopped = sampling.is_in(tokens.reshape(-1), rules.eos).reshape(tokens.shape)
  write = lambda buffer, column: jax.lax.dynamic_update_slice(
    buffer, column[:, :, None], (0, 0, steps)
  )
  grown = Beams(
    tokens=write(grown.tokens, tokens),
    logps=write(grown.logps, chosen),
    scores=scores,
    lengths=grown.lengths + 1,
    stopped=stopped,
  )
  return grown, source, stopped | (steps + 1 >= limits)[:, None]


def _first(beams: Beams, count: int) -> jax.Array:
  """The places of the first `count`, for `pick`."""
  return jnp.broadcast_to(jnp.arange(count), (beams.scores.shape[0], count))


def _best(beams: Beams, count: int) -> tuple[Beams, jax.Array]:
  """The `count` beams of the highest scores, best first, and their places."""
  index = jax.lax.top_k(beams.scores, count)[1]
  return beams.pick(index), index


def _nothing(prompts: int, beams: int, columns: int) -> Beams:
  """No beams."""
  shape = (prompts, beams)
  return Beams(
    tokens=jnp.zeros((*shape, columns), jnp.int32),
    logps=jnp.zeros((*shape, columns), jnp.float32),
    scores=jnp.full(shape, -jnp.inf),
    lengths=jnp.zeros(shape, jnp.int32),
    stopped=jnp.zeros(shape, bool),
  )


def _generated(ended: Beams, steps: jax.Array, plan: Plan) -> Generated:
  """The ended beams as rows."""
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
