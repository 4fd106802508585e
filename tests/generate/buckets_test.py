"""Programs are compiled for the shapes that `Sampler.buckets` lists, and no others."""

import collections
import itertools
import logging

import jax
import numpy as np
import pytest

from tests import toys
from tests.generate import toy_ids
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.generate.sizes.batching import Limits, Shape


class Compilations(logging.Handler):
  """Counts compiled programs by name."""

  def __init__(self):
    super().__init__()
    self.names = collections.Counter()

  def emit(self, record):
    words = record.getMessage().split()
    if words[0] == "Compiling":
      self.names[words[1].removeprefix("jit(").removesuffix(")")] += 1

  def __enter__(self):
    self.before = jax.config.jax_log_compiles
    jax.config.update("jax_log_compiles", True)
    logging.getLogger("jax").addHandler(self)
    return self.names

  def __exit__(self, *_):
    jax.config.update("jax_log_compiles", self.before)
    logging.getLogger("jax").removeHandler(self)


def compiled_and_listed(count, prompts, longest, steps, cache_size, draw):
  """Programs (prefill, token loop) compiled by random requests, and those listed."""
  model = toys.model(num_layers=1, embed_dim=8, hidden_dim=8, num_heads=2, head_dim=4)
  sampler = Sampler(model, toy_ids.Ids(), CacheConfig(cache_size))
  rng = np.random.default_rng(0)
  with Compilations() as names:
    for _ in range(count):
      rows = int(rng.integers(1, prompts + 1))
      most = int(rng.integers(1, longest + 1))
      given = [rng.integers(0, toys.VOCAB, n) for n in rng.integers(1, most + 1, rows)]
      room = cache_size - max(map(len, given))
      new = int(rng.integers(1, min(steps, room) + 1))
      sampler(
        given,
        rng.integers(1, new + 1, rows),
        eos_tokens=rng.integers(0, 96, rng.integers(0, 5)),
        **draw(rng),
      )
  listed = sampler.buckets(prompts, longest, steps)
  loops = {shape.decode for shape in listed}
  return (names["start"], names["advance"]), (len(listed), len(loops))


def greedy(rng):
  return {}


def drawn(rng):
  return {
    "temperature": float(rng.uniform(0.1, 3.0)),
    "top_k": int(rng.integers(1, 200)),
    "seed": int(rng.integers(0, 2**31)),
  }


def test_few_requests_compile_nothing_else():
  (starts, loops), (most_starts, most_loops) = compiled_and_listed(
    150, 2, 20, 16, 40, greedy
  )
  assert most_starts == most_loops == 4  # 1, 2 rows; 16, 32 tokens
  assert starts == most_starts and loops == most_loops


@pytest.mark.slow
def test_a_thousand_requests_compile_what_is_listed():
  compiled, listed = compiled_and_listed(1000, 6, 60, 30, 64, drawn)
  assert compiled == listed


def test_shapes_by_hand():
  shape = lambda limits, *request: Limits(**limits).shape(*request)
  found = shape({}, 3, 2, 20, 10, None)
  assert found == Shape(prompts=4, width=32, rows=8, slots=48, columns=16)
  assert found.decode == (8, 48, 16)
  found = shape({"cache_size": 40}, 3, 2, 20, 10, None)
  assert found == Shape(prompts=4, width=32, rows=8, slots=40, columns=16)
  found = shape({"cache_size": 40, "movable": False}, 1, 1, 20, 10, None)
  assert found == Shape(prompts=1, width=30, rows=1, slots=40, columns=16)
  found = shape({"shards": 6}, 5, 1, 7, 10, 9)
  assert found == Shape(prompts=12, width=9, rows=12, slots=25, columns=16)


def test_the_list_holds_every_shape():
  limits = Limits(cache_size=100)
  listed = limits.shapes(5, 3, 70, 40, None)
  sizes = itertools.product(range(1, 6), range(1, 4), range(1, 71), range(1, 41))
  seen = {
    limits.shape(prompts, samples, longest, steps, None)
    for prompts, samples, longest, steps in sizes
    if longest + steps <= 100
  }
  assert seen == set(listed) and listed == sorted(listed)
