"""Groups of completions: the prompt computed once for all against once for each.

  python -m benchmarks.groups --prompt 512 --group 8 --new 1

Prints one JSON line: FLOPs of the two prefill programs (matrix products, counted in
what is compiled), and CPU seconds of whole calls, `repeats` of each in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.padded import decode, requests
from tunix.generate.sampler import Sampler
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig
from tunix.perf.hlo_flops import count_flops


class Ids:
  """Prompts are ids already, and nothing ends a row."""

  def encode(self, text: str) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: Any) -> str:
    return " ".join(map(str, ids))

  def bos_id(self) -> None: ...
  def eos_id(self) -> None: ...
  def pad_id(self) -> int:
    return 0


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--layers", type=int, default=4)
  parser.add_argument("--vocab", type=int, default=8000)
  parser.add_argument("--width", type=int, default=256)
  parser.add_argument("--prompts", type=int, default=1)
  parser.add_argument("--prompt", type=int, default=512, help="tokens")
  parser.add_argument("--group", type=int, default=8)
  parser.add_argument("--new", type=int, default=1, help="tokens")
  parser.add_argument("--repeats", type=int, default=3)
  return parser.parse_args()


def sampler_of(args: argparse.Namespace) -> Sampler:
  config = ModelConfig(
    num_layers=args.layers,
    vocab_size=args.vocab,
    embed_dim=args.width,
    hidden_dim=3 * args.width,
    num_heads=args.width // 64,
    num_kv_heads=max(1, args.width // 128),
    head_dim=64,
  )
  return Sampler(AutoModel.from_config(config), Ids())


def prefill_flops(sampler: Sampler, prompts: list[np.ndarray], options: dict) -> float:
  """Returns the FLOPs of the prefill, which gives the first token of every row."""
  request = requests.prepare(
    sampler.transformer,
    prompts,
    SamplingOptions(**options),
    eos_ids=(),
    cache_size=None,
  )
  return count_flops(
    decode.start.lower(*request.opened, request.start, request.rules, request.plan)
  ).flops


def main() -> None:
  args = arguments()
  sampler = sampler_of(args)
  rng = np.random.default_rng(0)
  prompts = list(rng.integers(0, args.vocab, (args.prompts, args.prompt)))
  each = [prompt for prompt in prompts for _ in range(args.group)]
  options = {"max_generation_steps": args.new, "temperature": 1.0, "seed": 0}
  jobs = {
    "shared": (prompts, {**options, "num_samples": args.group}),
    "apart": (each, options),
  }
  seconds: dict[str, list[float]] = {name: [] for name in jobs}
  tokens = {}
  for repeat in range(args.repeats + 1):
    for name, (rows, given) in jobs.items():
      begun = time.process_time()
      tokens[name] = sampler(rows, **given).tokens
      if repeat:  # the first compiles
        seconds[name].append(time.process_time() - begun)
  flops = {name: prefill_flops(sampler, *job) for name, job in jobs.items()}
  cpu = {name: statistics.median(x) for name, x in seconds.items()}
  pairs = list(zip(seconds["apart"], seconds["shared"]))
  found = {
    **vars(args),
    "prefill_flops": flops,
    "flops_ratio": round(flops["apart"] / flops["shared"], 2),
    "cpu_median_s": {name: round(x, 4) for name, x in cpu.items()},
    "cpu_ratios": [round(apart / shared, 2) for apart, shared in pairs],
    "rows_equal": sum(map(np.array_equal, tokens["shared"], tokens["apart"])),
  }
  print(json.dumps(found))


if __name__ == "__main__":
  main()
