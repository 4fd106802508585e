# What the notebooks begin with; make.py puts it where they say `# %% include start`.

# %% [markdown]
# `TINY` runs everything in a minute on a CPU, with a model made on the spot. Set it to
# `False` for a real model on a TPU or a GPU: eight free TPU cores of Kaggle, say, or a
# GPU of Colab. Nothing else changes.

# %%
TINY = True
MODEL = "Qwen/Qwen3-0.6B"  # an id of the Hugging Face hub, or a folder

# %%
import pathlib
import random
import tempfile

import jax
import matplotlib.pyplot as plt
import optax

from tunix.data import pipeline
from tunix.examples.quickstart.task import make_tokenizer
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.utils.mesh import create_mesh

# Every device has its part of the weights and of each batch. On one it changes nothing.
jax.set_mesh(create_mesh({"fsdp": jax.device_count()}))
OUTPUT = pathlib.Path(tempfile.mkdtemp())
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# The task is adding up, answered in brackets: `[16]`. Every eighth sum is held out.

# %%
TERMS = range(10) if TINY else range(100)


def question(a, b):
  """As the model is asked: a bare sum, or a turn of a chat."""
  if TINY:
    return f"{a}+{b}="
  text = f"What is {a} + {b}? Answer with the number in brackets, like [7]."
  return [{"role": "user", "content": text}]


SUMS = [(a, b) for a in TERMS for b in TERMS]
random.Random(0).shuffle(SUMS)
HELD_OUT, LEARNT = SUMS[::8][:64], [s for i, s in enumerate(SUMS) if i % 8]


def right(a, b):
  return f"[{a + b}]"


def records(sums, answer=right):
  return [{"prompt": question(*s), "response": answer(*s)} for s in sums]


# %% [markdown]
# A model, its tokenizer, and what is needed to train and to ask it.


# %%
def folder(model):
  """Where a model lies; one of the hub is fetched."""
  import huggingface_hub

  path = pathlib.Path(model)
  return (
    path if path.exists() else pathlib.Path(huggingface_hub.snapshot_download(model))
  )


tokenizer = (
  make_tokenizer() if TINY else TokenizerAdapter.from_pretrained(folder(MODEL))
)
ROWS, LENGTH = (32, 16) if TINY else (16, 128)


def small_model(seed=0, layers=2):
  """Fresh weights, a hundred thousand of them."""
  config = ModelConfig(
    num_layers=layers,
    vocab_size=tokenizer.vocab_size,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    tie_embeddings=True,
  )
  return AutoModel.from_config(config, seed=seed)


def fine_tune(model, optimizer, steps, answer=right, label="fine-tuning"):
  """Trains in place; returns the loss of every step."""
  data = pipeline.build_dataset(
    records(LEARNT, answer),
    tokenizer,
    batch_size=ROWS,
    max_length=LENGTH,
    num_epochs=None,
  )
  logger = MetricsLogger()
  config = TrainingConfig(max_steps=steps, pbar_description=label)
  trainer = PeftTrainer(model, optimizer, config, logger)
  trainer.train(data)
  trainer.close()
  return logger.get_metric_history("", "loss", Mode.TRAIN)


def load(model=None):
  """MODEL, or another: computed in bfloat16 from weights in float32."""
  return AutoModel.from_pretrained(
    folder(model or MODEL), dtype="bfloat16", param_dtype="float32"
  )


def base_model(steps):
  """What a notebook begins with: a small model that has learnt to answer in so many
  steps, or MODEL, which can answer as it is."""
  if not TINY:
    return load()
  model = small_model()
  fine_tune(model, optax.adam(2e-3), steps, label="base")
  return model


def answers(model, sums=HELD_OUT):
  """Greedy answers."""
  prompts = [question(*s) for s in sums]
  if not TINY:
    prompts = [tokenizer.apply_chat_template(p, tokenize=False) for p in prompts]
  out = Sampler(model, tokenizer)(prompts, 12 if TINY else 32, LENGTH)
  return [text.strip() for text in out.text]


def accuracy(model, answer=right):
  """The share of held-out sums that are answered as `answer` does."""
  pairs = zip(answers(model), HELD_OUT)
  return sum(text == answer(*s) for text, s in pairs) / len(HELD_OUT)


def plot(unit, **curves):
  """Curves of training, side by side on one axis."""
  _, axes = plt.subplots(figsize=(5, 2.4), dpi=80)
  for name, values in curves.items():
    axes.plot(values, label=name.replace("_", " "))
  axes.set_xlabel("step")
  axes.set_ylabel(unit)
  axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  plt.show()
