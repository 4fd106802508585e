"""The pages of all groups of layers, and the pages that each completion holds.

Each group of layers (layer_groups.py) has its own pool, because groups need different
numbers of pages. A completion has a list of pages for each group. Entry i is the page
of place i, whose first token is i * `page_tokens`. In a group with a window, a page is
released when no later query can see its tokens. Its entry is then 0.

A group without a window takes the pages of a prompt when its completion is admitted.
The other groups take pages before each launch, for the tokens that the launch runs.
Their pools are large enough for these pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling import layer_groups
from tunix.generate.engine.scheduling.layer_groups import Windows
from tunix.generate.engine.scheduling.pages import TRASH, PagePool
from tunix.generate.engine.scheduling.sequence import Sequence


class _Group(NamedTuple):
  """A pool, and the window of its layers."""

  window: int | None
  pool: PagePool


class PageGroups:
  """Gives pages of every group to completions, and takes them back.

  Args:
    config: sizes of the engine.
    windows: the windows of the groups, see `layer_groups.windows_of`.
  """

  def __init__(self, config: EngineConfig, windows: Windows):
    self._config, self._size = config, config.page_tokens

    def make(window):
      return PagePool(layer_groups.pages_of(config, window))

    self._groups = [_Group(window, make(window)) for window in windows]
    # Recorded routes of the pages with a digest, for completions that share them.
    self._routes: dict[bytes, np.ndarray] = {}

  @property
  def pools(self) -> list[PagePool]:
    """The pool of each group."""
    return [group.pool for group in self._groups]

  def admit(self, s: Sequence, shares: bool) -> bool:
    """Gives a completion the pages of its tokens, shared ones first.

    Args:
      s: the completion. It holds no pages.
      shares: if True, the completion shares the pages of its longest cached prefix,
        which are found by `s.digests`.

    Returns:
      False if there are too few pages; the completion then holds none.
    """
    # The last token is always computed: the next one is drawn from its logits.
    most = (s.length - 1) // self._size if shares else 0
    digests = s.digests[1 : most + 1]
    hit = self._hit(digests)
    fresh = self._config.pages_of(s.length) - hit
    hits = []
    for window, pool in self._groups:
      pages = pool.find(digests[self._first(hit * self._size, window) : hit])
      spare = pool.available - sum(map(pool.is_idle, pages))
      if window is None and fresh > spare:
        return False
      hits.append(pages)
    for (window, pool), pages in zip(self._groups, hits):
      pool.hold(pages)
      passed = [TRASH] * (hit - len(pages))
      own = pool.take(fresh) if window is None else []
      s.pages.append([*passed, *pages, *own])
    s.computed = hit * self._size
    if s.routes is not None:
      # If all layers have a window, the routes of the first pages may be forgotten.
      none = np.zeros_like(s.routes[: self._size])
      for place, digest in enumerate(digests[:hit]):
        s.record(place * self._size, self._routes.get(digest, none))
    return True

  def _hit(self, digests: list[bytes]) -> int:
    """Returns the number of pages of the longest prefix that can be shared.

    Each group must have all pages before the next token, or, if it has a window, the
    pages that the window covers.
    """
    end, is_stable = len(digests), False
    while not is_stable:
      is_stable = True
      for window, pool in self._groups:
        first = self._first(end * self._size, window)
        hit_end = first + len(pool.find(digests[first:end]))
        if hit_end < end:  # every longer prefix needs the page that is missing here
          end, is_stable = hit_end, False
    return end

  def release(self, s: Sequence) -> None:
    """Releases the pages that no query at token `s.computed` or later can see."""
    for (window, pool), pages in zip(self._groups, s.pages):
      end = start = min(self._first(s.computed, window), len(pages))
      while start and pages[start - 1] != TRASH:
        start -= 1
      pool.drop(pages[start:end])
      pages[start:end] = [TRASH] * (end - start)

  def most_blocks(self, sequences: Iterable[Sequence], tokens: int) -> int | None:
    """Returns the number of prompt blocks that a launch can run; None: no limit.

    Every block fills a page of each group. The pages that running completions can need
    for tokens of the same launch are reserved for them.

    Args:
      sequences: the running completions.
      tokens: largest number of tokens that each completion draws.
    """
    lacking = [self._lacking(s, tokens) for s in sequences]
    pools = [(n, g.pool) for n, g in enumerate(self._groups) if g.window is not None]
    spare = [pool.available - sum(each[n] for each in lacking) for n, pool in pools]
    return min(spare, default=None)

  def _lacking(self, s: Sequence, tokens: int) -> list[int]:
    """Returns the number of pages that a completion may lack in each group.

    Args:
      s: the completion.
      tokens: largest number of tokens that it draws.
    """
    pages_of = self._config.pages_of
    if not s.is_decoding:
      return [pages_of(tokens)] * len(self._groups)
    most = pages_of(min(s.length + tokens, s.limit))
    return [max(0, most - len(pages)) for pages in s.pages]

  def grow(self, s: Sequence, tokens: int) -> bool:
    """Gives a completion the pages that it lacks for its first `tokens` tokens.

    Returns:
      False if there are too few pages; the completion then keeps what it has.
    """
    most = self._config.pages_of(tokens)
    lacking = [max(0, most - len(pages)) for pages in s.pages]
    if any(n > pool.available for n, pool in zip(lacking, self.pools)):
      return False
    for count, pool, pages in zip(lacking, self.pools, s.pages):
      pages += pool.take(count)
    return True

  def fork(self, leader: Sequence, follower: Sequence) -> tuple[int, ...] | None:
    """Shares the full pages of a leader's prompt with a follower.

    Returns:
      The leader's partly filled page of each group, which must be copied to the
      follower's last page; () if the prompt fills all its pages. None if there are too
      few pages.
    """
    full, rest = divmod(leader.length, self._size)
    if rest and not all(pool.available for pool in self.pools):
      return None
    for pool, pages in zip(self.pools, leader.pages):
      shared = pages[:full]
      pool.hold(_held(shared))
      follower.pages.append([*shared, *pool.take(1 if rest else 0)])
    return leader.pages_at(full) if rest else ()

  def name(self, s: Sequence, places: Iterable[int]) -> None:
    """Gives the full pages of a completion at the given places their digests."""
    for place in places:
      digest = s.digests[place + 1]
      pairs = zip(self.pools, s.pages_at(place))
      # A follower lacks the pages that its leader released.
      named = [pool.name(page, digest) for pool, page in pairs if page != TRASH]
      if s.routes is not None and (all(named) or digest not in self._routes):
        self._keep(digest, s.routes[place * self._size :][: self._size])

  def _keep(self, digest: bytes, routes: np.ndarray) -> None:
    """Keeps the routes of a page.

    If there are more than two routes for each page, the routes of digests that no pool
    has are forgotten.
    """
    self._routes[digest] = routes.copy()
    if len(self._routes) > 2 * sum(pool.size for pool in self.pools):

      def is_known(digest):
        return any(pool.find([digest]) for pool in self.pools)

      self._routes = {d: r for d, r in self._routes.items() if is_known(d)}

  def drop(self, s: Sequence) -> None:
    """Releases all pages of a completion."""
    for pool, pages in zip(self.pools, s.pages):
      pool.drop(_held(pages))
    s.pages = []

  def forget_all(self) -> None:
    """Forgets all prefixes; pages that are held stay held."""
    for pool in self.pools:
      pool.forget_all()
    self._routes.clear()

  def audit(self, sequences: Iterable[Sequence]) -> None:
    """Checks that no page is lost; raises AssertionError."""
    holders = [s.pages for s in sequences if s.pages]
    for number, pool in enumerate(self.pools):
      pool.audit(_held(pages[number]) for pages in holders)

  def _first(self, position: int, window: int | None) -> int:
    """Returns the first place that a query at a position sees."""
    return 0 if window is None else max(0, position - window + 1) // self._size


def _held(pages: list[int]) -> list[int]:
  return [page for page in pages if page != TRASH]
