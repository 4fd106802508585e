# %% [markdown]
# # 3. DPO: the better of two answers
# Ten minutes. What you will learn:
#
# - to train on pairs of answers by one call, `tunix.dpo`
#   ([2305.18290](https://arxiv.org/abs/2305.18290));
# - to read margins and accuracies of pairs;
# - to compute the loss of a pair by hand;
# - why more steps are not always better.

# %% include install

# %% include begin

# %% [markdown]
# ## Pairs
# Both answers of a pair are right, and the short one is preferred. The small base first
# learns both forms, half and half.

# %%
import random
import re

from tunix.examples.sums import bracketed

toss = random.Random(0)


def long(a, b):
  return f"{a}+{b}=[{a + b}]"


def either(a, b):
  return toss.choice((bracketed, long))(a, b)


def pairs(held_out=False):
  short = task.records(held_out=held_out)
  others = task.records(long, held_out=held_out)
  return [
    {"prompt": x["prompt"], "chosen": x["response"], "rejected": y["response"]}
    for x, y in zip(short, others)
  ]


def share_of_short(model):
  texts = task.answers(model)
  return sum(bool(re.fullmatch(r"\[[0-9]+\]", text)) for text in texts) / len(texts)


base = task.base(steps=250, answer=either)
before = share_of_short(base)
print(pairs()[0])
print(f"{before:.0%} of the answers are short")

# %% [markdown]
# ## One call
# The reference is the model before the training. With adapters it is the model without
# them, so there is no second model in memory.

# %%
STEPS = 40
result = tunix.dpo(
  model=base,
  data=pairs(),
  eval_data=pairs(held_out=True),
  lora={"rank": 16, "alpha": 32},
  beta=0.1,
  max_steps=STEPS,
  learning_rate=1e-3 if TINY else 5e-5,
  global_batch_size=16,
  max_prompt_length=task.max_prompt_length,
  max_response_length=task.max_answer_length,
  eval_every_n_steps=5,
  **task.options,
)

# %%
plot("nats x beta", margin=result.history["eval/rewards/margin"])
plot(
  "log-probability",
  chosen=result.history["eval/log_probs/chosen"],
  rejected=result.history["eval/log_probs/rejected"],
)

# %% [markdown]
# The margin is the gain of the chosen answer minus the gain of the rejected one, both
# against the reference. It begins at 0, where the policy is the reference, and grows to
# the end.
#
# The second plot shows what the margin hides. The chosen answer gains some nats in the
# first five steps, and later gives a part of them back. The rejected one falls all the
# time, so nearly the whole margin comes from it. DPO optimizes only the difference:
# after too many steps other texts appear, such as `[110]`. Watch the curve of the
# chosen answer, and stop where it turns down.

# %%
accuracy = result.history["eval/rewards/accuracy"].values
print("accuracy of held-out pairs", " ".join(f"{x:.2f}" for x in accuracy))
after = share_of_short(result.model)
print(f"short answers: {before:.0%} -> {after:.0%}")
task.show(result.model)

# %% [markdown]
# ## Below the call: the loss of a pair
# A row of log-probabilities says how likely each token of an answer is. Their sum is
# the log-probability of the answer. The loss of a pair is `-log sigmoid(margin)`, and
# 0.693 (`log 2`) if the policy is the reference.

# %%
import jax.numpy as jnp

from tunix.data import chat


def log_probability(model, prompt, response):
  row = chat.render_completion(prompt, response, task.tokenizer)
  logits, _ = model(row.tokens[None, :-1])
  each = jax.nn.log_softmax(logits[0].astype("float32"))
  each = jnp.take_along_axis(each, row.tokens[1:, None], axis=1)[:, 0]
  return float((each * row.mask[1:]).sum())


reference, pair = task.load(base), pairs(held_out=True)[0]
gain = {}
for name in ("chosen", "rejected"):
  models = (reference, result.model)
  old, new = (log_probability(m, pair["prompt"], pair[name]) for m in models)
  gain[name] = 0.1 * (new - old)
  print(f"{name:8} {pair[name]:10} {old:7.2f} -> {new:7.2f}")
margin = gain["chosen"] - gain["rejected"]
print(f"margin {margin:.2f}, loss {float(-jax.nn.log_sigmoid(margin)):.3f}")

# %% [markdown]
# ## Try this
# - Set `STEPS = 200`. When do answers appear that are neither short nor long?
# - Set `beta=0.5`. A larger beta keeps the policy nearer to the reference.
# - Use `tunix.orpo` without a reference, or `preference={"loss": "ipo", ...}`; the
#   guide `docs/guides/preference.md` has the losses.
