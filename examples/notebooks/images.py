# %% [markdown]
# # 11. Images: a model that counts
# Ten minutes. What you will learn:
#
# - to write records with images;
# - to train a vision tower and a text model together, by one call;
# - to go on with GRPO, whose rewards see the same pictures;
# - to look at pictures beside their answers.

# %% include install

# %% [markdown]
# ## The task
# A picture has 1 to 6 circles, squares and crosses, and the question is "how many?".
# The class [`Shapes`](../../tunix/examples/shapes.py) draws the pictures and writes a
# fresh SmolVLM of 0.5 million weights with its tokenizer and its image processor. A
# model of the Hugging Face hub is used in the same way: give its id instead.

# %%
import tunix
from tunix.examples.shapes import PROMPT_LENGTH, Shapes, exact_match
from tunix.examples.sums import plot

task = Shapes()
task.lessons(1)[0]["messages"]

# %% [markdown]
# A record is a conversation. The image is a part of the user's turn: a path, a data URI
# or bytes. Only the answer is trained.

# %%
import matplotlib.pyplot as plt
from PIL import Image


def show(records, titles):
  _, axes = plt.subplots(1, len(records), figsize=(1.4 * len(records), 1.7), dpi=80)
  for axis, record, title in zip(axes, records, titles):
    axis.imshow(Image.open(record["prompt"][0]["content"][0]["image"]))
    axis.set_title(title, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
  plt.show()


pictures = task.questions(6, held_out=True)
show(pictures, [record["answer"] for record in pictures])

# %% [markdown]
# ## Fine-tuning
# `train_tower` trains the vision tower too. Without it the tower stays frozen, which
# suits a pretrained one. This run stops early, so that something is left to learn.

# %%
STEPS = 60
fresh = task.fresh_model()
tuned = tunix.sft(
  model={"path": fresh, "train_tower": True, "dtype": "float32"},
  data=task.lessons(32 * STEPS),
  output_dir=f"{fresh}-sft",
  max_length=PROMPT_LENGTH,
  global_batch_size=32,
  max_steps=STEPS,
  learning_rate=1e-3,
  logging={"progress_bar": False, "tensorboard": False},
)
before, after = task.accuracy(fresh), task.accuracy(tuned.export)
print(f"right answers to held-out pictures: {before:.0%} -> {after:.0%}")

# %%
plot("nats per token", loss=tuned.history["train/loss"])

# %% [markdown]
# ## GRPO
# The model answers each question eight times, and the reward is 1 for the right number.
# The pictures go through the sampler, the scoring and the update. A reward function may
# name the argument `images` to get them.

# %%
trained = tunix.grpo(
  model={"path": tuned.export, "train_tower": True, "dtype": "float32"},
  data=task.questions(32 * STEPS),
  rewards=exact_match,
  output_dir=f"{fresh}-grpo",
  algorithm={"num_generations": 8, "beta": 0.0},
  rollout={"max_prompt_length": PROMPT_LENGTH, "max_tokens_to_generate": 2},
  global_batch_size=32,
  max_steps=STEPS,
  learning_rate=3e-4,
  logging={"progress_bar": False, "tensorboard": False},
)
last = task.accuracy(trained.export)
print(f"right answers to held-out pictures: {after:.0%} -> {last:.0%}")

# %%
plot("reward", training=trained.history["train/rewards/score/mean"])

# %% [markdown]
# ## Look at the answers
# Six pictures, wrong answers first. The title is the answer, and the right number in
# brackets.

# %%
records = task.questions(100, held_out=True)
answers = task.answers(trained.export, records)
titles = [f"{text} ({x['answer']})" for x, text in zip(records, answers)]
wrong = [i for i, x in enumerate(records) if x["answer"] != answers[i]]
chosen = [*wrong, *range(6)][:6]
show([records[i] for i in chosen], [titles[i] for i in chosen])

# %% [markdown]
# ## Try this
# - Set `STEPS = 200`: fine-tuning alone then answers nearly all questions.
# - Leave `train_tower` out. What does a text model learn from a random tower?
# - Train adapters on all parts instead: `lora={"rank": 8, "targets": targets}` with
#   `targets = ["all-linear", "vision_tower", "multi_modal_projector"]`.
