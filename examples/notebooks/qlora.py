# %% [markdown]
# # QLoRA
# The matrices of the base have four bits per weight ([2305.14314](
# https://arxiv.org/abs/2305.14314)); the trained adapters have float32 weights. This
# notebook needs `pip install 'tunix[notebooks]'`.

# %% include start

# %% [markdown]
# ## A 4-bit base
# A folder is quantized while it is read, one matrix at a time, so the full-precision
# model is never in memory. The small model is quantized in memory.

# %%
from flax import nnx

from tunix.models import lora, quantisation
from tunix.utils.tree import size_bytes

if TINY:
  whole = base_model(300)
  print(f"float32: {accuracy(whole):.0%} right, {size_bytes(nnx.state(whole)):,} bytes")
  base = quantisation.quantise(whole, "nf4")
else:
  base = AutoModel.from_pretrained(folder(MODEL), dtype="bfloat16", quantise="nf4")
print(f"nf4: {accuracy(base):.0%} right, {size_bytes(nnx.state(base)):,} bytes")

# %% [markdown]
# ## Adapters
# They learn another form of answer, `[[08]]`. Only the adapters have gradients.


# %%
def doubled(a, b):
  return f"[[{a + b:02}]]"


adapted = lora.apply(base, lora.LoraConfig(rank=8, alpha=16.0))
STEPS = 200
optimizer = optax.adam(5e-3 if TINY else 2e-4)
losses = fine_tune(adapted, optimizer, STEPS, doubled, "QLoRA")
plot("loss", QLoRA=losses)

# %%
after = accuracy(adapted, doubled)
print(f"{after:.0%} of the answers are right, for example")
dict(zip(HELD_OUT[:4], answers(adapted)))

# %% [markdown]
# ## Export
# The merged model has no quantization, so that other programs can read it.

# %%
from tunix.models import safetensors_saver

source = None if TINY else folder(MODEL)
safetensors_saver.save_pretrained(adapted, OUTPUT / "merged", source=source)
sorted(path.name for path in (OUTPUT / "merged").iterdir())
