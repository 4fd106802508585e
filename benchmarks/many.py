"""An engine over many short requests: does it grow or slow down?

  python -m benchmarks.many --requests 10000 --block 1000

The model is tiny, so that most of the time is the host's. Prompts have 4 to 32 tokens
and completions 1 to 24, sampled and streamed; one request of sixteen is cancelled and
one of eight has two samples. Prints a JSON line after each block of requests, and the
figures of the last block over those of the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from typing import Any

import numpy as np

from benchmarks.groups import Ids
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig

VOCAB = 256


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--requests", type=int, default=10_000)
  parser.add_argument("--block", type=int, default=1000, help="requests of a line")
  parser.add_argument("--slots", type=int, default=16)
  parser.add_argument("--flight", type=int, default=64, help="open requests")
  return parser.parse_args()


def tiny_engine(slots: int) -> Engine:
  sizes: Any = {"num_layers": 2, "embed_dim": 64, "hidden_dim": 128, "head_dim": 16}
  config = ModelConfig(vocab_size=VOCAB, num_heads=4, num_kv_heads=2, **sizes)
  model = AutoModel.from_config(config, seed=0, dtype="float32")
  return Engine(model, Ids(), EngineConfig(slots=slots, max_tokens=64))


def random_request(rng: np.random.Generator, number: int) -> EngineRequest:
  return EngineRequest(
    prompt=rng.integers(0, VOCAB, rng.integers(4, 33)).astype(np.int32),
    max_tokens=int(rng.integers(1, 25)),
    num_samples=2 if number % 8 == 0 else 1,
    temperature=1.0,
    seed=number,
    stop_ids=(),
  )


def run_block(engine: Engine, rng: Any, numbers: range, flight: int) -> None:
  """Completes requests, at most `flight` of them at a time, and reads every delta."""
  for start in range(numbers.start, numbers.stop, flight):
    tickets = []
    for number in range(start, min(start + flight, numbers.stop)):
      tickets.append(engine.submit(random_request(rng, number)))
      if number % 16 == 1:
        engine.cancel(tickets[-1])
    while engine.step():
      pass
    for ticket in tickets:
      engine.collect(ticket, timeout=0)


def resident_mb() -> float:
  """Returns the memory of this process that is in RAM, in MB."""
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
  args = arguments()
  engine, rng = tiny_engine(args.slots), np.random.default_rng(0)
  run_block(engine, rng, range(args.block), args.flight)  # compiles, fills the cache
  rows = []
  for start in range(0, args.requests, args.block):
    before, cpu, wall = engine.stats(), time.process_time(), time.perf_counter()
    end = min(start + args.block, args.requests)
    run_block(engine, rng, range(start, end), args.flight)
    tokens = engine.stats().generated_tokens - before.generated_tokens
    spent = time.process_time() - cpu, time.perf_counter() - wall
    gc.collect()
    row = {
      "cpu_us_per_token": round(spent[0] / tokens * 1e6, 1),
      "wall_us_per_token": round(spent[1] / tokens * 1e6, 1),
      "resident_mb": round(resident_mb(), 1),
      "descriptors": len(os.listdir("/proc/self/fd")),
      "python_objects": len(gc.get_objects()),
    }
    engine.audit()
    rows.append(row)
    print(json.dumps({"requests": end, "tokens": tokens, **row}), flush=True)
  ratios = {name: round(rows[-1][name] / rows[0][name], 3) for name in rows[0]}
  print(json.dumps({"last_over_first": ratios}))


if __name__ == "__main__":
  main()
