# %% [markdown]
# # 6. PPO: a policy and its critic
# Ten minutes. What you will learn:
#
# - to train a policy and a critic by one call, `tunix.ppo`
#   ([1707.06347](https://arxiv.org/abs/1707.06347));
# - to read the critic's error beside the reward;
# - to see what the critic expects before every token;
# - to compute advantages from these values by hand.
#
# Read [5. GRPO](grpo.ipynb) first.

# %% include install

# %% include begin

# %% [markdown]
# ## A reward
# It is the reward of the GRPO notebook, made of two ready functions: 0.9 for the right
# answer, and 0.1 for its form. `exact_match` reads the text after `</think>`, and so
# does `format_match` with `reasoning=drop`.

# %%
REWARDS = [
  "exact_match(column=response)",
  r"format_match('\\[[0-9]+\\]', reasoning=drop)",
]

# %% [markdown]
# ## One call
# The critic is the policy's decoder with a head of one value. It predicts the reward
# before every token, so one completion of each prompt is enough: the critic is the
# baseline, and not the other answers to the same prompt. Each batch of rollouts is used
# for two updates.

# %%
base = task.base(steps=150)
before = task.accuracy(base)
STEPS = 120
result = tunix.ppo(
  model=base,
  data=task.train,
  eval_data=task.held_out,
  reward={"functions": REWARDS, "weights": [0.9, 0.1]},
  algorithm={
    "num_iterations": 2,
    "beta": 0.0,
    "gae_lambda": 1.0,
    "pass_threshold": 0.9,
  },
  rollout={
    "max_prompt_length": task.max_prompt_length,
    "max_tokens_to_generate": task.max_answer_length,
    "eval_temperature": 0.0,
  },
  rl={"critic_learning_rate": 2e-3 if TINY else 1e-4},
  lora=None if TINY else {"rank": 16, "alpha": 32},
  max_steps=STEPS,
  learning_rate=3e-4 if TINY else 1e-5,
  global_batch_size=64 if TINY else 32,
  eval_every_n_steps=40,
  **task.options,
)

# %%
history = result.history
plot("reward", training=history["train/rewards/score/mean"])
plot("squared error", critic=history["train/critic/loss"])

# %% [markdown]
# Read the second plot first. The critic begins without knowledge, and its error falls
# within ten updates. Then it stays at about 0.10, which is half of the variance of the
# rewards: the critic knows the mean reward, and not yet which answer is right. Such a
# critic is a baseline, as the mean of a group is in GRPO.
#
# The reward rises slowly, from about 0.5 to 0.6, and its noise is larger than the rise:
# a step sees one completion of each of 64 prompts, where GRPO saw eight of each of 32.
# Judge a run by many steps, or by the held-out answers below, and expect PPO to need
# more rollouts than GRPO on a task this small.

# %%
passed = history["eval/pass@1"].values
print("held-out answers that are right", " ".join(f"{x:.2f}" for x in passed))
after = task.accuracy(result.model)
print(f"greedy answers that are right: {before:.0%} -> {after:.0%}")

# %% [markdown]
# ## Below the call: values and advantages
# The critic reads a right and a wrong answer. A value is the reward that it expects
# before a token. A critic that had learned more would expect less after the wrong
# number; here all values are near the mean. With `gae_lambda` 1, the advantage of a
# token is the reward at the end minus the value before the token, so it is positive in
# the right answer and negative in the wrong one.

# %%
import jax.numpy as jnp
import numpy as np

from tunix.data import chat
from tunix.generate import scoring
from tunix.ops import advantages

critic = result.trainer.rl_cluster.critic
record = task.held_out[0]
wrong = f"[{record['answer'] + 1}]"
for text, reward in ((record["response"], 1.0), (wrong, 0.1)):
  row = chat.render_completion(record["prompt"], text, task.tokenizer)
  tokens = row.completions[0]
  mask = np.ones((1, len(tokens)), bool)
  prompt = row.prompt[None], np.ones((1, row.prompt_length), bool)
  values = scoring.score_values(critic, *prompt, tokens[None], mask)
  rewards = jnp.zeros(mask.shape).at[0, -1].set(reward)
  ours, _ = advantages.gae(rewards, values, mask, gamma=1.0, lam=1.0)
  print(
    record["prompt"],
    text,
    f"largest difference {jnp.abs(ours - (reward - values)).max():.1e}",
  )
  for token, value, advantage in zip(tokens.tolist(), values[0], ours[0]):
    shown = task.tokenizer.decode([token], skip_special_tokens=False)
    print(f"  {shown:6} value {value:5.2f}  advantage {advantage:5.2f}")

# %% [markdown]
# ## Try this
# - Set `gae_lambda=0.0`. The advantage then trusts the critic alone. When does this
#   help?
# - Set `critic_learning_rate` to the policy's. How many steps does the critic need now?
# - Set `num_iterations=8`, and watch `history["train/actor/pg_clipfrac"]`: the clip of
#   the ratio holds the policy back when a batch is used too often.
