"""Losses of the protocol against formulas in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.tinker.errors import NotServedError, TinkerError
from tunix.tinker.learning import losses

LOGPS = [-1.0, -2.0, -0.5, -3.0]
OLD = [-1.5, -1.0, -0.5, -2.0]
ADVANTAGES = [1.0, 2.0, -1.0, -2.0]
WEIGHTS = [1.0, 0.5, 2.0, 0.0]
RATIO_MASK = [1.0, 2.0, 0.0, 1.0]  # the last token counts, though its weight is 0


def inputs():
  values = {"logprobs": OLD, "advantages": ADVANTAGES, "weights": WEIGHTS}
  values["sequence_ratio_mask"] = RATIO_MASK
  return {name: jnp.array([x]) for name, x in values.items()}


def by_hand(name):
  out = []
  s = math.exp((0.5 - 1.0 - 1.0) / 3)  # below the lower bound of gspo
  for p, q, a, w in zip(LOGPS, OLD, ADVANTAGES, WEIGHTS):
    ratio = math.exp(p - q)
    value = {
      "cross_entropy": -p,
      "importance_sampling": -ratio * a,
      "ppo": -min(ratio * a, min(max(ratio, 0.8), 1.2) * a),
      "cispo": -min(max(ratio, 0.0), 4.0) * a * p,
      "dro": -(a * p - 0.5 * 0.1 * (p - q) ** 2),
      "gspo": -min(s * a, 0.9997 * a),
    }[name]
    out.append(w * value)
  return out


@pytest.mark.parametrize("name", losses.LOSSES)
def test_values_and_gradients(name):
  config = losses.configured(name, {"beta": 0.1} if name == "dro" else None)
  total = lambda p: losses.weighted(name, p, inputs(), config)
  values = total(jnp.array([LOGPS]))[0]
  np.testing.assert_allclose(values, by_hand(name), rtol=1e-6)
  slopes = jax.jit(jax.grad(lambda p: total(p).sum()))(jnp.array([LOGPS]))[0]
  ratios = [math.exp(p - q) for p, q in zip(LOGPS, OLD)]
  a, w, s = ADVANTAGES, WEIGHTS, math.exp(-0.5)
  expected = {
    "cross_entropy": [-x for x in w],
    "importance_sampling": [-w[i] * ratios[i] * a[i] for i in range(4)],
    # The first ratio is above 1.2 with A > 0: clipped. The second is below 0.8 with
    # A > 0, and the third is 1.
    "ppo": [0.0, -w[1] * ratios[1] * a[1], -w[2] * a[2], 0.0],
    "cispo": [-w[i] * min(ratios[i], 4.0) * a[i] for i in range(4)],
    "dro": [-w[i] * (a[i] - 0.1 * (LOGPS[i] - OLD[i])) for i in range(4)],
    # The third token has A < 0 and a ratio below the bound: clipped.
    "gspo": [-w[0] * s * a[0], -w[1] * s * a[1], 0.0, 0.0],
  }[name]
  np.testing.assert_allclose(slopes, expected, rtol=1e-6)


def test_the_ratio_of_a_sequence_leaves_out_what_its_mask_does():
  config, logps = losses.configured("gspo", None), jnp.array([LOGPS])
  first = lambda old: losses.weighted(
    "gspo", logps, inputs() | {"logprobs": jnp.array([old])}, config
  )[0, 0]
  assert first(OLD) == first([*OLD[:2], -5.0, OLD[3]]) != first([*OLD[:3], -5.0])


def test_a_token_of_weight_0_reaches_neither_value_nor_gradient():
  given = inputs() | {"logprobs": jnp.full((1, 4), -500.0)}
  config = losses.configured("importance_sampling", None)
  given["weights"] = jnp.zeros((1, 4))
  total = lambda p: losses.weighted("importance_sampling", p, given, config).sum()
  value, slope = jax.jit(jax.value_and_grad(total))(jnp.full((1, 4), jnp.nan))
  assert value == 0 and not np.any(slope)


def test_wrong_names_and_configurations():
  with pytest.raises(NotServedError, match="we know no published formula of it"):
    losses.loss_named("stable_reinforce")
  with pytest.raises(TinkerError, match=r"'grpo'; expected one of cross_entropy"):
    losses.loss_named("grpo")
  with pytest.raises(TinkerError, match="beta is nan"):
    losses.configured("dro", None)
  with pytest.raises(TinkerError, match="has 'clip'"):
    losses.configured("ppo", {"clip": 0.2})
  with pytest.raises(TinkerError, match="0 <= low <= 1 <= high"):
    losses.configured("ppo", {"clip_low_threshold": 1.1})
  with pytest.raises(TinkerError, match="expected a number"):
    losses.configured("ppo", {"clip_low_threshold": "low"})
