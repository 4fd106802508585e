"""Gradients of eight tenants in one program against one after the other; prints JSON.

  python -m benchmarks.tenants_together [--layers 2] [--rows 4] [--length 64]

`loop` is one program with a device loop over stacked adapters, `vmap` one program that
computes all adapters side by side. For each of them: CPU seconds over those of eight
calls in turn (median of interleaved pairs), whether the bytes of the gradients are
equal, and for `loop` the cost of a tenant that is alone in its program. The service
computes in turn; docs/guides/tinker.md says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig
from tunix.tinker.learning import data, learner as learner_lib
from tunix.tinker.learning.learner import AdapterSpec, Learner

TENANTS, VOCAB = 8, 4096
SPEC = AdapterSpec(rank=8)


class Together:
  """Eight adapters of one base with a micro-batch each."""

  def __init__(self, options: argparse.Namespace):
    config = ModelConfig(
      num_layers=options.layers,
      vocab_size=VOCAB,
      embed_dim=512,
      hidden_dim=1536,
      num_heads=8,
      num_kv_heads=4,
      head_dim=64,
      tie_embeddings=False,
    )
    base = AutoModel.from_config(config, seed=0, dtype="float32")
    learner = Learner(base, alpha=8.0, batch_tokens=options.rows * options.length)
    self.params = [learner.init(SPEC, seed).params for seed in range(TENANTS)]
    self._frozen = learner._parts(SPEC)[1:]
    key = learner_lib._Program(SPEC, "cross_entropy", (), True)
    self._plain = learner._program(key)
    # The frozen arrays are arguments, as in the service; captured ones are constants.
    self._loop = jax.jit(self._looped, donate_argnums=1)
    self._vmap = jax.jit(self._vmapped, donate_argnums=1)
    self.batches = [_batch(seed, options) for seed in range(TENANTS)]

  def in_turn(self, count: int = TENANTS) -> list[Any]:
    """Returns the gradients of `count` tenants, one call for each."""
    out = []
    for params, batch in zip(self.params[:count], self.batches):
      gradient, logps, values = self._plain(
        params, _zeros(params), *self._frozen, batch
      )
      out.append(gradient)
      _read(logps, values)
    return out

  def looped(self, count: int = TENANTS) -> list[Any]:
    """Returns them from one program, whose loop has `count` rounds."""
    return self._call(self._loop, count)[:count]

  def vmapped(self) -> list[Any]:
    """Returns them from one program that computes all at the same time."""
    return self._call(self._vmap, TENANTS)

  def _call(self, program: Any, count: int) -> list[Any]:
    sums = tuple(_zeros(x) for x in self.params)
    stacked = {k: np.stack([b[k] for b in self.batches]) for k in self.batches[0]}
    found, logps, values = program(
      tuple(self.params), sums, self._frozen, stacked, count
    )
    _read(logps, values)
    return list(found)

  def _looped(self, params, sums, frozen, batches, count):
    params, sums = _stack(params), _stack(sums)

    def body(i, carried):
      one = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False),
        (params, carried[0], batches),
      )
      new = self._plain.__wrapped__(*one[:2], *frozen, one[2])
      return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), carried, new
      )

    shape = batches["tokens"].shape
    start = sums, jnp.zeros(shape), jnp.zeros(shape)
    sums, *rest = jax.lax.fori_loop(0, count, body, start)
    return _unstack(sums), *rest

  def _vmapped(self, params, sums, frozen, batches, count):
    del count
    one = lambda p, s, b: self._plain.__wrapped__(p, s, *frozen, b)
    sums, *rest = jax.vmap(one)(_stack(params), _stack(sums), batches)
    return _unstack(sums), *rest


def _batch(seed: int, options: argparse.Namespace) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(options.rows):
    tokens = rng.integers(1, VOCAB, options.length + 1)
    made.append(data.Row(tokens=tokens[:-1], inputs={"target_tokens": tokens[1:]}))
  checked = data.check_rows(
    made, "cross_entropy", vocab_size=VOCAB, max_tokens=options.length
  )
  (batch,) = data.micro_batches(checked, options.rows * options.length)
  return batch.arrays


def _zeros(params: Any) -> Any:
  return jax.tree.map(jnp.zeros_like, params)


def _stack(trees: Any) -> Any:
  return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _unstack(stacked: Any) -> tuple[Any, ...]:
  leaves, structure = jax.tree.flatten(stacked)
  return tuple(structure.unflatten([x[i] for x in leaves]) for i in range(TENANTS))


def _read(*arrays: jax.Array) -> None:
  for x in arrays:
    np.asarray(x)


def _bytes(gradients: list[Any]) -> list[bytes]:
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(gradients)]


def cpu_seconds(function: Callable[[], list[Any]]) -> float:
  start = time.process_time()
  jax.block_until_ready(function())
  return time.process_time() - start


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (("layers", 2), ("rows", 4), ("length", 64), ("pairs", 10)):
    parser.add_argument(f"--{name}", type=int, default=default)
  options = parser.parse_args()
  together = Together(options)
  turn = _bytes(together.in_turn())
  figures: dict[str, Any] = {"job": "tenants_together", **vars(options)}
  figures["turn_s"] = cpu_seconds(together.in_turn)
  for name, one, other in (
    ("loop", together.in_turn, together.looped),
    ("vmap", together.in_turn, together.vmapped),
    ("alone", lambda: together.in_turn(1), lambda: together.looped(1)),
  ):
    is_equal = _bytes(other()) == turn[: len(turn) // TENANTS * len(one())]
    pairs = [(cpu_seconds(one), cpu_seconds(other)) for _ in range(options.pairs)]
    ratio = statistics.median(b / a for a, b in pairs)
    figures[name] = {"cpu_ratio": round(ratio, 3), "has_equal_bytes": is_equal}
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
