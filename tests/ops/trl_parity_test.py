"""The same logits, rewards and masks give TRL's losses, gradients and advantages.

The figures of TRL are committed (golden/make_trl_rl.py made them); where TRL itself is
installed, fresh ones are made from other random batches. The names of TRL's options
are translated here.
"""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops import advantages, importance, kl, policy_gradient as pg
from tunix.ops.reductions import aggregate

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TRL = dict(np.load(GOLDEN / "trl_rl" / "trl.npz"))
CASES = json.loads((GOLDEN / "trl_rl" / "cases.json").read_text())
TOLERANCE = 1e-5
MEANS = {
  "grpo": "sequence-mean-token-mean",
  "bnpo": "token-mean",
  "dapo": "token-mean",
  "cispo": "token-mean",
  "dr_grpo": "sequence-mean-token-scale",
  "sapo": "sequence-mean-token-mean",
}
# TRL adds 1e-4 to a deviation, we add 1e-6.
EPSILON = 1e-4
SCORES = {
  "group": lambda r, w: advantages.group_normalized(r, EPSILON, where=w),
  "none": lambda r, w: advantages.group_centered(r, where=w),
  "batch": lambda r, w: advantages.batch_scaled(r, EPSILON, where=w),
  "rloo": lambda r, w: advantages.leave_one_out(r, where=w),
  "rloo_normalized": lambda r, w: advantages.batch_normalized(
    advantages.leave_one_out(r, where=w), EPSILON, where=w
  ),
}


def values_of(options, logps, old, batch):
  """Loss per token."""
  scores = batch["advantages"]
  level = options.get("importance_sampling_level", "token")
  log_ratio = pg.log_ratio(logps, old, batch["mask"], level)
  low = options.get("epsilon", 0.2)
  high = options.get("epsilon_high", low)
  if options["loss_type"] == "cispo":  # TRL's epsilon_high is the bound itself
    values = pg.cispo_loss(log_ratio, logps, scores, clip_high=high - 1).values
  elif options["loss_type"] == "sapo":
    names = {"positive": "sapo_temperature_pos", "negative": "sapo_temperature_neg"}
    taus = {ours: options[trl] for ours, trl in names.items() if trl in options}
    values = pg.sapo_loss(log_ratio, scores, **taus).values
  else:
    bounds = {"clip_low": low, "clip_high": high, "dual_clip": options.get("delta")}
    values = pg.clipped_loss(log_ratio, scores, **bounds).values
  if "beta" in options:
    penalty = kl.k3(logps, batch["ref_logps"])
    if options.get("use_bias_correction_kl", True):
      penalty = kl.corrected(penalty, log_ratio)
    values += options["beta"] * penalty
  return values


def ours(name, options, batch):
  """(loss, gradient in the logits) of one case."""
  mask = batch["mask"]
  old = None if name == "on_policy" else batch["old_logps"]

  def loss(logits):
    all_logps = jax.nn.log_softmax(logits)
    logps = jnp.take_along_axis(all_logps, batch["ids"][..., None], 2)[..., 0]
    if name.startswith("rloo"):  # the ratio of whole completions
      log_ratio = pg.log_ratio(logps, old, mask, "sequence-product")
      low = options.get("epsilon", 0.2)
      high = options.get("epsilon_high", low)
      found = pg.clipped_loss(
        log_ratio, batch["advantages"], clip_low=low, clip_high=high
      )
      return aggregate(found.values, mask, "sequence-mean-token-mean").mean()
    values = values_of(options, logps, old, batch)
    mode = MEANS[options["loss_type"]]
    limit = mask.shape[1] if mode == "sequence-mean-token-scale" else None
    total = aggregate(values, mask, mode, max_tokens=limit).mean()
    if "entropy_coef" in options:
      entropy = -jnp.sum(jnp.exp(all_logps) * all_logps, axis=-1)
      total -= options["entropy_coef"] * aggregate(entropy, mask).mean()
    return total

  return jax.jit(jax.value_and_grad(loss))(batch["logits"])


def check(got, want):
  np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def check_weights(name, options, given):
  level = "token" if name.startswith("token") else "sequence-product"
  high = options["vllm_importance_sampling_clip_max"]
  args = given["logps"], given["rollout_logps"].astype(np.float32), given["mask"]
  if name.endswith("mask"):
    low = options["vllm_importance_sampling_clip_min"]
    got = importance.masked(*args, level=level, low=low, high=high)
  else:
    got = importance.truncated(*args, level=level, cap=high)
  check(got, given["weights"] * given["mask"])


@pytest.mark.parametrize("name", CASES["losses"])
def test_loss_and_gradient(name):
  batch = {key[6:]: x for key, x in TRL.items() if key.startswith("batch/")}
  value, gradient = ours(name, CASES["losses"][name], batch)
  check(value, TRL[f"loss/{name}"])
  check(gradient, TRL[f"gradient/{name}"])


@pytest.mark.parametrize("name", CASES["scores"])
def test_advantages(name):
  rewards = TRL["rewards"]
  check(SCORES[name](rewards, np.isfinite(rewards)), TRL[f"advantages/{name}"])


@pytest.mark.parametrize("name", CASES["weights"])
def test_importance_weights(name):
  start = f"weights/{name}/"
  given = {key[len(start) :]: x for key, x in TRL.items() if key.startswith(start)}
  check_weights(name, CASES["weights"][name], given)


def test_the_cases_exercise_what_they_name():
  """No two cases agree by chance, and bounds are met from both sides."""
  losses = [float(TRL[f"loss/{name}"]) for name in CASES["losses"] if name != "bnpo"]
  assert len(set(losses)) == len(losses)
  assert TRL["loss/bnpo"] == TRL["loss/dapo"]  # they differ in micro-batches only
  for name in CASES["weights"]:
    high = CASES["weights"][name]["vllm_importance_sampling_clip_max"]
    weights = TRL[f"weights/{name}/weights"]
    bound = 0.0 if name.endswith("mask") else high
    assert (weights == bound).any() and (weights != bound).any()


@pytest.fixture(scope="module")
def live():
  pytest.importorskip("trl")
  path = GOLDEN / "make_trl_rl.py"
  spec = importlib.util.spec_from_file_location("make_trl_rl", path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("name", CASES["losses"])
def test_live_loss_and_gradient(live, name):
  batch = live.inputs(1)
  value, gradient = ours(name, live.LOSSES[name], batch)
  want = live.loss(name, live.LOSSES[name], batch)
  check(value, want[0])
  check(gradient, want[1])


@pytest.mark.parametrize("name", CASES["scores"])
def test_live_advantages(live, name):
  rewards = live.rewards(1)
  want = live.score(name, live.SCORES[name], rewards)
  check(SCORES[name](rewards, np.isfinite(rewards)), want)


@pytest.mark.parametrize("name", CASES["weights"])
def test_live_importance_weights(live, name):
  options = live.WEIGHTS[name]
  check_weights(name, options, live.weight(name, options, 1))


def test_live_cases_are_the_committed_ones(live):
  assert CASES["losses"] == live.LOSSES and CASES["scores"] == live.SCORES
  assert CASES["weights"] == live.WEIGHTS
