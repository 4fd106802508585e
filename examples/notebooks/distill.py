# %% [markdown]
# # Distillation
# A student learns what a teacher says of every token, all of its words with their
# probabilities, and not only the word that came. It takes
# `pip install 'tunix[notebooks]'`.

# %% include start

# %% [markdown]
# ## Teacher and student
# They must number their tokens alike; sizes are free.

# %%
from tunix.distillation.distillation_trainer import (
  DistillationTrainer,
  TrainingConfig as DistillationConfig,
)
from tunix.distillation.strategies import LogitStrategy

TEACHER = "Qwen/Qwen3-1.7B"
teacher = base_model(400) if TINY else load(TEACHER)
student = small_model(seed=1, layers=1) if TINY else load()
print(f"teacher {accuracy(teacher):.0%} right, student {accuracy(student):.0%}")

# %% [markdown]
# ## Training
# The teacher runs outside the student's step, without gradient, in its own dtype. Of
# the loss, `alpha` is the divergence from what it says, the rest the right tokens.

# %%
data = pipeline.build_dataset(
  records(LEARNT), tokenizer, batch_size=ROWS, max_length=LENGTH, num_epochs=None
)
held_out = pipeline.build_dataset(
  records(HELD_OUT), tokenizer, batch_size=ROWS, max_length=LENGTH, shuffle=False
)
STEPS = 300
logger = MetricsLogger()
trainer = DistillationTrainer(
  student,
  teacher,
  LogitStrategy(temperature=2.0, alpha=0.9),
  optax.adam(5e-3 if TINY else 1e-5),
  DistillationConfig(
    max_steps=STEPS, eval_every_n_steps=50, pbar_description="distillation"
  ),
  logger,
)
trainer.train(data, list(held_out))
trainer.close()

# %% [markdown]
# ## What was learnt
# The divergence is in nats a token, at the temperature.

# %%
plot("nats", divergence=logger.get_metric_history("", "distill/kl_div", Mode.TRAIN))
losses = logger.get_metric_history("", "loss", Mode.EVAL)
print("held-out cross-entropy", " ".join(f"{x:.2f}" for x in losses))
after = accuracy(student)
print(f"student {after:.0%} right")
