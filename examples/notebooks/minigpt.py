# %% [markdown]
# # A custom miniGPT
# A small language model in plain `flax.nnx`: data, pretraining, generation, adapters
# (LoRA, by qwix) that change its style, and a profile. The notebook defines the model,
# the loss and the input function; tunix trains and samples the model. It needs
# `pip install 'tunix[notebooks]'` and no download. A machine with only a CPU simulates
# eight devices and takes some minutes.
#
# Most cells quote `examples/minigpt.py`, which does the same in a terminal.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before the first array

# %%
import contextlib
import dataclasses
import pathlib
import random
import re
import tempfile

import grain
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import qwix
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tunix.generate.sampler import CacheConfig, Sampler
from tunix.ops.reductions import weighted_sum
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.profiler import ProfilerOptions

OUTPUT = pathlib.Path(tempfile.mkdtemp())
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Sizes

# %% quote minigpt: Settings TINY

# %%
settings = Settings()  # TINY runs in seconds

# %% [markdown]
# ## Devices
# Batches are split four ways over the axis `batch`, matrices two ways over `model`. Two
# forms make the mesh the context; the notebook uses both.

# %% quote minigpt: new_mesh inside

# %%
mesh = new_mesh()
print(dict(mesh.shape), mesh.axis_types)

# %% [markdown]
# ## Text
# Two styles, one megabyte of each: short stories for pretraining, and a play.

# %% quote minigpt: NAMES ANIMALS THINGS PLACES KINGS story speech texts

# %%
stories = texts(story, settings.text_bytes, seed=1)
play = texts(speech, settings.text_bytes, seed=1)
for lines in (stories, play):
  print(f"{len(lines):,} texts, {sum(map(len, lines)):,} characters\n{lines[0]}\n")

# %% [markdown]
# ## Tokens and batches
# Grain shuffles, repeats and batches. The position in the data is one number, which a
# checkpoint saves.

# %% quote minigpt: Words rows

# %%
tokenizer = Words()
START = "Once upon a time"
batch = next(iter(rows(tokenizer, stories, 2, settings.maxlen, 1)))
print(f"{len(tokenizer.words)} words, padded to {tokenizer.vocab_size}")
{name: value.shape for name, value in batch.items()}

# %% [markdown]
# ## The model

# %% quote minigpt: split TransformerBlock MiniGPT

# %%
with inside(mesh, "set_mesh"):
  model = MiniGPT(settings, tokenizer.vocab_size, rngs=nnx.Rngs(0))
count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
print(f"{count:,} weights")

# %% [markdown]
# ## Pretraining
# Two functions: the model's input from a batch, and the loss.

# %% quote minigpt: gen_model_input_fn loss_fn train

# %% [markdown]
# Text before training:

# %% quote minigpt: generate

# %%
with inside(mesh, "set_mesh"):
  print(generate(model, tokenizer, settings, START))

# %% [markdown]
# The training runs under `jax.set_mesh(mesh)`. The profile has three steps after
# compilation.

# %%
with inside(mesh, "set_mesh"):
  pretrained, _ = train(
    model,
    optax.adam(settings.learning_rate),
    rows(tokenizer, stories, settings.batch_size, settings.maxlen, settings.num_epochs),
    "pretraining",
    profiler_options=ProfilerOptions(
      OUTPUT / "profile", skip_first_n_steps=5, profiler_steps=3
    ),
  )
  story_text = generate(model, tokenizer, settings, START)
print(story_text)


# %% quote notebooks/start: plot

# %%
plot("loss", pretraining=pretrained)

# %% [markdown]
# The trainer has sharded the matrices as declared; the heads of a query are split.

# %%
query = model.transformer_blocks[0].mha.query.kernel[...]
jax.debug.visualize_sharding(
  query.shape[:2], NamedSharding(mesh, P(*query.sharding.spec[:2]))
)

# %% [markdown]
# ## LoRA
# The adapted model shares the weights of the base, which stay the same. Only the
# adapters are trained. This part runs under `with mesh:`, the older form.

# %% quote minigpt: add_lora share_of_play

# %%
with inside(mesh, "with"):
  adapted = add_lora(model, settings)
  lora, _ = train(
    adapted,
    optax.adamw(settings.lora_learning_rate),
    rows(
      tokenizer,
      play,
      settings.lora_batch_size,
      settings.maxlen,
      settings.lora_num_epochs,
    ),
    "LoRA",
    max_steps=settings.lora_max_steps,
  )
  play_text = generate(adapted, tokenizer, settings, START)
  base_text = generate(model, tokenizer, settings, START)
for name, text in {"before": story_text, "LoRA": play_text, "base": base_text}.items():
  print(f"{name} ({share_of_play(text):.0%} words of the play)\n{text}\n")
plot("loss", LoRA=lora)

# %% [markdown]
# ## Profiles
# `tensorboard --logdir` with the plugin `xprof` shows the profile in this folder.

# %%
for file in sorted((OUTPUT / "profile").rglob("*.*")):
  print(f"{file.stat().st_size:10,} bytes  {''.join(file.suffixes)}")

# %% [markdown]
# The time of a step helps to choose the batch size and the mesh. On a TPU, larger
# batches use the devices better, up to a size from which the time grows with the batch.
# Simulated devices share one processor, so these figures only show how to measure.

# %%
STEPS = 8


def ms_per_text(mesh, batch_size):
  with inside(mesh, "set_mesh"):
    _, seconds = train(
      MiniGPT(settings, tokenizer.vocab_size, rngs=nnx.Rngs(0)),
      optax.adam(settings.learning_rate),
      rows(tokenizer, stories, batch_size, settings.maxlen, None),
      max_steps=STEPS,
    )
  return 1000 * np.median(seconds[len(seconds) // 2 :]) / batch_size


small, large = settings.batch_size, 2 * settings.batch_size
for width, batch_size in ((2, small), (2, large), (1, small)):
  each = new_mesh(model_axis=width)
  took = ms_per_text(each, batch_size)
  print(f"{dict(each.shape)!s:26} batch {batch_size:4}: {took:6.2f} ms a text")

# %% [markdown]
# ## Code that no longer works
# Older tutorials have lines that fail today, or that silently do nothing. The cells
# above use the right form; the cell below shows the errors.
#
# - `jax.make_mesh(shape, names)` makes Explicit axes. Pass
#   `axis_types=(AxisType.Auto, ...)` if XLA shall choose the shardings.
# - qwix matches whole paths: `.*mha` matches no matrix of the attention, `.*mha.*`
#   matches all four.
# - Two devices do not divide GPT-2's vocabulary of 50257: round up to a multiple of 64.
# - `jax.jit` of a step that changes a module discards the changes. `nnx.jit` keeps
#   them, and a trainer compiles its step itself.
# - nnx refuses modules in a plain list; use `nnx.List`.
# - The kernels of `MultiHeadAttention` have three dimensions, so their specs need three
#   entries.
# - `144 * jax.device_count() / 2` is a float and no batch size; use `//`.
# - If padding is a target, a model learns to pad; use a mask.


# %%
def attempt(what, do):
  try:
    print(f"{what}: {do()}")
  except Exception as error:
    print(f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}")


def adapters(pattern):
  provider = qwix.LoraProvider(module_path=pattern, rank=4, alpha=2.0)
  with inside(mesh, "set_mesh"):
    made = qwix.apply_lora_to_model(
      model, provider, rngs=nnx.Rngs(1), **model.get_model_input()
    )
  return len(jax.tree.leaves(nnx.state(made, nnx.LoRAParam)))


class Counter(nnx.Module):
  def __init__(self):
    self.steps = nnx.Param(jnp.zeros(()))


def step(counter):
  counter.steps[...] += 1


def counted(compiler):
  counter = Counter()
  compiler(step)(counter)
  return f"{counter.steps[...]:g} of 1 step"


class Plain(nnx.Module):
  def __init__(self):
    self.blocks = [nnx.Linear(2, 2, rngs=nnx.Rngs(0))]


halves = NamedSharding(
  jax.make_mesh((2,), ("model",), devices=jax.devices()[:2]), P("model")
)
attempt(
  "make_mesh", lambda: jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]).axis_types
)
attempt(".*mha", lambda: f"{adapters('.*mha')} adapter matrices")
attempt(".*mha.*", lambda: f"{adapters('.*mha.*')} adapter matrices")
attempt("50257 in two", lambda: jax.device_put(np.zeros(50257), halves))
attempt("jax.jit", lambda: counted(jax.jit))
attempt("nnx.jit", lambda: counted(nnx.jit))
attempt("a plain list", Plain)
