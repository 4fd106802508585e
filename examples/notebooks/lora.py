# %% [markdown]
# # LoRA
# Adapters teach a model another form of answer, `[[08]]` instead of `[8]`. The weights
# of the model stay the same. This notebook needs `pip install 'tunix[notebooks]'`.

# %% include start

# %% [markdown]
# ## The base

# %%
from tunix.models import lora

base = base_model(300)
dict(zip(HELD_OUT[:4], answers(base)))

# %% [markdown]
# ## Adapters
# The adapters have rank 8 and are on all matrices of the layers. The adapted model
# shares the weights of the base.

# %%
adapted = lora.apply(base, lora.LoraConfig(rank=8, alpha=16.0))
print(lora.describe(adapted))


# %%
def doubled(a, b):
  return f"[[{a + b:02}]]"


STEPS = 200
optimizer = optax.adam(5e-3 if TINY else 2e-4)
losses = fine_tune(adapted, optimizer, STEPS, doubled, "LoRA")
plot("loss", LoRA=losses)

# %% [markdown]
# ## Two forms of answers
# The same weights give one form with the adapters, and the other form without.

# %%
for name, model in (("base", base), ("adapted", adapted)):
  print(
    f"{name:8} [8]: {accuracy(model):4.0%}   [[08]]: {accuracy(model, doubled):4.0%}"
  )
dict(zip(HELD_OUT[:4], answers(adapted)))

# %% [markdown]
# ## Saved, loaded, merged
# The folder has PEFT's format. A merged model has no adapters.

# %%
lora.save_adapter(adapted, OUTPUT / "adapter")
again = lora.load_adapter(base, OUTPUT / "adapter")
merged = lora.merge(again)
size = sum(f.stat().st_size for f in (OUTPUT / "adapter").iterdir())
after = accuracy(merged, doubled)
print(f"{size:,} bytes; merged, {after:.0%} of the answers are right")
