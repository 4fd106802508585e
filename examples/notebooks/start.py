# The first cells of sharding.py; make.py inserts them at `# %% include start`.

# %% [markdown]
# With `TINY` everything runs in a minute on a CPU, with a fresh small model. Set it to
# `False` for a real model on a TPU or a GPU, for example eight free TPU cores of Kaggle
# or a GPU of Colab, with the extra of that machine.

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

# Weights and batches are split over all devices. With one device nothing is split.
jax.set_mesh(create_mesh({"fsdp": jax.device_count()}))
OUTPUT = pathlib.Path(tempfile.mkdtemp())
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# The task is addition, with the answer in brackets: `[16]`. Every eighth sum is held
# out.

# %%
TERMS = range(10) if TINY else range(100)


def question(a, b):
  """Returns the prompt of a sum: plain text, or a chat turn."""
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
# The tokenizer, and functions that make, train and evaluate a model.


# %%
def folder(model):
  """Returns the folder of a model; a model of the hub is downloaded."""
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
  """Returns a model with about 100,000 random weights."""
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
  """Trains the model; returns the loss of every step."""
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
  """Loads a model (default: MODEL) with float32 weights and bfloat16 computation."""
  return AutoModel.from_pretrained(
    folder(model or MODEL), dtype="bfloat16", param_dtype="float32"
  )


def base_model(steps):
  """Returns MODEL, or with TINY a small model that is trained for `steps` steps."""
  if not TINY:
    return load()
  model = small_model()
  fine_tune(model, optax.adam(2e-3), steps, label="base")
  return model


def answers(model, sums=HELD_OUT):
  """Returns greedy answers."""
  prompts = [question(*s) for s in sums]
  if not TINY:
    prompts = [tokenizer.apply_chat_template(p, tokenize=False) for p in prompts]
  out = Sampler(model, tokenizer)(prompts, 12 if TINY else 32, LENGTH)
  return [text.strip() for text in out.text]


def accuracy(model, answer=right):
  """Returns the share of held-out sums with the answer of `answer`."""
  pairs = zip(answers(model), HELD_OUT)
  return sum(text == answer(*s) for text, s in pairs) / len(HELD_OUT)


def plot(unit, **curves):
  """Plots training curves on one axis."""
  _, axes = plt.subplots(figsize=(5, 2.4), dpi=80)
  for name, values in curves.items():
    axes.plot(values, label=name.replace("_", " "))
  axes.set_xlabel("step")
  axes.set_ylabel(unit)
  axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  plt.show()
