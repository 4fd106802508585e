"""A judge as reward: a small model learns what another small model prefers.

    python examples/judge.py --output out

The judge is a generative reward model: it reads a question about an answer, and writes
"Verdict: yes" or "Verdict: no". It is trained here, by `tunix.sft` on such questions,
and served by `tunix serve`. The policy of examples/grpo.py then learns to please it.
The rubric in judge.json has one criterion: the answer has a nine.

With --url and --model another server is asked, such as that of a large model.
"""

import argparse
import contextlib
import json
import pathlib
import random
import subprocess
import sys

import tokenizers
from grpo import cluster, run

import tunix
from tunix import GRPOConfig, GRPOLearner, Rubric
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.rl.reward import verdicts

CRITERIA = pathlib.Path(__file__).with_suffix(".json")
INSTRUCTIONS = "{completion}\n{criterion}\n"
TEMPLATE = (
  "{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}"
  "{% if add_generation_prompt %}<|turn|>{% endif %}"
)


def conversations(count, seed):
  """Returns questions with the verdicts that the judge learns."""
  dice, rows = random.Random(seed), []
  criterion = json.loads(CRITERIA.read_text())[0]["criterion"]
  for _ in range(count):
    answer = "".join(dice.choices("0123456789999=", k=dice.randrange(4)))
    material = {"completion": answer, "criterion": criterion}
    question = verdicts.question(INSTRUCTIONS, material, verdicts.YES_NO)
    verdict = "Verdict: yes" if "9" in answer else "Verdict: no"
    turns = (("user", question), ("assistant", verdict))
    rows.append({"messages": [{"role": r, "content": text} for r, text in turns]})
  return rows


def tokenizer_of(rows):
  """Returns a tokenizer whose tokens are words and single digits."""
  rust = tokenizers.Tokenizer(tokenizers.models.BPE())
  digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
  cut = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  rust.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, cut])
  rust.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=512,
    special_tokens=["<|pad|>", "<|turn|>", "<|end|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  rust.train_from_iterator((m["content"] for r in rows for m in r["messages"]), trainer)
  return TokenizerAdapter(
    rust, chat_template=TEMPLATE, eos_token="<|end|>", pad_token="<|pad|>"
  )


def train_judge(folder, steps):
  """Trains the judge; returns the folder of the model. A finished run is kept."""
  rows = conversations(4096, seed=0)
  tokenizer = tokenizer_of(rows)
  config = ModelConfig(
    num_layers=2,
    vocab_size=tokenizer.vocab_size,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    max_position=256,
  )
  tunix.sft(
    model=AutoModel.from_config(config, seed=1),
    tokenizer=tokenizer,
    data={"train": rows, "max_length": 192},
    output_dir=folder,
    max_steps=steps,
    global_batch_size=16,
    learning_rate=2e-3,
  )
  return folder / "export"


@contextlib.contextmanager
def serving(folder):
  """Runs `tunix serve` on a free port; yields the address of its API."""
  command = [sys.executable, "-m", "tunix.cli.main", "serve", str(folder)]
  words = ["--port", "0", "--name", "judge", "--max_tokens", "256"]
  server = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
  try:
    ready = next(line for line in server.stdout if " at http" in line)
    yield f"{ready.split(' at ')[1].strip()}/v1"
  finally:
    server.terminate()
    server.wait()


def main():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--output", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--judge_steps", type=int, default=150)
  parser.add_argument(
    "--url", help="address of an API; none: trains and serves a judge"
  )
  parser.add_argument(
    "--model", default="judge", help="name of the judge at the server"
  )
  args = parser.parse_args()
  with contextlib.ExitStack() as stack:
    url = args.url
    if url is None:
      folder = train_judge(args.output / "judge", args.judge_steps)
      url = stack.enter_context(serving(folder))
    instructions = args.output / "instructions.txt"
    args.output.mkdir(parents=True, exist_ok=True)
    instructions.write_text(INSTRUCTIONS)
    judge = Rubric(
      str(CRITERIA),
      prompt=str(instructions),
      model=args.model,
      url=url,
      max_tokens=16,
      cache=str(args.output / "answers"),
    )
    algorithm = GRPOConfig(num_generations=8, beta=0.0, pass_threshold=1.0)
    learner = GRPOLearner(cluster(args.steps, args.output), algorithm, judge)
    run(learner, args.steps, args.output)


if __name__ == "__main__":
  main()
