# %% [markdown]
# # DPO
# The model learns from pairs of answers which of the two is better
# ([2305.18290](https://arxiv.org/abs/2305.18290)). This notebook needs
# `pip install 'tunix[notebooks]'`.

# %% include start

# %% [markdown]
# ## Pairs
# Both answers of a pair are right, and the short one is preferred. The model's chat
# template renders conversations.

# %%
import re

from tunix.models import lora
from tunix.sft.dpo.dpo_trainer import DataInput, DPOTrainer, DPOTrainingConfig


def long(a, b):
  return f"{a}+{b}=[{a + b}]"


def pairs(sums):
  return DataInput(
    prompts=[question(*s) for s in sums],
    chosen_responses=[right(*s) for s in sums],
    rejected_responses=[long(*s) for s in sums],
  )


def batches(steps):
  for step in range(steps):
    yield pairs(random.Random(step).sample(LEARNT, ROWS))


example = pairs(HELD_OUT[:3])
list(zip(example.prompts, example.chosen_responses, example.rejected_responses))

# %% [markdown]
# ## The base
# The small model first learns both forms of answers. A real model needs no preparation.

# %%
if TINY:
  base, toss = small_model(), random.Random(0)
  either = lambda a, b: toss.choice((right, long))(a, b)
  fine_tune(base, optax.adam(2e-3), 250, either, "base")
else:
  base = load()


def short(model):
  """Returns the share of answers that are only a number in brackets."""
  texts = answers(model)
  return sum(bool(re.fullmatch(r"\[[0-9]+\]", text)) for text in texts) / len(texts)


before = short(base)
answers(base)[:6]

# %% [markdown]
# ## Training
# The reference is the model before training. With adapters it is the model without
# them, so there is no second model in memory.

# %%
adapted = lora.apply(base, lora.LoraConfig(rank=16, alpha=32.0))
STEPS = 40
config = DPOTrainingConfig(
  beta=0.1,
  max_steps=STEPS,
  eval_every_n_steps=10,
  max_prompt_length=LENGTH,
  max_response_length=12 if TINY else 32,
  pbar_description="DPO",
)
logger = MetricsLogger()
optimizer = optax.adam(2e-4 if TINY else 5e-5)
trainer = DPOTrainer(adapted, None, optimizer, config, tokenizer, metrics_logger=logger)
trainer.train(batches(STEPS), [pairs(HELD_OUT)])
trainer.close()

# %% [markdown]
# ## Results
# The margin is the gain of the chosen answer minus the gain of the rejected one, in
# nats times beta. Accuracy is the share of held-out pairs with a positive margin. DPO
# optimizes only this difference. After too many steps both answers become unlikely, and
# other outputs appear (`[1[5]`). Fewer steps, a larger beta, or the likelihood of the
# chosen answer in the loss (`docs/guides/preference.md`) prevent it.

# %%
margins = logger.get_metric_history("", "rewards/margin", Mode.TRAIN)
plot("nats x beta", margin=margins)
chosen = logger.get_metric_history("", "rewards/accuracy", Mode.EVAL)
print("held-out accuracy", " ".join(f"{x:.2f}" for x in chosen))
after = short(adapted)
print(f"short answers: {before:.0%} -> {after:.0%}")
answers(adapted)[:6]
