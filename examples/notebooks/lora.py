# %% [markdown]
# # LoRA
# A model learns another way to answer, `[[08]]` in place of `[8]`, by adapters alone:
# its own weights stay as they are. It takes `pip install 'tunix[notebooks]'`.

# %% include start

# %% [markdown]
# ## The base

# %%
from tunix.models import lora

base = base_model(300)
dict(zip(HELD_OUT[:4], answers(base)))

# %% [markdown]
# ## Adapters
# Each of rank 8, on all matrices of the layers. The base is shared, not copied.

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
# ## Two habits
# The same weights answer in two ways, with the adapters and without.

# %%
for name, model in (("base", base), ("adapted", adapted)):
  print(
    f"{name:8} [8]: {accuracy(model):4.0%}   [[08]]: {accuracy(model, doubled):4.0%}"
  )
dict(zip(HELD_OUT[:4], answers(adapted)))

# %% [markdown]
# ## Saved, loaded, merged
# The folder is one of PEFT. Merged, the model computes no adapters any more.

# %%
lora.save_adapter(adapted, OUTPUT / "adapter")
again = lora.load_adapter(base, OUTPUT / "adapter")
merged = lora.merge(again)
size = sum(f.stat().st_size for f in (OUTPUT / "adapter").iterdir())
after = accuracy(merged, doubled)
print(f"{size:,} bytes; merged, {after:.0%} of the answers are right")
