"""Pairs for DPO by a rule: of a model's own replies, a better and a worse one.

    python examples/real_model/pairs.py MODEL --out pairs

The model writes four replies to each ticket of examples/real_model/tickets.py. The rule
gives a point for the customer's first name, one for the order, one for the product, and
one for at most 40 words. The best and the worst reply become a pair if their points
differ. `rule` is also a reward function, which measures the model before and after.
"""

import argparse
import json
import pathlib
import random

import tickets

from tunix.data import chat
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel

SYSTEM = (
  "You answer customers of a shop in one or two sentences. Use the customer's name and "
  "name the order and the product."
)


def prompts(count: int, seed: int) -> list[dict]:
  """Returns records of different tickets: prompt, and the column `fields`."""
  rng, made = random.Random(seed), {}
  while len(made) < count:
    text, fields = tickets.ticket(rng)
    made[text] = fields
  system = {"role": "system", "content": SYSTEM}
  return [
    {"prompt": [system, {"role": "user", "content": text}], "fields": fields}
    for text, fields in made.items()
  ]


def rule(prompts, completions, fields):
  """Returns the share of the four points that each reply has."""
  del prompts
  return [points(c, f) / 4 for c, f in zip(completions, fields, strict=True)]


def points(reply: str, fields: dict[str, str]) -> int:
  """Returns the points of a reply, 0 to 4."""
  text = reply.lower()
  named = [fields["name"].split()[0], fields["order"], fields["product"]]
  is_short = 0 < len(text.split()) <= 40
  return sum(name.lower() in text for name in named) + is_short


def pairs(model: str, records: list[dict], samples: int, tokens: int) -> list[dict]:
  """Returns the pairs of best and worst replies."""
  tokenizer = TokenizerAdapter.from_pretrained(model)
  sampler = Sampler(AutoModel.from_pretrained(model, dtype="float32"), tokenizer)
  found = []
  for start in range(0, len(records), 16):
    part = records[start : start + 16]
    texts = [chat.prompt_text(r["prompt"], tokenizer, where="a ticket") for r in part]
    out = sampler(texts, tokens, temperature=1.0, seed=start, num_samples=samples)
    for i, record in enumerate(part):
      replies = out.text[i * samples : (i + 1) * samples]
      ranked = sorted(replies, key=lambda reply: points(reply, record["fields"]))
      chosen, rejected = ranked[-1], ranked[0]
      if points(chosen, record["fields"]) > points(rejected, record["fields"]):
        pair = {"chosen": chosen, "rejected": rejected}
        found.append({"prompt": record["prompt"], **pair})
    print(f"{len(found)} pairs of {start + len(part)} tickets", flush=True)
  return found


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("model")
  parser.add_argument("--out", type=pathlib.Path, default="pairs")
  parser.add_argument("--tickets", type=int, default=192)
  parser.add_argument("--held_out", type=int, default=48)
  parser.add_argument("--samples", type=int, default=4)
  parser.add_argument("--tokens", type=int, default=64)
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  records = prompts(args.tickets + args.held_out, seed=1)
  train = pairs(args.model, records[: args.tickets], args.samples, args.tokens)
  for name, part in (("train", train), ("held_out", records[args.tickets :])):
    lines = "".join(json.dumps(record) + "\n" for record in part)
    (args.out / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
  main()
