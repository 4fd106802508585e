"""The pages of the key-value cache, as the host counts them.

A page holds the keys and values of `page_tokens` consecutive tokens of one prefix, in
all layers. A full page has a digest: a hash of its tokens and of the digest before it,
so that equal digests mean equal prefixes (of one version of the weights and one
adapter, which the first digest names). Completions with a common prefix hold the same
pages, and a page that nobody holds is kept, with its digest, until its place is needed:
the page that was given up first goes first.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

TRASH = 0  # the page that takes writes of idle and padded rows; it is never read

Digest = bytes


def root_digest(version: int | str, adapter: int) -> Digest:
  """Returns the digest before the first page, of a version and an adapter's number."""
  return _hash(repr((version, adapter)).encode())


def extended(
  digests: list[Digest], tokens: Sequence[int] | np.ndarray, page_tokens: int
) -> None:
  """Appends the digests of pages that `tokens` fill and `digests` does not have yet.

  Args:
    digests: the root digest, and those of the first pages.
    tokens: all tokens of a row, from its first.
    page_tokens: tokens of a page.
  """
  for page in range(len(digests) - 1, len(tokens) // page_tokens):
    ids = np.asarray(tokens[page * page_tokens : (page + 1) * page_tokens], np.int32)
    digests.append(_hash(digests[-1] + ids.tobytes()))


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
    """Returns `count` pages with unknown contents, held once.

    Prefixes are forgotten if there are no other pages. The caller checks `available`.
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
    """Returns the pages of a prefix as far as they are kept; it does not hold them."""
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
    """Holds pages once more."""
    for page in pages:
      self._idle.pop(page, None)
      self._holders[page] += 1

  def drop(self, pages: Sequence[int]) -> None:
    """Gives up pages of a row, in the order of the row."""
    # The end of a prefix goes first, because nothing after a missing page is found.
    for page in reversed(pages):
      self._holders[page] -= 1
      assert self._holders[page] >= 0
      if self._holders[page] == 0:
        if page in self._digests:
          self._idle[page] = None
        else:
          self._free.append(page)

  def name(self, page: int, digest: Digest) -> bool:
    """Gives a full page its digest; the first page with a digest keeps it.

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
