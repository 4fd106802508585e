"""A draft model against none: the engine on text whose next token a rule gives.

  python -m benchmarks.drafting --passes 5

The model is that of benchmarks/ragged.py: 58 million parameters, float32, and its most
likely token after v is v + 1. The draft model has 8.6 million parameters and proposes
v + 1 for a given share of all tokens v, and another token after the others. Each line
is one share and one number of completions. Both jobs run in turn in one process; a
ratio is CPU or wall seconds without the draft model over those with it.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import ragged
from benchmarks.adapter import complete
from benchmarks.groups import Ids
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.run.draft_model import size_ratio
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig

# (completions at the same time, share of tokens after which the draft model is right)
CASES = ((8, 1.0), (8, 0.9), (8, 0.7), (8, 0.0), (1, 0.9), (1, 0.0))


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--passes", type=int, default=5)
  parser.add_argument("--drafts", type=int, default=4, help="drafts of a round")
  parser.add_argument("--tokens", type=int, default=128, help="of a completion")
  parser.add_argument("--layers", type=int, default=8, help="of the model")
  parser.add_argument("--vocab", type=int, default=32000)
  parser.add_argument("--cases", type=int, nargs="*", help="numbers; default: all")
  return parser.parse_args()


def draft_model(vocab: int, share: float) -> Any:
  """Returns a model that counts on after a share of all tokens."""
  sizes: Any = {"num_layers": 2, "vocab_size": vocab, "embed_dim": 128}
  sizes |= {"hidden_dim": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
  config = ModelConfig(**sizes, tie_embeddings=False)
  model = AutoModel.from_config(config, seed=1, dtype="float32")
  for kernel in (model.layers.attn.o_proj.kernel, model.layers.mlp.down_proj.kernel):
    kernel[...] = jnp.zeros_like(kernel[...])  # so that a layer returns its input
  is_right = np.random.default_rng(0).random(vocab) < share
  following = np.where(is_right, np.arange(vocab) + 1, np.arange(vocab) + 2) % vocab
  head = np.zeros((128, vocab), np.float32)
  # Tokens that two others point to get the sum; each of both still prefers it.
  np.add.at(head.T, following, np.asarray(model.embed_tokens.embedding[...]))
  model.lm_head.kernel[...] = jnp.asarray(head)
  return model


def case(args: argparse.Namespace, slots: int, share: float) -> dict[str, Any]:
  model, draft = ragged.counting_model(args), draft_model(args.vocab, share)
  config = EngineConfig(slots=slots, max_tokens=512, draft_tokens=args.drafts)
  drafting = Engine(model, Ids(), config, draft_model=draft)
  plain = ragged.engine_of(model, slots, 512)
  prompts = partial(ragged.random_prompts, args, [64] * slots)
  job = lambda engine, number: complete(engine, prompts(number), [args.tokens] * slots)
  jobs = {"draft model": partial(job, drafting), "none": partial(job, plain)}
  figures = ragged.compare(jobs, args.passes, args.tokens * slots)
  stats = drafting.stats()
  counts = stats.model_draft_tokens, stats.model_accepted_tokens
  rounds = stats.rounds, plain.stats().rounds
  head = {
    "completions": slots,
    "right": share,
    "size": round(size_ratio(draft, model), 3),
  }
  return {**head, "proposed_accepted": counts, "rounds": rounds, **figures}


def main() -> None:
  args = arguments()
  for number in range(len(CASES)) if args.cases is None else args.cases:
    row = {**case(args, *CASES[number]), "load": round(os.getloadavg()[0], 2)}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main()
