"""Makes `generation.json` in two of the committed models beside this file: what
`transformers` generates with them, in float32.

Run where the `parity` extra is installed: `python tests/golden/make_generation.py`.

  greedy   prompts, and 24 tokens of each with their log-probabilities
  beams    ten cases: the arguments, and the best beams of every prompt, best first
"""

import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
MODELS = ("llama3p1", "qwen3")
VOCAB = 48
PENALTIES = (1.0, 0.0, 2.0, -1.0, 0.5)
EOS_COUNTS = (0, 1, 3, 12)


def prompts(rng: np.random.Generator, count: int, longest: int) -> list[list[int]]:
  return [
    rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)
  ]


def generate(model, rows: list[list[int]], **options):
  """`model.generate` on rows padded on the left; the new tokens as well."""
  width = max(map(len, rows))
  tokens, mask = np.zeros((2, len(rows), width), np.int64)
  for i, row in enumerate(rows):
    tokens[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
  with torch.no_grad():
    out = model.generate(
      torch.tensor(tokens),
      attention_mask=torch.tensor(mask),
      do_sample=False,
      pad_token_id=0,
      return_dict_in_generate=True,
      output_logits=True,
      **options,
    )
  return out, out.sequences[:, width:].numpy()


def greedy(model, rows: list[list[int]], steps: int):
  """Tokens and log-probabilities [B, steps], and how much the second best token's
  log-probability lies below the best's."""
  out, tokens = generate(
    model, rows, num_beams=1, max_new_tokens=steps, eos_token_id=None
  )
  logps = torch.log_softmax(torch.stack(out.logits, 1), -1)
  best = torch.topk(logps, 2, dim=-1).values.numpy()
  chosen = torch.gather(logps, 2, torch.tensor(tokens)[..., None])[..., 0].numpy()
  return tokens, chosen, best[..., 0] - best[..., 1]


def beam_case(number: int, vocab: int = VOCAB) -> dict:
  """Arguments of one search, drawn by its number."""
  rng = np.random.default_rng(number)
  beams = int(rng.integers(2, 6))
  return {
    "prompts": prompts(rng, int(rng.integers(1, 4)), 12),
    "beams": beams,
    "best": int(rng.integers(1, beams + 1)),
    "steps": int(rng.integers(4, 24)),
    "penalty": PENALTIES[number % len(PENALTIES)],
    "eos": rng.integers(0, vocab, EOS_COUNTS[number % len(EOS_COUNTS)]).tolist(),
  }


def search(model, case: dict) -> list[list[int]]:
  """The best beams' tokens, cut behind their end-of-sequence token."""
  _, tokens = generate(
    model,
    case["prompts"],
    num_beams=case["beams"],
    num_return_sequences=case["best"],
    max_new_tokens=case["steps"],
    length_penalty=case["penalty"],
    eos_token_id=case["eos"] or None,
  )
  ends = [
    next((i + 1 for i, token in enumerate(row) if token in case["eos"]), len(row))
    for row in tokens.tolist()
  ]
  return [row[:end] for row, end in zip(tokens.tolist(), ends)]


def main():
  for name in MODELS:
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / name).eval()
    model.generation_config.eos_token_id = None  # what is not asked for ends no row
    rows = prompts(np.random.default_rng(0), 12, 20)
    tokens, logps, _ = greedy(model, rows, 24)
    cases = [beam_case(number) for number in range(10)]
    found = {
      "greedy": {
        "prompts": rows,
        "tokens": tokens.tolist(),
        "logps": [[round(float(x), 6) for x in row] for row in logps],
      },
      "beams": [{**case, "found": search(model, case)} for case in cases],
    }
    (HERE / name / "generation.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
  main()
