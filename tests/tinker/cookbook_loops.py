"""Runs a loop of tinker-cookbook as it is, on data of this file.

python tests/tinker/cookbook_loops.py sl_loop|rl_loop MODEL URL LOG STEPS

It needs tinker-cookbook and nothing of tunix, so it runs in an environment of its own.
The loops load data sets and tokenizers from the network; here they get small ones. A
random model never solves a problem, so the reward of rl_loop is the share of letters in
the answer.
"""

import importlib
import sys

import datasets
import tokenizers
import transformers
from tinker_cookbook import tokenizer_utils

WORDS = ("sea", "sky", "rain", "wind", "snow", "sun")


def tokenizer():
  """Each character is a token."""
  vocabulary = {chr(i): i for i in range(1, 256)} | {"<end>": 256, "<unk>": 257}
  made = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocabulary, merges=[], unk_token="<unk>")
  )
  made.decoder = tokenizers.decoders.Fuse()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token="<end>", eos_token="<end>", unk_token="<unk>"
  )


def conversations():
  talk = lambda word: [
    {"role": "user", "content": f"A word about the {word}?"},
    {"role": "assistant", "content": f"The {word} is wide."},
  ]
  return [{"messages": talk(WORDS[i % 6])} for i in range(24)]


def problems():
  return [
    {"question": f"What is {i} plus {i}?", "answer": f"#### {2 * i}"} for i in range(24)
  ]


def main(name: str, model: str, url: str, log: str, steps: str) -> None:
  rows = {"sl_loop": conversations, "rl_loop": problems}[name]()
  tokenizer_utils.register_tokenizer(model, tokenizer)
  datasets.load_dataset = lambda *_: datasets.DatasetDict(
    train=datasets.Dataset.from_list(rows)
  )
  recipe = importlib.import_module(f"tinker_cookbook.recipes.{name}")
  options = {"batch_size": 4, "learning_rate": 1e-2}
  if name == "rl_loop":
    recipe.get_reward = lambda answer, _: sum(map(str.isalpha, answer)) / 4
    options |= {
      "group_size": 16,
      "max_tokens": 4,
      "batch_size": 1,
      "learning_rate": 3e-2,
    }
    if "loss_fn" in recipe.Config.__annotations__:  # of 0.6; 0.5 has this loss only
      options["loss_fn"] = "importance_sampling"
  recipe.main(
    recipe.Config(
      base_url=url,
      log_path=log,
      model_name=model,
      lora_rank=4,
      save_every=2,
      max_steps=int(steps),
      **options,
    )
  )


if __name__ == "__main__":
  main(*sys.argv[1:])
