"""Measures what 8-bit kernels change in a real model's samples.

    python -m benchmarks.rounded_weights FOLDER [FOLDER ...] [--tokens 64] [--dtype ...]

The model with rounded kernels (`quantization.for_sampling`, as `rollout.weights` and
`tunix serve --weights` make it) samples completions of 16 prompts at temperature 1. Of
each token it prints, over the whole vocabulary, the mean KL divergence of the rounded
distribution from that of the whole weights; the mean and the largest difference of the
token's log-probability; and the effective sample size of the truncated importance
weights, as a share of the tokens.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.generate.engine_sampler import sampler_of
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import calling, quantization
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel
from tunix.models.transformer.model import Transformer
from tunix.utils import tree

PROMPTS = (
  "The history of the steam engine begins",
  "A recipe for lentil soup:",
  "def fibonacci(n):",
  "Dear Sir or Madam,",
  "The three laws of motion are",
  "Once upon a time, in a small village,",
  "Q: What is 17 + 25?\nA:",
  "The capital of Norway is",
  "SELECT name FROM users WHERE",
  "To be or not to be,",
  "Breaking news: scientists",
  "My favorite animal is the",
  "In machine learning, overfitting means",
  "Roses are red,",
  "The chemical formula of water is",
  "Step 1: preheat the oven.",
)


@nnx.jit
def _logps(model: Transformer, tokens: jax.Array) -> jax.Array:
  logits = calling.adapt(model).full_logits(calling.Sequences(tokens))
  return jax.nn.log_softmax(logits.astype(jnp.float32))


def measure(folder: str, methods: list[str], tokens: int, dtype: str) -> None:
  """Prints a line for each method."""
  whole = AutoModel.from_pretrained(folder, dtype=dtype)
  tokenizer = TokenizerAdapter.from_pretrained(folder)
  for method in methods:
    rounded = quantization.for_sampling(whole, method)
    drawn = sampler_of(rounded, tokenizer)(
      list(PROMPTS), tokens, temperature=1.0, seed=0, return_logprobs=True
    )
    kl, difference, ratios = [], [], []
    for prompt, ids in zip(PROMPTS, drawn.tokens):
      before = np.asarray(tokenizer.encode(prompt))
      row = jnp.asarray(np.concatenate([before, ids]))[None]
      own, plain = (
        np.asarray(_logps(model, row))[0, len(before) - 1 : -1]
        for model in (rounded, whole)
      )
      kl += list((np.exp(own) * (own - plain)).sum(-1))
      places = np.arange(len(ids)), np.asarray(ids)
      difference += list(plain[places] - own[places])
    ratios = np.minimum(np.exp(difference), 2)
    size = ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)
    kernels = lora_modules.adaptable(rounded).values()
    held = sum(tree.size_bytes(nnx.state(x.kernel)) for x in kernels)
    plain_bytes = sum(x.dense().nbytes for x in lora_modules.adaptable(whole).values())
    print(
      f"{pathlib.Path(folder).name} {dtype} {method}: {len(kl)} tokens, "
      f"kernels {held / 2**20:.0f} of {plain_bytes / 2**20:.0f} MiB, "
      f"KL {np.mean(kl):.2e}, "
      f"log-prob off by {np.mean(np.abs(difference)):.3f} "
      f"(largest {np.max(np.abs(difference)):.2f}), "
      f"effective samples {size:.3f}",
      flush=True,
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folders", nargs="+")
  parser.add_argument("--methods", nargs="+", default=["int8", "fp8"])
  parser.add_argument("--tokens", type=int, default=64)
  parser.add_argument("--dtype", default="float32")
  given = parser.parse_args()
  for folder in given.folders:
    measure(folder, given.methods, given.tokens, given.dtype)


if __name__ == "__main__":
  main()
