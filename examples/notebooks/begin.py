# The first cells after the installation; make.py inserts them at `# %% include begin`.

# %% [markdown]
# The task is addition, with the answer in brackets: `[16]`. The class
# [`Sums`](../../tunix/examples/sums.py) makes the records, the
# tokenizer and the base model, and measures accuracy; a cell with `Sums??` shows its
# source. With `TINY` the base is a fresh model of 100,000 weights, and the notebook
# takes about a minute on a CPU. With `TINY = False` it is `MODEL` of the Hugging Face
# hub, which needs a GPU or a TPU.
#
# Models such as Qwen3 reason between `<think>` and `</think>` before they answer. Here
# they answer at once: `task.tokenizer` has a chat template with `enable_thinking`
# false. Training rows, prompts, rollouts and evaluations all use it. The small model's
# template has the same form as Qwen3's.

# %%
import jax

import tunix
from tunix.examples.sums import Sums, plot

TINY = True
MODEL = "Qwen/Qwen3-0.6B"  # an id of the Hugging Face hub, or a folder
task = Sums(tiny=TINY, model=MODEL)
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
print(f"{len(task.train)} sums to train on, {len(task.held_out)} held out, such as")
print(task.held_out[0])
