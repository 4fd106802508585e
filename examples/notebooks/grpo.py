# %% [markdown]
# # 5. GRPO: learning from rewards
# Ten minutes. What you will learn:
#
# - to write a reward and train on it by one call, `tunix.grpo`;
# - to read rewards, and the share of groups that teach nothing;
# - to compute the advantages of a group by hand;
# - why a reward must say what it does with reasoning.

# %% include install

# %% include begin

# %% [markdown]
# ## A reward
# A reward is a function of prompts, completions and the columns of the records that its
# signature names. The right number gives 1, the right form with a wrong number 0.1, so
# that a model that is always wrong still learns the form.
#
# A model that reasons writes `<think>...</think>` before its answer. `after_reasoning`
# returns the answer, or `None` if the model has not finished its reasoning. Without it
# this reward would give 0 to every completion with reasoning.

# %%
import re

from tunix.rl.reward.functions import after_reasoning


def reward(prompts, completions, answer):
  scores = []
  for text, number in zip(completions, answer):
    match = re.fullmatch(r"\[([0-9]+)\]", (after_reasoning(text) or "").strip())
    scores.append(0.0 if match is None else 1.0 if int(match[1]) == number else 0.1)
  return scores


completions = ["[16]", "[15]", "16", "<think>7 and 9</think>[16]", "<think>[16]"]
reward([], completions, [16] * 5)

# %% [markdown]
# ## One call
# The model answers each prompt eight times. Answers that are better than the others to
# the same prompt become more likely ([2402.03300](https://arxiv.org/abs/2402.03300)).
# There is no reference model, because `beta` is 0. A real model is trained with
# adapters.

# %%
base = task.base(steps=150)
before = task.accuracy(base)
STEPS = 60
result = tunix.grpo(
  model=base,
  data=task.train,
  eval_data=task.held_out,
  rewards=reward,
  algorithm={"num_generations": 8, "beta": 0.0, "pass_threshold": 1.0},
  rollout={
    "max_prompt_length": task.max_prompt_length,
    "max_tokens_to_generate": task.max_answer_length,
    "eval_temperature": 0.0,
  },
  lora=None if TINY else {"rank": 16, "alpha": 32},
  max_steps=STEPS,
  learning_rate=3e-4 if TINY else 1e-5,
  global_batch_size=32 if TINY else 8,
  eval_every_n_steps=20,
  **task.options,
)

# %%
history = result.history
plot("reward", training=history["train/rewards/score/mean"])
plot("share", groups_with_equal_rewards=history["train/groups/all_equal"])

# %% [markdown]
# The curve of rewards is noisy: each step has other prompts. Compare its beginning and
# its end, not neighboring steps. The second plot explains why progress slows down. A
# group whose eight rewards are equal has no better answers, so it teaches nothing.
# Their share grows while the model learns, because it answers easy prompts right every
# time.

# %%
passed = history["eval/pass@1"].values
print("held-out answers that are right", " ".join(f"{x:.2f}" for x in passed))
after = task.accuracy(result.model)
print(f"greedy answers that are right: {before:.0%} -> {after:.0%}")
task.show(result.model)

# %% [markdown]
# ## Below the call: the advantages of a group
# The next cell samples one group from the base and rewards it. The advantage of an
# answer is its reward minus the mean of the group, divided by the group's standard
# deviation. The gradient raises the log-probabilities of the tokens with positive
# advantages.

# %%
import jax.numpy as jnp

from tunix.data import chat
from tunix.ops import advantages

record = task.held_out[0]
prompt = chat.render_completion(record["prompt"], None, task.tokenizer).prompt
sample = tunix.Sampler(task.load(base), task.tokenizer)
group = sample(
  [prompt.tolist()], task.max_answer_length, temperature=1.5, num_samples=8, seed=0
).text
scores = jnp.array([reward([], group, [record["answer"]] * 8)])
by_hand = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
ours = advantages.group_normalized(scores)
print(
  record["prompt"], f"largest difference {float(jnp.abs(by_hand - ours).max()):.1e}"
)
for text, score, advantage in zip(group, scores[0], ours[0]):
  print(f"{text:12} reward {score:.1f}  advantage {advantage:5.2f}")

# %% [markdown]
# ## Try this
# - Use the ready functions `rewards=["exact_match(column=response)"]`. What does the
#   model lose without the reward of 0.1 for the form?
# - Set `algorithm={"name": "rloo", ...}` or `"dapo"`. DAPO leaves out groups with equal
#   rewards.
# - Start from `task.base(steps=20)`. A model that never finds a right answer has only
#   the form to learn.
