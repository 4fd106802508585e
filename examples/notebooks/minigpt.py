# %% [markdown]
# # 10. A custom miniGPT
# Ten minutes to read. What you will learn:
#
# - to build a small language model in plain `flax.nnx`, with sharded matrices;
# - to train it by a step of your own, and by the trainer, with equal numbers;
# - to save and restore it, and to find errors in compiled code;
# - to change its style by adapters (LoRA, by qwix);
# - to compare the profiles of two meshes and two batch sizes.
#
# The notebook defines the model, the loss and the input function; tunix trains and
# samples the model. It needs no download. A machine with only a CPU simulates eight
# devices and takes some minutes. Most cells quote `examples/minigpt.py` and
# `examples/minigpt_text.py`, which do the same in a terminal.

# %% include install

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before the first array

# %%
import collections
import contextlib
import dataclasses
import io
import pathlib
import random
import re
import string
import tempfile
from typing import NamedTuple

import grain
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tunix.generate.sampler import CacheConfig, Sampler
from tunix.ops.reductions import weighted_sum
from tunix.perf.hlo_text import COLLECTIVES
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
# A grammar writes 600 kB of stories for children, and as much of a play about a king
# who misses something. For a text of yours, set `TEXT` to a file whose texts are
# separated by blank lines or by `<|endoftext|>`, such as a collection of tales or of
# poems.

# %%
TEXT = None  # the stories, for example "stories.txt"
STYLE = None  # what the adapters learn, for example "play.txt"

# %% quote minigpt_text: listed ANIMALS NAMES TRAITS COLOURS THINGS HOMES DAYS SKIES

# %% quote minigpt_text: FOODS TROUBLES MORALS story

# %% quote minigpt_text: KINGS LORDS REALMS THIEVES speech

# %% quote minigpt_text: texts read_texts

# %%
stories = read_texts(TEXT) if TEXT else texts(story, settings.text_bytes, seed=1)
play = read_texts(STYLE) if STYLE else texts(speech, settings.text_bytes, seed=1)
for lines in (stories, play):
  print(f"{len(lines):,} texts, {sum(map(len, lines)):,} characters\n\n{lines[0]}\n")

# %% [markdown]
# The helper of a story fits the place where the thing was lost: an owl helps at the
# tree, a frog at the pond. No sentence says so. A model that has learned it has learned
# more than the order of words.
#
# ## Tokens and batches
# The tokenizer has the words of both styles, because adapters do not change the
# vocabulary. Grain shuffles, repeats and batches. The position in the data is one
# number, which a checkpoint saves.

# %% quote minigpt_text: _PIECE Words

# %% quote minigpt: rows

# %%
tokenizer = Words(stories + play)
START = "Once upon a time"
batch = next(iter(rows(tokenizer, stories, 2, settings.maxlen, 1)))
print(f"{len(tokenizer.words)} words, padded to {tokenizer.vocab_size}")
{name: value.shape for name, value in batch.items()}

# %% [markdown]
# ## The model

# %% quote minigpt: split TransformerBlock MiniGPT


# %%
def new_model():
  with inside(mesh, "set_mesh"):
    return MiniGPT(settings, tokenizer.vocab_size, rngs=nnx.Rngs(0))


model = new_model()
count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
print(f"{count:,} weights")

# %% [markdown]
# ## A training step by hand
# A step computes the loss and its gradients (`nnx.value_and_grad`), updates the weights
# (`nnx.Optimizer` around an optax optimizer), and keeps metrics (`nnx.MultiMetric`,
# which averages until `reset`). `nnx.jit` compiles it and keeps the changes to the
# three objects. The batch is placed on the mesh: rows over the axis `batch`.


# %%
def token_losses(model, tokens):
  """Returns the cross-entropy of every next token, [B, T - 1], and the logits."""
  logits = model(tokens[:, :-1])
  return (
    optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]),
    logits,
  )


@nnx.jit
def step_by_hand(model, optimizer, metrics, tokens, mask):
  weights = mask[:, 1:]  # 0 where the target is padding

  def loss(model):
    nll, logits = token_losses(model, tokens)
    return jnp.sum(nll * weights) / jnp.sum(weights), (nll, logits)

  (value, (nll, logits)), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
  metrics.update(loss=nll, logits=logits, labels=tokens[:, 1:], mask=weights)
  optimizer.update(model, gradients)
  return value


def batches(steps):
  data = rows(tokenizer, stories, settings.batch_size, settings.maxlen, None)
  return [batch for _, batch in zip(range(steps), data)]


mine = new_model()
# Without dropout, so that the comparison below does not depend on random numbers.
mine.set_attributes(rate=0.0)
mine.train()
metrics = nnx.MultiMetric(
  loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
)
losses_by_hand = []
with inside(mesh, "set_mesh"):
  optimizer = nnx.Optimizer(mine, optax.adam(settings.learning_rate), wrt=nnx.Param)
  for batch in batches(10):
    placed = jax.device_put(batch, NamedSharding(mesh, P("batch")))
    tokens, mask = placed["input_tokens"], placed["input_mask"]
    losses_by_hand.append(float(step_by_hand(mine, optimizer, metrics, tokens, mask)))
print({name: f"{value:.3f}" for name, value in metrics.compute().items()})

# %% [markdown]
# The loss of the metrics is the mean over all ten batches. Next to it stands the share
# of tokens that the model gets right.
#
# ## The same by the trainer
# The trainer needs two functions, the model's input from a batch, and the loss. It
# compiles, shards, logs, saves and resumes by itself.

# %% quote minigpt: gen_model_input_fn loss_fn train

# %%
theirs = new_model()
theirs.set_attributes(rate=0.0)
with inside(mesh, "set_mesh"):
  losses, _ = train(theirs, optax.adam(settings.learning_rate), batches(10))
print("by hand", np.round(losses_by_hand, 4))
print("trainer", np.round(losses, 4))
np.testing.assert_allclose(losses_by_hand, losses, rtol=1e-3)

# %% [markdown]
# Both give the same numbers, so the trainer does nothing that you could not write. The
# step by hand leaves all weights whole on every device, and the trainer splits them as
# they declare; that changes where the work is done, and not its result.
#
# ## Pretraining
# Text before training:

# %% quote minigpt: generate

# %%
with inside(mesh, "set_mesh"):
  untrained_text = generate(model, tokenizer, settings, START)
print(untrained_text)

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
# The curve falls steeply while the model learns which words exist and which follow each
# other, and then slowly while it learns who helps where. It cannot reach 0: nobody can
# know the name of the next hero.
#
# The trainer has sharded the matrices as declared; the heads of a query are split.

# %%
query = model.transformer_blocks[0].mha.query.kernel[...]
jax.debug.visualize_sharding(
  query.shape[:2], NamedSharding(mesh, P(*query.sharding.spec[:2]))
)

# %% [markdown]
# ## Save and restore
# Orbax writes every shard where it is, and reads it into any sharding. The target of
# `restore` says what to read and where to put it: here a new model with other weights,
# replicated on all devices. (With `checkpointing_options`, the trainer saves model,
# optimizer and the position in the data, and a second run resumes.)

# %%
with ocp.StandardCheckpointer() as checkpointer:
  checkpointer.save(OUTPUT / "weights", nnx.state(model, nnx.Param))
with inside(mesh, "set_mesh"):
  restored = MiniGPT(settings, tokenizer.vocab_size, rngs=nnx.Rngs(7))
everywhere = NamedSharding(mesh, P())
target = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
  nnx.state(restored, nnx.Param),
)
with ocp.StandardCheckpointer() as checkpointer:
  nnx.update(restored, checkpointer.restore(OUTPUT / "weights", target))
for saved, loaded in zip(
  jax.tree.leaves(nnx.state(model, nnx.Param)),
  jax.tree.leaves(nnx.state(restored, nnx.Param)),
  strict=True,
):
  np.testing.assert_array_equal(saved, loaded)
size = sum(f.stat().st_size for f in (OUTPUT / "weights").rglob("*") if f.is_file())
print(f"equal weights, {size:,} bytes on disk")
print("sharding", restored.output_layer.kernel.sharding.spec, "instead of", end=" ")
print(model.output_layer.kernel.sharding.spec)

# %% [markdown]
# ## Debugging
# A compiled function runs without Python, so `print` shows tracers, and only once.
# These four tools show values. Each cell needs only a function and the batch.
#
# `jax.debug.print` prints from compiled code:

# %%
tokens = jnp.asarray(batch["input_tokens"][:2])
model.eval()
graph, state = nnx.split(model)
state = jax.device_put(state, jax.devices()[0])  # one device is enough to debug


@jax.jit
def watched(state, tokens):
  nll, _ = token_losses(nnx.merge(graph, state), tokens)
  print("while tracing:", nll)
  jax.debug.print("in the program: {} to {}", nll.min(), nll.max())
  return nll.mean()


loss = watched(state, tokens)
jax.effects_barrier()  # waits for the prints

# %% [markdown]
# `jax.disable_jit` runs every operation by itself. It is slow, but `print` shows
# values, and a traceback or `pdb` leads to the line of your code:

# %%
with jax.disable_jit():
  watched(state, tokens[:1, :9])

# %% [markdown]
# `jax.debug.breakpoint` stops compiled code. In a terminal you type the commands: `p`
# prints, `u` and `d` move in the stack, `c` continues. In this cell a text gives them:

# %%
commands = io.StringIO("p nll.shape\np nll.max()\nc\n")


@jax.jit
def stopped(state, tokens):
  nll, _ = token_losses(nnx.merge(graph, state), tokens)
  jax.debug.breakpoint(backend="cli", stdin=commands)
  return nll.mean()


loss = stopped(state, tokens)
jax.effects_barrier()

# %% [markdown]
# `jax_debug_nans` raises an error where a NaN arises, instead of training on with it.
# It runs each program again without compilation to find the operation, so it is for
# debugging only. Here the last bias is broken on purpose:

# %%
broken = jax.tree.map(lambda x: x, state)
bias = broken["output_layer"]["bias"]
bias[...] = jnp.full_like(bias[...], jnp.inf)  # inf - inf in the loss is a NaN
with jax.debug_nans(True):
  try:
    watched(broken, tokens).block_until_ready()
  except FloatingPointError as error:
    print(type(error).__name__, str(error).splitlines()[0])
jax.effects_barrier()

# %% [markdown]
# ## LoRA
# The adapted model shares the weights of the base, which stay the same. Only the
# adapters are trained. This part runs under `with mesh:`, the older form.

# %% quote minigpt: add_lora

# %% quote minigpt_text: words_in share_of_new

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
plot("loss", LoRA=lora)

# %% [markdown]
# All four texts begin with the same four words:

# %%
for name, text in {
  "untrained": untrained_text,
  "pretrained": story_text,
  "with adapters": play_text,
  "base, after the adapters were trained": base_text,
}.items():
  new = share_of_new(text, stories)
  print(f"--- {name} ({new:.0%} of its words are in no story)\n{text}\n")

# %% [markdown]
# The adapters turn a storyteller into a playwright: the words are those of the play,
# and so are the lines and the speakers. The base still tells stories, because its
# weights have not changed. Both texts show what is learned first: every sentence is
# right, and the helper fits the place, but the hero's name changes on the way. To copy
# a name over many words takes more training.
#
# ## Profiles
# `tensorboard --logdir` with the plugin `xprof` shows the profile in this folder.

# %%
for file in sorted((OUTPUT / "profile").rglob("*.*")):
  print(f"{file.stat().st_size:10,} bytes  {''.join(file.suffixes)}")

# %% [markdown]
# A profile helps to choose the batch size and the mesh. `read_profile` (from notebook
# 8) reads three numbers out of a trace of one step: its time, the time in collectives,
# and the time in other operations.

# %% quote tensor_parallel: StepProfile read_profile covered

# %%
STEPS = 8


def profiled(mesh, batch_size, folder):
  with inside(mesh, "set_mesh"):
    train(
      MiniGPT(settings, tokenizer.vocab_size, rngs=nnx.Rngs(0)),
      optax.adam(settings.learning_rate),
      rows(tokenizer, stories, batch_size, settings.maxlen, None),
      max_steps=STEPS,
      profiler_options=ProfilerOptions(folder, STEPS - 1, 1, python_tracer_level=0),
    )
  return read_profile(folder)


small, large = settings.batch_size, 2 * settings.batch_size
print(f"{'mesh':26} {'batch':>5} {'step':>9} {'collectives':>12} {'other':>9}  a text")
for width, batch_size in ((2, small), (2, large), (1, small)):
  each = new_mesh(model_axis=width)
  got = profiled(each, batch_size, OUTPUT / f"{width}_{batch_size}")
  print(
    f"{dict(each.shape)!s:26} {batch_size:5} {got.step:6.0f} ms "
    f"{got.communication:9.0f} ms {got.other:6.0f} ms  {got.step / batch_size:.2f} ms"
  )

# %% [markdown]
# Compare two rows at a time. From the first to the second row, the batch doubles: if
# the time for a text falls, the devices were not busy, and a larger batch pays. From
# the first to the third row, the mesh changes: without the axis `model`, a step has one
# sum of all gradients, and no sum of activations in every block. On a TPU or a GPU,
# prefer the mesh with less time in collectives, as long as its weights fit in the
# memory. Simulated devices share one processor, so these figures only show how to
# measure.

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

# %% [markdown]
# ## Try this
# - Set `TEXT` to a book that you like (plain text), and `num_epochs` to 10. How does
#   the text of the model change?
# - Ask for another beginning, such as `START = "Once upon a time there was a sleepy
#   pig"`.
# - Count how often the helper fits the place in 20 generated stories, with `seed` from
#   0 to 19 in `generate`.
# - Set `lora_rank=2`. Is the play still a play?
# - Put `jax.debug.print` into `TransformerBlock.__call__`. How often does it print?
