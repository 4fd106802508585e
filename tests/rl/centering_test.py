"""Score centering: the mean gradient under another policy, and what is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.rl import clusters
from tunix.rl import common, policy_loss, setup
from tunix.rl.algorithm_config import RolloutCorrection
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig
from tunix.rl.grpo.grpo_learner import CISPOConfig, GRPOConfig, GSPOConfig, SAPOConfig
from tunix.rl.grpo.rloo_learner import RLOOConfig
from tunix.rl.ppo.ppo_learner import PPOConfig
from tunix.rl.rollout.base_rollout import RolloutConfig


class Table(nnx.Module):
  """A policy over three tokens that is its logits by prefix, [1 + 3, 3]."""

  def __init__(self, logits):
    self.logits = nnx.Param(jnp.asarray(logits))

  def __call__(self, tokens):
    # The first token is the prompt, and what follows the second one is not scored.
    places = jnp.stack([jnp.zeros_like(tokens[:, 0]), 1 + tokens[:, 1]], axis=1)
    return jnp.pad(self.logits[...][places], ((0, 0), (0, 1), (0, 0)))


TRUNCATED = RolloutCorrection(kind="truncate", high=1.1)
MASKED = RolloutCorrection(kind="mask", low=0.8, high=1.2)
CENTERED = [
  *((kind, rule) for kind in (GRPOConfig, PPOConfig) for rule in (None, TRUNCATED)),
  (GRPOConfig, MASKED),
  (GRPOConfig, RolloutCorrection(kind="cispo", low=0.9, high=1.1)),
  *((kind, None) for kind in (DrGRPOConfig, GSPOConfig, CISPOConfig, SAPOConfig)),
]


@pytest.mark.parametrize(
  ("kind", "rule", "filtered"),
  # A correction and a filter are refused, see `setup.check_support`.
  [
    (kind, rule, f)
    for kind, rule in CENTERED
    for f in (False, True)
    if not (rule and f)
  ],
)
def test_a_centered_loss_has_no_gradient_without_an_advantage(kind, rule, filtered):
  """All completions of two tokens, weighed by their chance under another policy.

  The advantages depend on the prefix and not on the token, so they teach nothing.
  """
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(4, 3))
  others = logits + rng.normal(size=(4, 3))
  if filtered:
    others[:, 2] = -np.inf
  sampler = np.exp(others) / np.exp(others).sum(1, keepdims=True)
  words = np.array([(a, b) for a in range(3) for b in range(3)], np.int32)
  at = np.stack([np.zeros(9, int), 1 + words[:, 0]], 1)
  chances = sampler[at, words]
  worth = rng.normal(size=4)[at] * chances.prod(1, keepdims=True)
  example = common.TrainExample(
    prompt_ids=np.zeros((9, 1), np.int32),
    prompt_mask=np.ones((9, 1), bool),
    completion_ids=words,
    completion_mask=np.ones((9, 2), bool),
    advantages=worth,
    rollout_per_token_logps=np.log(np.maximum(chances, 1e-9)),
    head_ids=np.broadcast_to(np.arange(3), (9, 2, 3)),
    head_probs=sampler[at],
  )
  settings = kind(beta=0.0, rollout_correction=rule)

  def gradient(example):
    loss = lambda model: policy_loss.policy_loss(
      model, example, settings, temperature=1.0, max_tokens=2
    )[0].mean()
    return np.abs(nnx.grad(loss)(Table(logits)).logits[...]).max()

  plain = dataclasses.replace(example, head_ids=None, head_probs=None)
  assert gradient(plain) > 1e-3
  assert gradient(example) < 1e-6


def test_centering_refuses_what_it_does_not_center():
  sampling = RolloutConfig(center_scores=8)
  rule = lambda **options: {"rollout_correction": RolloutCorrection(**options)}
  for settings, match in (
    (rule(kind="decoupled"), "rollout_correction.kind is 'decoupled'"),
    (rule(kind="dppo-tv"), "rollout_correction.kind is 'dppo-tv'"),
    (rule(level="sequence"), "rollout_correction.level is 'sequence'"),
    ({"exact_tile_rows": 2}, "exact_tile_rows is 2"),
  ):
    config = GRPOConfig(**settings)
    setup.check_centering(RolloutConfig(), config, 0)
    with pytest.raises(ValueError, match=match):
      setup.check_centering(sampling, config, 0)
  for config in (GRPOConfig(), GRPOConfig(**rule(kind="off"))):
    for staleness in 0, 4:
      setup.check_centering(sampling, config, staleness)
  with pytest.raises(ValueError, match="loss_algo is 'rloo'"):
    setup.check_centering(sampling, RLOOConfig(), 0)
  for engine in ("vllm", "padded"):
    with pytest.raises(ValueError, match=f"'{engine}' and center_scores is 8"):
      clusters.config(rollout={"center_scores": 8}, rollout_engine=engine)
