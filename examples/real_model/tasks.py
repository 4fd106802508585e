"""Finds tasks of reasoning-gym that a model can partly do, before an hour of GRPO.

    python examples/real_model/tasks.py --model MODEL \\
      'chain_sum(max_terms=2, max_digits=1)' gcd

prints for each call the share of completions that are right, and the share of prompts
with both right and wrong completions. Only these prompts teach GRPO something.

    python examples/real_model/tasks.py --write sums.jsonl 'chain_sum(max_terms=2)'

writes tasks with their answers, from which SFT learns the form of an answer. Their seed
is 2; the tasks above and those of grpo.yaml have 0 and 1.
"""

import argparse
import json
import pathlib

import numpy as np

from tunix.cli.make import data_sources
from tunix.data import chat
from tunix.data.records import PROMPT_ROWS
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.rl.env.adapters import reasoning_gym
from tunix.rl.env.env import Action


def scores(sampler, tokenizer, call, prompts, samples, tokens):
  """Returns the scores of completions, shape (prompts, samples), and the first ones."""
  source = call if call.endswith(")") else f"{call}()"
  source = source.replace("(", f"(size={prompts}, system=None, ")
  records = data_sources.open_records(f"reasoning_gym:{source}", PROMPT_ROWS)
  texts = [chat.prompt_text(r["prompt"], tokenizer, where=call) for r in records]
  out = sampler(texts, tokens, temperature=1.0, seed=0, num_samples=samples)
  envs = [reasoning_gym.TaskEnv(**r) for r in records for _ in range(samples)]
  answers = [Action(text=text) for text in out.text]
  rewards = [env.step(a).reward for env, a in zip(envs, answers, strict=True)]
  return np.array(rewards).reshape(prompts, samples), out.text[:samples]


def write(file, call, count):
  """Writes tasks with their answers as records of a prompt and a response."""
  name, _, settings = call.removesuffix(")").partition("(")
  source = f"reasoning_gym:{name}(size={count}, seed=2, system=None, {settings})"
  records = data_sources.open_records(source, PROMPT_ROWS)
  tasks = reasoning_gym.Tasks(**json.loads(records[0]["task"]))
  answers = [tasks.entry(i)["answer"] for i in range(count)]
  pairs = zip(records, answers, strict=True)
  rows = [{"prompt": row["prompt"], "response": answer} for row, answer in pairs]
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("calls", nargs="+")
  parser.add_argument("--model")
  parser.add_argument("--write", type=pathlib.Path, help="file for tasks and answers")
  parser.add_argument("--prompts", type=int, default=8)
  parser.add_argument("--samples", type=int, default=4)
  parser.add_argument("--tokens", type=int, default=16)
  args = parser.parse_args()
  if args.write is not None and len(args.calls) == 1:
    return write(args.write, args.calls[0], args.prompts)
  if args.write is not None or args.model is None:
    parser.error("give --model MODEL and tasks, or --write FILE and one task")
  tokenizer = TokenizerAdapter.from_pretrained(args.model)
  sampler = Sampler(AutoModel.from_pretrained(args.model, dtype="float32"), tokenizer)
  sizes = args.prompts, args.samples, args.tokens
  for call in args.calls:
    found, texts = scores(sampler, tokenizer, call, *sizes)
    is_right = found >= 1
    mixed = is_right.any(1) & ~is_right.all(1)
    print(f"{call}: right {is_right.mean():.2f}, mixed {mixed.mean():.2f}, {texts}")


if __name__ == "__main__":
  main()
