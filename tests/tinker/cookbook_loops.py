"""Runs a loop of tinker-cookbook as it is, on data of this file.

python tests/tinker/cookbook_loops.py sl_loop|rl_loop|rubric MODEL URL LOG STEPS [LOSS]

It needs tinker-cookbook and nothing of tunix, so it runs in an environment of its own.
The loops load data sets and tokenizers from the network; here they get small ones. A
random model never solves a problem, so the reward of rl_loop is the share of letters in
the answer. The rubric recipe takes the first digit that the grader, the same model,
writes as its score.
"""

import asyncio
import importlib
import json
import pathlib
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


def run_rubric(options: dict, log: str, loss: str) -> None:
  from tinker_cookbook.recipes.rubric import train

  file = pathlib.Path(log, "rubric.jsonl")
  rubric = {"rubric_str": "Is it kind?", "extraction_regex": "([0-9])"}
  rubric["grader_output_format_instruction"] = "Give a digit."
  talk = [{"role": "user", "content": "A word about the sea?"}]
  file.write_text(8 * (json.dumps({"convo": talk, "rubric_items": [rubric]}) + "\n"))
  config = train.CLIConfig(
    renderer_name="role_colon",
    grader_renderer_name="role_colon",
    grader_llm_name=options["model_name"],
    train_jsonl_path=str(file),
    test_jsonl_path=str(file),
    groups_per_batch=1,  # the grader writes 2048 tokens for each completion
    train_group_size=2,
    max_tokens=8,
    eval_every=0,
    loss_fn=loss,
    behavior_if_log_dir_exists="resume",
    **options,
  )
  asyncio.run(train.cli_main(config))


def main(
  name: str,
  model: str,
  url: str,
  log: str,
  steps: str,
  loss: str = "importance_sampling",
) -> None:
  tokenizer_utils.register_tokenizer(model, tokenizer)
  options = {
    "base_url": url,
    "log_path": log,
    "model_name": model,
    "lora_rank": 4,
    "save_every": 2,
    "max_steps": int(steps),
    "learning_rate": 1e-2,
  }
  if name == "rubric":
    return run_rubric(options, log, loss)
  rows = {"sl_loop": conversations, "rl_loop": problems}[name]()
  datasets.load_dataset = lambda *_: datasets.DatasetDict(
    train=datasets.Dataset.from_list(rows)
  )
  recipe = importlib.import_module(f"tinker_cookbook.recipes.{name}")
  options["batch_size"] = 4
  if name == "rl_loop":
    recipe.get_reward = lambda answer, _: sum(map(str.isalpha, answer)) / 4
    options |= {
      "group_size": 16,
      "max_tokens": 4,
      "batch_size": 1,
      "learning_rate": 3e-2,
    }
    if "loss_fn" in recipe.Config.__annotations__:  # of 0.6; 0.5 has one loss
      options["loss_fn"] = loss
  recipe.main(recipe.Config(**options))


if __name__ == "__main__":
  main(*sys.argv[1:])
