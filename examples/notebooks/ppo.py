# %% [markdown]
# # PPO on arithmetic
# A critic predicts the expected reward before every token, and the policy learns from
# the difference to the real reward ([1707.06347](https://arxiv.org/abs/1707.06347)).
# Both are trained together. This notebook needs `pip install 'tunix[notebooks]'`.

# %% include start

# %% [markdown]
# ## A reward

# %%
import re

from tunix.models import lora
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.utils import create_critic_model


def reward(prompts, completions, answer):
  matches = [re.fullmatch(r"\[([0-9]+)\]", text.strip()) for text in completions]
  return [
    0.0 if match is None else 1.0 if int(match[1]) == number else 0.1
    for match, number in zip(matches, answer)
  ]


def batches(steps, size=64 if TINY else 32):
  for step in range(steps):
    sums = random.Random(step).choices(LEARNT, k=size)
    yield {"prompts": [question(*s) for s in sums], "answer": [a + b for a, b in sums]}


# %% [markdown]
# ## Policy and critic
# The critic is the policy's decoder with a head of one value. The critic of a real
# model shares the policy's weights, and has only separate adapters and a head.

# %%
base = base_model(200)
before = accuracy(base)
actor = base if TINY else lora.apply(base, lora.LoraConfig(rank=16, alpha=32.0))
STEPS = 160  # two updates for each batch of rollouts


def optimizer(rate):
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


cluster = RLCluster(
  actor=actor,
  critic=create_critic_model(actor, share=not TINY),
  tokenizer=tokenizer,
  cluster_config=ClusterConfig(
    training_config=RLTrainingConfig(
      actor_optimizer=optimizer(3e-4 if TINY else 1e-5),
      critic_optimizer=optimizer(2e-3 if TINY else 1e-4),
      max_steps=STEPS,
      pbar_description="PPO",
    ),
    rollout_config=RolloutConfig(
      max_prompt_length=LENGTH, max_tokens_to_generate=8 if TINY else 32
    ),
  ),
)
print(f"{before:.0%} of the answers are right")

# %% [markdown]
# ## Training
# One completion of each prompt is enough, because the critic is the baseline.

# %%
learner = PPOLearner(
  cluster, PPOConfig(num_iterations=2, beta=0.0, gae_lambda=1.0), reward
)
learner.train(batches(STEPS // 2))
learner.close()

# %% [markdown]
# ## Results

# %%
log = cluster.logger
rewards = log.get_metric_history("", "rewards/score/mean", Mode.TRAIN)
plot("reward", mean=rewards)
plot("squared error", critic=log.get_metric_history("critic", "loss", Mode.TRAIN))
print(f"mean reward {rewards[:10].mean():.2f} -> {rewards[-10:].mean():.2f}")
after = accuracy(actor)
print(f"greedy answers that are right: {before:.0%} -> {after:.0%}")
