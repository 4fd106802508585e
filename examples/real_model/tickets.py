"""Support tickets with the fields that a program should read from them.

    python examples/real_model/tickets.py --out tickets

writes train.jsonl (400 records) and held_out.jsonl (100 other ones). A record has a
prompt (an instruction and a ticket) and a response (JSON with five fields).
`exact_fields` is a reward function: the share of fields that a completion has exactly.
"""

import argparse
import json
import pathlib
import random

INSTRUCTION = (
  "Answer with one JSON object with the keys name, order, product, problem (late, "
  "damaged, wrong, incomplete or charged) and wish (refund, exchange, repair or "
  "answer)."
)
NAMES = (
  *("Ana", "Bola", "Chen", "Dana", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun"),
  *(
    "Kofi",
    "Lena",
    "Mateo",
    "Nadia",
    "Olga",
    "Priya",
    "Rosa",
    "Samir",
    "Tara",
    "Yusuf",
  ),
)
FAMILIES = (
  *("Adler", "Bauer", "Costa", "Diaz", "Evans", "Fischer", "Garcia", "Haddad", "Ito"),
  *(
    "Jansen",
    "Kovac",
    "Larsen",
    "Moreau",
    "Novak",
    "Okafor",
    "Patel",
    "Rossi",
    "Silva",
  ),
)
PRODUCTS = (
  *("desk lamp", "kettle", "office chair", "backpack", "rain jacket", "headphones"),
  *(
    "coffee grinder",
    "phone case",
    "bike light",
    "yoga mat",
    "water bottle",
    "blender",
  ),
  *("running shoes", "wool blanket", "bookshelf", "keyboard", "tent", "toaster"),
)
PROBLEMS = {
  "late": ("should have been here {days} days ago", "has still not come"),
  "damaged": ("came with a crack", "stopped working after {days} days", "is broken"),
  "wrong": ("is not what I chose", "came in another color than I chose"),
  "incomplete": ("came without some of its parts", "has no manual and no screws"),
  "charged": ("was billed twice", "cost more on my card than in the shop"),
}
WISHES = {
  "refund": ("I want my money back.", "Please refund me."),
  "exchange": ("Please send me another one.", "Can you swap it?"),
  "repair": ("Can somebody fix it?", "Please repair it."),
  "answer": ("What happened?", "Please tell me what to do."),
}
LAYOUTS = (
  "{greeting} my {product} (order {order}) {problem}. {wish} {name}",
  "{greeting} I am {name}. The {product} of order {order} {problem}. {wish}",
  "Order {order}. {greeting} the {product} {problem}. {wish} Regards, {name}",
  "{name} here. {wish} My {product} {problem}; the order was {order}.",
)
GREETINGS = ("Hello,", "Hi team,", "Good morning,", "Dear shop,")


def ticket(rng: random.Random) -> tuple[str, dict[str, str]]:
  """Returns the text of a ticket and its fields."""
  fields = {
    "name": f"{rng.choice(NAMES)} {rng.choice(FAMILIES)}",
    "order": f"{rng.choice('ABCDEFGH')}{rng.randint(1000, 9999)}",
    "product": rng.choice(PRODUCTS),
    "problem": rng.choice(list(PROBLEMS)),
    "wish": rng.choice(list(WISHES)),
  }
  problem = rng.choice(PROBLEMS[fields["problem"]]).format(days=rng.randint(2, 9))
  wish, greeting = rng.choice(WISHES[fields["wish"]]), rng.choice(GREETINGS)
  parts = fields | {"problem": problem, "wish": wish, "greeting": greeting}
  return rng.choice(LAYOUTS).format(**parts), fields


def records(count: int, seed: int) -> list[dict]:
  """Returns records with different tickets."""
  rng, seen = random.Random(seed), {}
  while len(seen) < count:
    text, fields = ticket(rng)
    seen[text] = fields
  return [
    {
      "prompt": [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": text},
      ],
      "response": json.dumps(fields),
    }
    for text, fields in seen.items()
  ]


def exact_fields(prompts, completions, response):
  """Returns the share of the five fields that each completion has exactly."""
  del prompts
  return [share(c, json.loads(r)) for c, r in zip(completions, response, strict=True)]


def share(completion: str, right: dict[str, str]) -> float:
  """Returns the share of fields in the JSON object of a text; 0 without an object."""
  start, end = completion.find("{"), completion.rfind("}")
  try:
    found = json.loads(completion[start : end + 1])
  except json.JSONDecodeError:
    return 0.0
  if not isinstance(found, dict):
    return 0.0
  return sum(found.get(key) == value for key, value in right.items()) / len(right)


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--out", type=pathlib.Path, default="tickets")
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  made = records(500, args.seed)
  for name, part in (("train", made[:400]), ("held_out", made[400:])):
    lines = "".join(json.dumps(record) + "\n" for record in part)
    (args.out / f"{name}.jsonl").write_text(lines)
    print(f"{args.out / name}.jsonl: {len(part)} records")


if __name__ == "__main__":
  main()
