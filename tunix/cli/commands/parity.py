"""`tunix parity`: whether a model says the same of its tokens when they are scored as
it said when it decoded them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.cli.build import loading
from tunix.cli.commands.arguments import Parser
from tunix.generate import parity
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.utils import checks

# Nats that no token may differ by, by the dtype of the computation. Ours is 2e-6 in
# float32 and 0.016 in bfloat16 on tiny models; larger ones round more often.
THRESHOLDS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
_LONGEST = 24  # tokens of a random prompt


class _NoText:
  """Stands for the tokenizer where prompts are ids and nobody reads the output."""

  def encode(self, text: str) -> list[int]:
    raise ValueError(f"{text!r} is text: give it with --prompt")

  def decode(self, ids: Any) -> str:
    del ids
    return ""

  def bos_id(self) -> None:
    return None

  eos_id = pad_id = bos_id


def main(argv: Sequence[str]) -> int:
  """Runs `tunix parity`; 1 if a token differs by more than the threshold.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range.
  """
  args = _parse(argv)
  for name in ("prompts", "tokens"):
    checks.number(f"--{name}", getattr(args, name), checks.COUNT, whole=True)
  loading.check_model_folder("MODEL", args.model)
  model = AutoModel.from_pretrained(args.model, dtype=args.dtype)
  if args.adapter is not None:
    model = lora.load_adapter(model, args.adapter)
  if args.prompt:
    prompts, tokenizer = args.prompt, TokenizerAdapter.from_pretrained(args.model)
  else:
    prompts = _random_prompts(args.prompts, model.config.vocab_size, args.seed)
    tokenizer = TokenizerAdapter(_NoText())
  dtype = np.dtype(model.config.dtype).name
  threshold = THRESHOLDS[dtype] if args.threshold is None else args.threshold
  report = parity.measure(
    Sampler(model, tokenizer),
    prompts,
    tokens=args.tokens,
    seed=args.seed,
    threshold=threshold,
  )
  print(f"{len(prompts)} prompts, computed in {dtype}")
  print(report)
  print("passed" if report.passed else "FAILED")
  return 0 if report.passed else 1


def _random_prompts(count: int, vocab: int, seed: int) -> list[np.ndarray]:
  """Ids of 1 to _LONGEST tokens."""
  rng = np.random.default_rng(seed)
  sizes = rng.integers(1, _LONGEST + 1, count)
  return [rng.integers(0, vocab, size, dtype=np.int32) for size in sizes]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = Parser(
    "tunix parity",
    "compares log-probs of decoding with scored ones; exit code 1 if they are apart",
  )
  parser.add_argument("model", metavar="MODEL", help="Hugging Face folder")
  parser.add_argument("--adapter", metavar="FOLDER", help="PEFT folder")
  parser.add_argument(
    "--prompt", metavar="TEXT", nargs="+", help="instead of random tokens"
  )
  parser.add_argument(
    "--prompts", type=int, default=16, metavar="N", help="random prompts"
  )
  parser.add_argument(
    "--tokens", type=int, default=32, metavar="N", help="to generate a prompt"
  )
  parser.add_argument("--seed", type=int, default=0, help="of prompts and samples")
  parser.add_argument("--dtype", choices=tuple(THRESHOLDS), help="of the computation")
  parser.add_argument(
    "--threshold",
    type=float,
    metavar="NATS",
    help="largest difference of a token; by default "
    + ", ".join(f"{value:g} in {name}" for name, value in THRESHOLDS.items()),
  )
  return parser.parse_args(argv)
