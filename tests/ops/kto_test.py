import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.pair_scores import LN2, LN3, close
from tunix.ops.kto import kl_estimate, kto_loss, kto_metrics
from tunix.ops.reductions import weighted_sum

# r = (2 ln 3, -2 ln 2, 0); beta r = (ln 3, -ln 2, 0) with beta 1/2.
REF = jnp.array([-9.0, -5.0, -4.0])
LOGPS = REF + jnp.array([2 * LN3, -2 * LN2, 0.0])
DESIRABLE = jnp.array([True, False, False])
ONES = jnp.ones(3)


def run(logps=LOGPS, weights=ONES, kl=0.0, **options):
  return kto_loss(
    LOGPS if logps is None else logps,
    REF,
    DESIRABLE,
    weights,
    kl=kl,
    **{"beta": 0.5, **options},
  )


def test_values_by_hand():
  # 1 - s(ln 3), 1 - s(ln 2), 1 - s(0)
  close(run().values, [1 / 4, 1 / 3, 1 / 2])
  # beta z0 = ln 2: 1 - s(ln 3/2), 1 - s(ln 4), 1 - s(ln 2)
  close(run(kl=2 * LN2).values, [2 / 5, 1 / 5, 1 / 3])
  got = run(desirable_weight=3.0, undesirable_weight=0.5).values
  close(got, [3 / 4, 1 / 6, 1 / 4])
  close(run(beta=1.0).values, [1 / 10, 1 / 5, 1 / 2])


def test_gradients_by_hand():
  # -beta s (1 - s) where desirable, + elsewhere; none through z0 and the reference.
  want = [-0.5 * 3 / 16, 0.5 * 2 / 9, 0.5 / 4]
  close(jax.jit(jax.grad(lambda x: run(x).values.sum()))(LOGPS), want)
  through = lambda x: run(kl=x).values.sum()
  assert float(jax.jit(jax.grad(through))(jnp.array(1.0))) == 0.0
  of_ref = lambda ref: kto_loss(LOGPS, ref, DESIRABLE, ONES, kl=0.0).values.sum()
  assert not np.any(jax.jit(jax.grad(of_ref))(REF))


def test_metrics_are_means_of_each_kind():
  got = run(kl=0.7).metrics
  close(got["chosen_share"], [1, 0, 0])
  means = {name: weighted_sum(x, ONES).mean() for name, x in got.items()}
  out = kto_metrics(means)
  close(out["rewards/chosen"], LN3)
  close(out["rewards/rejected"], -LN2 / 2)
  close(out["rewards/margin"], LN3 + LN2 / 2)
  close(out["log_probs/chosen"], 2 * LN3 - 9)
  close(out["log_probs/rejected"], (-2 * LN2 - 9) / 2)
  close(out["kl"], 0.7)
  assert "chosen_share" not in out and len(out) == 6


def test_metrics_without_a_kind():
  weights = jnp.array([0.0, 1.0, 1.0])
  means = {
    name: weighted_sum(x, weights).mean()
    for name, x in run(weights=weights).metrics.items()
  }
  out = kto_metrics(means)
  assert float(out["rewards/chosen"]) == 0.0
  close(out["rewards/rejected"], -LN2 / 2)


def test_padding_and_extremes():
  weights = jnp.array([1.0, 1.0, 0.0])
  nan = LOGPS.at[2].set(jnp.nan)
  got = run(nan, weights)
  close(got.values, [1 / 4, 1 / 3, 0])
  gradient = jax.jit(jax.grad(lambda x: run(x, weights).values.sum()))(nan)
  close(gradient, [-0.5 * 3 / 16, 0.5 * 2 / 9, 0])
  vast = jnp.array([-1e5, 1e5, -1e5])
  close(run(vast).values, [1, 1, 0])
  assert np.isfinite(jax.jit(jax.grad(lambda x: run(x).values.sum()))(vast)).all()
  jax.tree.map(close, jax.jit(run)(LOGPS), run())


def test_kl_estimate():
  logps, ref = jnp.array([-1.0, -2.0, jnp.nan]), jnp.array([-2.0, -2.5, 0.0])
  weights = jnp.array([1, 1, 0])
  close(kl_estimate(logps, ref, weights), 0.75)
  assert float(kl_estimate(ref, logps, weights)) == 0.0  # -0.75, clamped
  assert float(kl_estimate(logps, ref, 0 * weights)) == 0.0
  fn = lambda x: kl_estimate(x, ref[:2], weights[:2])
  np.testing.assert_array_equal(jax.jit(jax.grad(fn))(logps[:2]), [0.0, 0.0])


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"beta": 0.0}, r"beta=0\.0 must be positive"),
    ({"beta": math.nan}, r"beta=nan must be positive"),
    ({"desirable_weight": -1.0}, r"desirable_weight=-1\.0.*>= 0"),
    ({"desirable_weight": 0, "undesirable_weight": 0}, r"and one positive"),
  ],
)
def test_what_is_refused(options, match):
  with pytest.raises(ValueError, match=match):
    run(**options)
