"""`tunix parity`: compares log-probabilities of decoding with those of scoring.

A model should give a token the same log-probability when it generates the token with a
KV cache and when it scores the finished text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunix.cli.commands.parts import pictures
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.make import model_folders
from tunix.generate import parity
from tunix.generate.engine_sampler import EngineSampler
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import checks, terminal

# The largest difference of a token in nats, by the dtype of the computation. It is 2e-6
# in float32 and 0.016 in bfloat16 on tiny models; larger models round more often.
THRESHOLDS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
_LONGEST = 24  # tokens of a random prompt


class _NoText:
  """A tokenizer for prompts of random ids, whose output is not read as text."""

  def encode(self, text: str) -> list[int]:
    raise ValueError(f"{text!r} is text; give it with --prompt")

  def decode(self, ids: Sequence[int]) -> str:
    del ids
    return ""

  def bos_id(self) -> None:
    return None

  eos_id = pad_id = bos_id


def main(argv: Sequence[str]) -> int:
  """Runs `tunix parity`; returns 1 if a token differs by more than the threshold.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range.
  """
  args = parser().parse_args(argv)
  checks.number("--prompts", args.prompts, checks.COUNT, whole=True)
  checks.number("--tokens", args.tokens, checks.COUNT, whole=True)
  model_folders.check("MODEL", args.model)
  if args.image and not args.prompt:
    raise ValueError("--image is given without --prompt; add the text of the question")
  model = model_folders.load_model(
    args.model,
    args.adapter,
    args.dtype,
    images=True if args.image else None,
    batch_invariant=args.batch_invariant or None,
  )
  options = {}
  if args.prompt:
    prompts, tokenizer = args.prompt, TokenizerAdapter.from_pretrained(args.model)
    if args.image:
      prompts, options["images"] = pictures.prompts_with_images(
        args.model, args.image, prompts, tokenizer
      )
  else:
    prompts = _random_prompts(args.prompts, model.config.vocab_size, args.seed)
    tokenizer = TokenizerAdapter(_NoText())
  dtype = np.dtype(model.config.dtype).name
  # Of a batch-invariant model, the engine has the bits of scoring, not the sampler.
  sampler = EngineSampler if args.batch_invariant else Sampler
  threshold = 0.0 if args.batch_invariant else THRESHOLDS[dtype]
  report = parity.measure(
    sampler(model, tokenizer),
    prompts,
    tokens=args.tokens,
    seed=args.seed,
    threshold=threshold if args.threshold is None else args.threshold,
    **options,
  )
  print(f"{terminal.counted(len(prompts), 'prompt')}, computed in {dtype}")
  print(report)
  print("passed" if report.passed else "FAILED")
  return 0 if report.passed else 1


def _random_prompts(count: int, vocab: int, seed: int) -> list[np.ndarray]:
  """Returns prompts of 1 to _LONGEST random ids."""
  rng = np.random.default_rng(seed)
  sizes = rng.integers(1, _LONGEST + 1, count)
  return [rng.integers(0, vocab, size, dtype=np.int32) for size in sizes]


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser(
    "tunix parity",
    "compares log-probabilities of decoding with those of scoring; the exit code is 1 "
    "if they differ",
  )
  add = made.add_argument
  add("model", metavar="MODEL", help="Hugging Face folder or GGUF file")
  add("--adapter", metavar="FOLDER", help="PEFT folder")
  add("--prompt", metavar="TEXT", nargs="+", help="prompts; default: random tokens")
  add(
    "--image",
    metavar="FILE",
    action="append",
    help="image before the text of each prompt, which the chat template then renders",
  )
  add("--prompts", type=int, default=16, metavar="N", help="number of random prompts")
  add("--tokens", type=int, default=32, metavar="N", help="tokens of a completion")
  add("--seed", type=int, default=0, help="seed of prompts and samples")
  add("--dtype", choices=tuple(THRESHOLDS), help="dtype of the computation")
  add(
    "--threshold",
    type=float,
    metavar="NATS",
    help="largest difference of a token; default: "
    + ", ".join(f"{value:g} in {name}" for name, value in THRESHOLDS.items())
    + "; 0 with --batch_invariant",
  )
  add(
    "--batch_invariant",
    action="store_true",
    help="load the model as batch-invariant and compare the engine with scoring: one "
    "different bit of a sampled token fails",
  )
  return made
