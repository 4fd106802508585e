# %% [markdown]
# # 1. LoRA: a second form of answers
# Ten minutes. What you will learn:
#
# - to train adapters by one call, `tunix.sft`;
# - to read the loss of training rows and of held-out rows;
# - what an adapter computes, and why the weights below it stay the same;
# - to save, load and merge adapters.

# %% include install

# %% include begin

# %% [markdown]
# ## The base model
# It answers in the form `[8]`.

# %%
base = task.base(steps=300)
print(f"{task.accuracy(base):.0%} of the answers are right")
task.show(base)

# %% [markdown]
# ## One call
# The adapters learn the form `[[08]]`. The records have a prompt and a response, and
# only the tokens of the response are trained. The rank is the width of an adapter.

# %%
import pathlib
import tempfile


def doubled(a, b):
  return f"[[{a + b:02}]]"


STEPS = 200
OUTPUT = pathlib.Path(tempfile.mkdtemp()) / "lora"
result = tunix.sft(
  model=base,
  data=task.records(doubled),
  eval_data=task.records(doubled, held_out=True),
  lora={"rank": 8, "alpha": 16},
  max_steps=STEPS,
  learning_rate=3e-3 if TINY else 2e-4,
  global_batch_size=32,
  max_length=task.max_length,
  eval_every_n_steps=20,
  output_dir=OUTPUT,
  **task.options,
)

# %%
plot(
  "loss",
  training=result.history["train/loss"],
  held_out=result.history["eval/loss"],
)

# %% [markdown]
# Read the plot from left to right. The loss is the mean surprise per trained token, in
# nats. It begins high, because the base gives a second bracket almost no probability.
# It falls within some dozens of steps: the new form is learned, and the sums were known
# before. Both curves fall together, so the adapters learned a rule and not the records.
# A held-out curve that turns upwards while the other falls is overfitting: stop there,
# or lower the rank.

# %% [markdown]
# ## Two forms of answers
# The same weights give one form with the adapters, and the other form without.

# %%
after = task.accuracy(result.model, doubled)
for name, model in (("base", base), ("adapted", result.model)):
  print(
    f"{name:8} [8]: {task.accuracy(model):4.0%}"
    f"   [[08]]: {task.accuracy(model, doubled):4.0%}"
  )
task.show(result.model)

# %% [markdown]
# ## Below the call: an adapter
# An adapter adds a product of two thin matrices to a frozen matrix: `x W + s (x A) B`,
# where `s` is `alpha / rank`. `B` begins at 0, so an untrained adapter changes nothing.
# The next cell computes one layer by hand.

# %%
import jax.numpy as jnp

from tunix.models import lora

linear = result.model.layers.attn.q_proj
W, A, B = (x[...][0] for x in (linear.kernel, linear.lora_a, linear.lora_b))
print(
  f"W {W.shape}, A {A.shape}, B {B.shape}, largest entry of B {jnp.abs(B).max():.2}"
)
size = lambda x: float(jnp.linalg.norm(x))
print(f"norm of W {size(W):.2f}, of the change {size(16 / 8 * A @ B):.2f}")
print(lora.describe(result.model).splitlines()[-1])

# %% [markdown]
# ## Below the call: the trainer
# `tunix.sft` tokenizes records, makes batches and gives them to a `PeftTrainer`. You
# can do the same with a model in memory and any optimizer of optax.

# %%
import optax

from tunix.data import pipeline

other = lora.apply(
  task.load(base), lora.LoraConfig(rank=1, targets=("q_proj", "v_proj"))
)
rows = pipeline.build_dataset(
  task.records(doubled),
  task.tokenizer,
  batch_size=32,
  max_length=task.max_length,
  num_epochs=None,
)
settings = tunix.TrainingConfig(max_steps=STEPS)
trainer = tunix.PeftTrainer(other, optax.adam(3e-3 if TINY else 2e-4), settings)
trainer.train(rows)
trainer.close()
plot("loss", rank_8=result.history["train/loss"], rank_1=trainer.history["train/loss"])

# %% [markdown]
# Rank 1 on two matrices of each layer has a thirtieth of the parameters, and its curve
# falls later and ends higher. A larger rank is not always better: it costs memory, and
# more parameters fit the records instead of the rule.

# %% [markdown]
# ## Saved, loaded, merged
# The run exported its adapters in PEFT's format. A merged model has no adapters, and
# any program that reads Hugging Face folders can load it.

# %%
again = tunix.load_adapter(task.load(base), result.export)
merged = lora.merge(again)
files = {f.name: f.stat().st_size for f in pathlib.Path(result.export).iterdir()}
print(f"adapter: {files['adapter_model.safetensors']:,} bytes")
print(f"merged: {task.accuracy(merged, doubled):.0%} of the answers are right")

# %% [markdown]
# ## Try this
# - Set `rank=1` in the call. How many steps does it need for the same loss?
# - Give the base another task: answers such as `[3+5=8]`. Which of the two learns
#   faster, a new form or new sums?
# - Raise the learning rate tenfold, and find the step at which the loss explodes.
