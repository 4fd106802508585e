"""Pages of groups of layers: shared where all groups have them, given up in time."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests import toys
from tests.generate.engine.host_device import HostEngine
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.request import EngineRequest
from tunix.generate.engine.scheduling import layer_groups, pages as pages_lib
from tunix.generate.engine.scheduling.page_groups import PageGroups
from tunix.generate.engine.scheduling.sequence import Sequence

SIZES = EngineConfig(slots=2, max_tokens=64, page_tokens=4, rounds=3, prefill_tokens=8)


def sequence(tokens, limit=64):
  """A completion that has only what pages need."""
  out = object.__new__(Sequence)
  out.tokens, out.length, out.limit = np.arange(tokens), tokens, limit
  out.pages, out.computed, out.digests = [], 0, [pages_lib.root_digest(0, 0)]
  pages_lib.extended(out.digests, out.tokens, SIZES.page_tokens)
  return out


@settings(max_examples=300, deadline=None)
@given(
  st.sampled_from([(None,), (None, 8), (None, 9, 1), (8, 3)]),
  st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=3, max_size=3),
  st.integers(1, 40),
)
def test_a_prefix_is_shared_where_every_group_has_what_the_next_token_sees(
  windows, kept, tokens
):
  groups, size = PageGroups(SIZES, windows), SIZES.page_tokens
  owner = sequence(40)
  for pool, places in zip(groups.pools, kept):
    for place in range(9):
      [page] = pool.take(1)
      if places[place]:
        pool.name(page, owner.digests[place + 1])
      pool.drop([page])

  def is_shared(end):
    first = lambda w: 0 if w is None else max(0, end * size - w + 1) // size
    return all(all(k[first(w) : end]) for w, k in zip(windows, kept))

  wanted = max(e for e in range(min(9, (tokens - 1) // size) + 1) if is_shared(e))
  s = sequence(tokens)
  assert groups.admit(s, shares=True) and s.computed == wanted * size
  groups.audit([s])
  for window, pool, pages in zip(windows, groups.pools, s.pages):
    first = 0 if window is None else max(0, s.computed - window + 1) // size
    found = [pool.find([digest]) for digest in s.digests[1 : wanted + 1]]
    assert pages[:first] == [0] * first
    assert [[page] for page in pages[first:wanted]] == found[first:]
    assert len(pages) == (-(-tokens // size) if window is None else wanted)
  groups.drop(s)
  groups.audit([])


@pytest.fixture
def make(monkeypatch):
  def make(windows, **sizes):
    monkeypatch.setattr(layer_groups, "windows_of", lambda model, config: windows)
    return HostEngine(toys.model(num_layers=1), monkeypatch, **sizes)

  return make


def test_a_long_completion_holds_its_window(make):
  engine = make((None, 16), max_tokens=512, prefill_tokens=64, rounds=3)
  prompt = np.arange(1, 201) % 90
  request = EngineRequest(prompt=prompt, max_tokens=200, stop_ids=(), seed=1)
  [[row]] = engine.run([request])
  assert len(row.tokens) == 200
  # 400 tokens of 4 a page; 16 + 3 tokens that begin anywhere in a page.
  assert engine._device.most_held == [100, 6]
  stats = engine.stats()
  assert stats.pages_free == stats.pages_total
  # The prompt has more pages than the pool of the window, and is prefilled in parts.
  sizes = [pool.size for pool in engine._scheduler.pages.pools]
  assert sizes == [3 * 128, 2 * 3 * 6] and len(prompt) // 4 > sizes[1]


def test_a_hit_ends_where_a_window_was_lost(make):
  """A later prompt takes the pages of the window; those of the full layers remain."""
  engine = make((None, 8), slots=1, max_tokens=400, rounds=1, prefill_tokens=16)
  prompt = np.arange(1, 41)
  ask = lambda prompt: EngineRequest(prompt=prompt, max_tokens=2, stop_ids=(), seed=1)
  hits = []
  for one in (prompt, prompt, prompt + 40, prompt):
    before = engine.stats().prefix_hit_tokens
    engine.run([ask(one)])
    hits.append(engine.stats().prefix_hit_tokens - before)
  full, window = engine._scheduler.pages.pools
  assert (full.size, window.size) == (100, 3 + 4)
  # 40 tokens: 36 of them are found while the window is there.
  assert hits == [0, 36, 0, 0]
  assert full.kept == 20


def test_groups_are_forked_and_preempted_together(make):
  sizes = {"slots": 4, "max_tokens": 96, "rounds": 2, "cache_tokens": 128}
  requests = [
    EngineRequest(prompt=np.arange(n, n + 30), max_tokens=60, num_samples=2, seed=n,
                  stop_ids=())
    for n in (1, 2)
  ]  # fmt: skip
  alone = make((None,), **{**sizes, "cache_tokens": None}).run(requests)
  engine = make((None, 7), **sizes)
  for rows, wanted in zip(engine.run(requests), alone):
    for row, one in zip(rows, wanted):
      np.testing.assert_array_equal(row.tokens, one.tokens)
  stats = engine.stats()
  assert stats.preemptions and stats.prefix_hit_tokens
