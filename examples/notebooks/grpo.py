# %% [markdown]
# # GRPO on arithmetic
# The model answers each question several times. Answers that are better than the others
# to the same question become more likely
# ([2402.03300](https://arxiv.org/abs/2402.03300)). This notebook needs `pip install
# 'tunix[notebooks]'`.

# %% include start

# %% [markdown]
# ## A reward
# A reward is any function of prompts, completions and the columns of the data. The
# right number gives 1, the right form with a wrong number 0.1, so that a model that is
# always wrong still learns the form.

# %%
import re

from tunix.models import lora
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig


def reward(prompts, completions, answer):
  matches = [re.fullmatch(r"\[([0-9]+)\]", text.strip()) for text in completions]
  return [
    0.0 if match is None else 1.0 if int(match[1]) == number else 0.1
    for match, number in zip(matches, answer)
  ]


def batches(steps, size=32 if TINY else 8):
  for step in range(steps):
    sums = random.Random(step).sample(LEARNT, size)
    yield {"prompts": [question(*s) for s in sums], "answer": [a + b for a, b in sums]}


reward([], ["[16]", "[15]", "16"], [16, 16, 16])

# %% [markdown]
# ## The policy
# The small model gives some right answers before RL. A real model is trained with
# adapters. There is no reference model, because `beta` is 0.

# %%
base = base_model(200)
before = accuracy(base)
actor = base if TINY else lora.apply(base, lora.LoraConfig(rank=16, alpha=32.0))
STEPS = 80
sampling = RolloutConfig(
  max_prompt_length=LENGTH, max_tokens_to_generate=8 if TINY else 32
)
optimizer = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adam(3e-4 if TINY else 1e-5)
)
cluster = RLCluster(
  actor=actor,
  tokenizer=tokenizer,
  cluster_config=ClusterConfig(
    training_config=RLTrainingConfig(
      actor_optimizer=optimizer, max_steps=STEPS, pbar_description="GRPO"
    ),
    rollout_config=sampling,
  ),
)
print(f"{before:.0%} of the answers are right")

# %% [markdown]
# ## Training

# %%
learner = GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.0), reward)
learner.train(batches(STEPS))
learner.close()

# %% [markdown]
# ## Results
# A group with equal rewards has no gradient. The share of these groups grows while the
# model learns.

# %%
log = cluster.logger
rewards = log.get_metric_history("", "rewards/score/mean", Mode.TRAIN)
equal = log.get_metric_history("", "groups/all_equal", Mode.TRAIN)
plot("reward", mean=rewards)
plot("share", groups_all_equal=equal)
print(f"mean reward {rewards[:10].mean():.2f} -> {rewards[-10:].mean():.2f}")
after = accuracy(actor)
print(f"greedy answers that are right: {before:.0%} -> {after:.0%}")
dict(zip(HELD_OUT[:4], answers(actor)))
