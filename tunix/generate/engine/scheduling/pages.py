"""The pages of the key-value cache and the prefix cache, as records of the host.

A page holds the keys and values of `page_tokens` consecutive tokens of one prefix, in
all layers. A full page has a digest: a hash of its tokens, of the images that they
belong to, and of the digest of the page before it. Equal digests therefore mean equal
prefixes. The root digest, before the first page, is a hash of the version of the
weights and the adapter's number.

Completions with a common prefix hold the same pages. A full page without a holder keeps
its contents and digest until its memory is needed. Among these pages, the one that has
been without a holder for the longest time is reused first.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

TRASH = 0  # the page that takes writes of idle and padded rows; it is never read

Digest = bytes


def root_digest(version: int | str, adapter: int) -> Digest:
  """Returns the root digest for a version of the weights and an adapter's number."""
  return _hash(repr((version, adapter)).encode())


def extended(
  digests: list[Digest],
  tokens: Sequence[int] | np.ndarray,
  page_tokens: int,
  mark: Callable[[int, int], bytes] = lambda start, end: b"",
) -> None:
  """Appends the digests of full pages of `tokens` that `digests` lacks.

  Args:
    digests: the root digest, and the digests of the first pages.
    tokens: all tokens of a row, from the first one.
    page_tokens: tokens of a page.
    mark: returns what else the tokens from one index up to another one depend on.
  """
  for page in range(len(digests) - 1, len(tokens) // page_tokens):
    start, end = page * page_tokens, (page + 1) * page_tokens
    ids = np.asarray(tokens[start:end], np.int32)
    digests.append(_hash(digests[-1] + ids.tobytes() + mark(start, end)))


def _hash(data: bytes) -> Digest:
  # 128 bits: with 1e9 pages the chance of two equal digests is below 1e-20.
  return hashlib.blake2b(data, digest_size=16).digest()


class PagePool:
  """Counts who holds each page, and finds pages by digest.

  Args:
    pages: number of pages; they are numbered from 1.
  """

  def __init__(self, pages: int):
    self.size = pages
    self._free = collections.deque(range(1, pages + 1))
    self._holders = [0] * (pages + 1)
    self._digests: dict[int, Digest] = {}
    self._pages: dict[Digest, int] = {}
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

  @property
  def available(self) -> int:
    """Number of pages that nobody holds."""
    return len(self._free) + len(self._idle)

  @property
  def kept(self) -> int:
    """Number of pages that nobody holds and that keep a prefix."""
    return len(self._idle)

  def take(self, count: int) -> list[int]:
    """Returns `count` pages with one holder each; their contents are undefined.

    If too few pages are free, the prefixes that were released first are forgotten. The
    caller checks `available`.
    """
    assert count <= self.available
    out = []
    for _ in range(count):
      if self._free:
        page = self._free.popleft()
      else:
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
      self._holders[page] = 1
      out.append(page)
    return out

  def find(self, digests: Iterable[Digest]) -> list[int]:
    """Returns the pages of a prefix up to the first missing one; adds no holder."""
    out = []
    for digest in digests:
      page = self._pages.get(digest)
      if page is None:
        break
      out.append(page)
    return out

  def is_idle(self, page: int) -> bool:
    """Returns True if nobody holds the page."""
    return page in self._idle

  def hold(self, pages: Iterable[int]) -> None:
    """Adds a holder to each page."""
    for page in pages:
      self._idle.pop(page, None)
      self._holders[page] += 1

  def drop(self, pages: Sequence[int]) -> None:
    """Removes a holder from each page; `pages` has the order of the row."""
    # The last page is reused first, because `find` stops at the first missing page.
    for page in reversed(pages):
      self._holders[page] -= 1
      assert self._holders[page] >= 0
      if self._holders[page] == 0:
        if page in self._digests:
          self._idle[page] = None
        else:
          self._free.append(page)

  def name(self, page: int, digest: Digest) -> bool:
    """Gives a full page a digest, unless it has one or another page has this digest.

    Returns:
      True if the page got the digest.
    """
    assert page != TRASH
    is_new = digest not in self._pages and page not in self._digests
    if is_new:
      self._pages[digest], self._digests[page] = page, digest
    return is_new

  def forget_all(self) -> None:
    """Forgets all prefixes; pages that are held stay held."""
    for page in list(self._digests):
      self._forget(page)
    self._free.extend(self._idle)
    self._idle.clear()

  def _forget(self, page: int) -> None:
    del self._pages[self._digests.pop(page)]

  def audit(self, rows: Iterable[Sequence[int]]) -> None:
    """Checks that each page is free, idle, or held by exactly the given rows.

    Raises:
      AssertionError: a page is lost, or counted wrongly.
    """
    held = collections.Counter(page for row in rows for page in row)
    assert [held[page] for page in range(self.size + 1)] == self._holders
    parts = [*self._free, *self._idle, *held]
    assert sorted(parts) == list(range(1, self.size + 1)), "a page is lost"
