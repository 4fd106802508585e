# %% [markdown]
# # Distillation
# A student learns from the teacher's probabilities of all tokens at every position, and
# not only from the right token. This notebook needs `pip install 'tunix[notebooks]'`.

# %% include start

# %% [markdown]
# ## Teacher and student
# Both must have the same vocabulary. Their sizes may differ.

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
# The teacher runs outside the student's step, without gradient, in its own dtype. The
# loss is `alpha` times the divergence from the teacher, plus the rest times the
# cross-entropy of the right tokens.

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
# ## Results
# The divergence is in nats per token, at the temperature of the strategy.

# %%
plot("nats", divergence=logger.get_metric_history("", "distill/kl_div", Mode.TRAIN))
losses = logger.get_metric_history("", "loss", Mode.EVAL)
print("held-out cross-entropy", " ".join(f"{x:.2f}" for x in losses))
after = accuracy(student)
print(f"student {after:.0%} right")
