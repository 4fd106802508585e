# %% [markdown]
# # 4. Distillation: a student and its teacher
# Ten minutes. What you will learn:
#
# - to train a small model on a larger one by one call, `tunix.distill`;
# - why whole distributions teach more than right answers;
# - to compare the student with one that had no teacher;
# - to compute the divergence of one token by hand.

# %% include install

# %% include begin

# %% [markdown]
# ## Teacher and student
# Both must have the same vocabulary. Their sizes may differ: the small student has one
# layer and random weights, and its teacher has two layers.

# %%
TEACHER = task.base(steps=400) if TINY else "Qwen/Qwen3-1.7B"


def new_student():
  return task.fresh_model(layers=1, seed=1) if TINY else MODEL


print(f"teacher: {task.accuracy(TEACHER):.0%} of the answers are right")

# %% [markdown]
# ## One call
# The loss is `alpha` times the divergence from the teacher, plus the rest times the
# cross-entropy of the right tokens. Both distributions are flattened by the
# temperature, so that small probabilities count too.

# %%
STEPS = 300
options = {
  "data": task.train,
  "eval_data": task.held_out,
  "max_steps": STEPS,
  "learning_rate": 5e-3 if TINY else 1e-5,
  "global_batch_size": 32,
  "max_length": task.max_length,
  "eval_every_n_steps": 30,
  **task.options,
}
result = tunix.distill(
  model=new_student(),
  distill={"teacher": TEACHER, "temperature": 2.0, "alpha": 0.9},
  **options,
)
plot("nats per token", divergence=result.history["train/distill/kl_div"])

# %% [markdown]
# The divergence is 0 if the student predicts as the teacher. It falls steeply while the
# student learns the form of the answers. Then it falls slowly: this part is arithmetic.

# %% [markdown]
# ## Without a teacher
# The same student, data and steps, with the right tokens alone:

# %%
alone = tunix.sft(model=new_student(), **options)
plot(
  "held-out loss",
  with_teacher=result.history["eval/loss"],
  alone=alone.history["eval/loss"],
)
after = task.accuracy(result.model)
print(f"student {after:.0%} right, alone {task.accuracy(alone.model):.0%}")

# %% [markdown]
# Both curves show the cross-entropy of held-out answers, so they can be compared. On
# training rows a model without a teacher becomes ever more certain. On held-out sums
# this certainty costs it dearly where it is wrong, and its curve may rise. The
# teacher's distributions keep some doubt, so the student's curve stays lower.

# %% [markdown]
# ## Below the call: the divergence of one token
# The teacher gives a probability to every token. The divergence compares the whole
# distribution, and the cross-entropy only the right token.

# %%
import jax.numpy as jnp

from tunix.data import chat

record = task.held_out[0]
row = chat.render_completion(record["prompt"], record["response"], task.tokenizer)
place = row.prompt_length  # the token after the opening bracket


def distribution(model, temperature=2.0):
  logits, _ = model(row.tokens[None])
  return jax.nn.log_softmax(logits[0, place].astype("float32") / temperature)


p, q = distribution(task.load(TEACHER)), distribution(result.model)
print(record["prompt"], record["response"])
for token in jnp.argsort(-p)[:4].tolist():
  text = task.tokenizer.decode([token], skip_special_tokens=False)
  print(
    f"{text!r:8} teacher {jnp.exp(p[token]):6.1%}  student {jnp.exp(q[token]):6.1%}"
  )
print(f"divergence {float((jnp.exp(p) * (p - q)).sum()):.4f} nats")

# %% [markdown]
# ## Try this
# - Set `alpha=0.0` and `alpha=1.0`. Does the student need the right tokens at all?
# - Set `temperature=1.0`. The small probabilities of the teacher then hardly count.
# - Train the teacher for 100 steps only. Can a student become better than its teacher?
