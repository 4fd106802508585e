"""PPO with a critic and a KL penalty in the rewards (Schulman et al. 2017, 1707.06347;
Ouyang et al. 2022, 2203.02155)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from tunix.ops import advantages
from tunix.rl import common, policy_loss
from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.common import TrainExample
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rl_learner import RLLearner
from tunix.sft.steps.shared_steps import Call
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(AlgorithmConfig):
  """AlgorithmConfig with generalized advantage estimation.

  Attributes:
    gamma: discount factor per token.
    gae_lambda: weight between the critic's one-step errors (0) and whole returns (1).
    clip_range_value: largest change of a critic's value in one batch of rollouts; None
      is no clip.
    whiten_advantages: if True, advantages are scaled to mean 0 and standard deviation 1
      over the tokens of a batch of rollouts.
  """

  kl_in_loss: ClassVar[bool] = False

  advantage_estimator: str = "gae"
  kl_method: str | Callable[..., Any] = "k1"
  gamma: float = 1.0
  gae_lambda: float = 0.95
  clip_range_value: float | None = 0.2
  whiten_advantages: bool = True

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self,
      gamma=checks.SHARE,
      gae_lambda=checks.SHARE,
      clip_range_value=checks.POSITIVE,
    )

  def _check_advantages(self) -> None:
    if self.advantage_estimator != "gae":
      raise ValueError(
        f"advantage_estimator is {self.advantage_estimator!r}: PPO has a critic and "
        'uses "gae"; for advantages from groups use GRPOLearner'
      )


class PPOLearner(RLLearner):
  """Trains an actor and a critic; see RLLearner for the arguments.

  A completion that reached its token limit counts as ended at its last token: the value
  after this token is 0.

  Raises:
    ValueError: the cluster has no critic.
  """

  uses_critic = True
  algo_config: PPOConfig

  def __init__(
    self, rl_cluster: RLCluster, algo_config: PPOConfig, *args: Any, **options: Any
  ):
    if rl_cluster.critic_trainer is None:
      raise ValueError(
        "PPO needs a critic: pass critic= to RLCluster, such as "
        "tunix.rl.utils.create_critic_model(actor), and critic_optimizer"
      )
    rl_cluster.critic_trainer.with_role_loss(
      Call.of(policy_loss.critic_loss, clip=algo_config.clip_range_value)
    )
    super().__init__(rl_cluster, algo_config, *args, **options)

  def _generate_and_compute_advantage(self, batch: PromptBatch) -> TrainExample:
    rollouts, config = self._rollouts(batch), self.algo_config
    mask = rollouts.completion_mask
    with self._phases("scoring"):
      values = self.rl_cluster.get_values(rollouts)
    old, divergence = self._experience.kl_penalty(rollouts)
    estimated, returns = advantages.gae(
      jnp.asarray(common.token_rewards(rollouts, divergence, config.beta)),
      jnp.asarray(values),
      jnp.asarray(mask, jnp.float32),
      gamma=config.gamma,
      lam=config.gae_lambda,
    )
    if config.whiten_advantages:
      valid = mask & self._experience.counted(rollouts)[:, None]
      estimated = advantages.whiten(estimated, jnp.asarray(valid, jnp.float32))
    return self._example(
      rollouts,
      np.asarray(estimated),
      old,
      returns=np.asarray(returns, np.float32),
      old_values=values,
    )
