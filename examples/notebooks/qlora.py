# %% [markdown]
# # 2. QLoRA: adapters on a 4-bit base
# Ten minutes. What you will learn:
#
# - to store the frozen weights in 4 bits
#   ([2305.14314](https://arxiv.org/abs/2305.14314)) and train adapters above them;
# - how many bytes this saves, and how much accuracy it costs;
# - what a 4-bit matrix holds.
#
# Read [1. LoRA](lora.ipynb) first.

# %% include install

# %% include begin

# %% [markdown]
# ## One call
# `quantize="nf4"` replaces the matrices of the base by 4-bit codes and a scale for each
# block of weights. A folder is quantized while it is read, one matrix at a time, so the
# whole model in full precision is never in memory. The adapters learn the form
# `[[08]]`.

# %%
import pathlib
import tempfile


def doubled(a, b):
  return f"[[{a + b:02}]]"


base = task.base(steps=300)
STEPS = 200
OUTPUT = pathlib.Path(tempfile.mkdtemp()) / "qlora"
options = {
  "data": task.records(doubled),
  "eval_data": task.records(doubled, held_out=True),
  "lora": {"rank": 8, "alpha": 16},
  "max_steps": STEPS,
  "learning_rate": 3e-3 if TINY else 2e-4,
  "global_batch_size": 32,
  "max_length": task.max_length,
  "eval_every_n_steps": 20,
  **task.options,
}
result = tunix.sft(
  model={"path": base, "quantize": "nf4"}, output_dir=OUTPUT, **options
)

# %% [markdown]
# ## The same without quantization
# The same call, with the base in its own precision:

# %%
whole = tunix.sft(model=base, **options)
plot(
  "held-out loss",
  four_bits=result.history["eval/loss"],
  full=whole.history["eval/loss"],
)

# %% [markdown]
# The two curves are close. The 4-bit curve may begin higher, because rounding moves
# every weight a little; the adapters learn to correct this error together with the new
# task. A gap that stays is the price of 4 bits.

# %%
from flax import nnx

from tunix.utils.tree import size_bytes

for name, model in (("full", whole.model), ("4 bits", result.model)):
  matrices = nnx.state(model.layers, nnx.filterlib.Not(nnx.LoRAParam))
  print(f"{name:7} {size_bytes(matrices):12,} bytes of frozen weights in the layers")
after = task.accuracy(result.model, doubled)
print(
  f"accuracy: {task.accuracy(whole.model, doubled):.0%} full, {after:.0%} in 4 bits"
)
task.show(result.model)

# %% [markdown]
# ## Below the call: a 4-bit matrix
# `nf4` has 16 levels, which are the quantiles of a normal distribution. A block of
# weights has one scale, and each weight the code of the nearest level. The next cell
# rounds one matrix and measures the error.

# %%
import jax.numpy as jnp

from tunix.models import quantization

exact = task.load(base)
rounded = quantization.dequantize(quantization.quantize(exact, "nf4"))
W, R = (model.layers.attn.q_proj.kernel[...][0] for model in (exact, rounded))
error = jnp.linalg.norm(R - W) / jnp.linalg.norm(W)
print(f"relative error of one matrix: {float(error):.1%}")
print("weight ", W[0, :6].round(3))
print("rounded", R[0, :6].round(3))
for name, model in (("exact", exact), ("rounded", rounded)):
  print(f"{name}: {task.accuracy(model):.0%} of the base's answers are right")

# %% [markdown]
# ## Export
# The run exported its adapters. A merged model has full precision again, so that other
# programs can read it.

# %%
from tunix.models import safetensors_saver

safetensors_saver.save_pretrained(result.model, OUTPUT / "merged")
sorted(path.name for path in (OUTPUT / "merged").iterdir())

# %% [markdown]
# ## Try this
# - Compare `quantize="int8"` and `quantize="int4"`: errors, bytes and curves.
# - Quantize a base that was trained for 100 steps. Does rounding cost it more answers?
# - Set `lora={"rank": 1}`. Is rank 1 still enough to correct the rounding?
