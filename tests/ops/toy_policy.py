"""A policy so small that all its completions can be listed.

Its parameters are logits by prefix, [prefixes, vocabulary]; token 0 ends a completion
(unless `eos` is False), `length` tokens do at the latest.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np


class Toy:
  """The list of completions, and expectations over groups of them.

  Attributes:
    tokens, mask, prefixes: int [N, length]; prefixes number the rows of the logits.
    lengths: tokens of each completion [N].
    rewards: some reward of each completion [N].
    logits, others: parameters of two policies.
  """

  def __init__(self, vocab=5, length=3, eos=True, seed=0):
    rows: dict[tuple, int] = {}
    found = {}
    for word in itertools.product(range(vocab), repeat=length):
      end = word.index(0) + 1 if eos and 0 in word else length
      prefixes = [rows.setdefault(word[:t], len(rows)) for t in range(end)]
      found[word[:end]] = prefixes
    filled = lambda x: [*x, *[0] * (length - len(x))]
    self.tokens = np.array([filled(word) for word in found])
    self.prefixes = np.array([filled(prefixes) for prefixes in found.values()])
    self.lengths = np.array([len(word) for word in found])
    self.mask = (np.arange(length) < self.lengths[:, None]).astype(np.int32)
    rng = np.random.default_rng(seed)
    self.rewards = rng.normal(size=len(found)) + 0.5 * self.lengths
    self.logits, self.others = rng.normal(size=(2, len(rows), vocab))

  def logps(self, logits):
    """Per token [N, length]; what stands outside the mask is not 0."""
    return jax.nn.log_softmax(logits)[self.prefixes, self.tokens]

  def log_probability(self, logits):
    return jnp.sum(self.logps(logits) * self.mask, axis=1)

  def probability(self, logits):
    return jnp.exp(self.log_probability(logits))

  def scores(self, logits):
    """Gradient of each completion's log-probability, [N, prefixes * vocabulary]."""
    found = jax.jacrev(self.log_probability)(jnp.asarray(logits))
    return np.asarray(found).reshape(len(self.lengths), -1)

  def gradient(self, objective, logits=None):
    """Gradient of a function of the logits at the policy (flat)."""
    at = jnp.asarray(self.logits if logits is None else logits)
    return np.asarray(jax.jit(jax.grad(objective))(at)).ravel()

  def expected_reward(self, logits):
    return jnp.sum(self.probability(logits) * self.rewards)

  def visits(self, logits):
    """How often a token is drawn at each prefix, [prefixes]."""
    each = np.asarray(self.probability(logits))[:, None] * self.mask
    return np.bincount(self.prefixes.ravel(), each.ravel(), len(self.logits))

  def groups(self, size):
    """All groups of completions, as indices [N ** size, size]."""
    n = len(self.lengths)
    return np.array(list(itertools.product(range(n), repeat=size)))

  def expected_gradients(self, losses, size, drawn_from=None):
    """Expected gradient of a group's losses [k], over all groups: [k, parameters].

    Args:
      losses: of (log-probabilities [size, length], indices [size]).
      size: completions in a group.
      drawn_from: logits of the policy that draws the completions.
    """
    source = self.logits if drawn_from is None else drawn_from
    groups = jnp.asarray(self.groups(size))
    weight = jnp.prod(self.probability(jnp.asarray(source))[groups], axis=1)

    def total(logits):
      logps = self.logps(logits)
      found = jax.vmap(lambda group: losses(logps[group], group))(groups)
      return jnp.sum(weight[:, None] * found, axis=0)

    found = np.asarray(jax.jit(jax.jacrev(total))(jnp.asarray(self.logits)))
    return found.reshape(len(found), -1)
