"""Pages: counted as a plain model counts them, whatever is done to them."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tunix.generate.engine.scheduling import pages as pages_lib
from tunix.generate.engine.scheduling.pages import PagePool

SIZE = 6  # pages of the pool in most tests


def digest(number):
  return bytes([number]) * 16


class Plain:
  """The same bookkeeping with lists: a page is free, idle (oldest first) or held."""

  def __init__(self, size):
    self.holders, self.names, self.idle = collections.Counter(), {}, []
    self.size = size

  @property
  def available(self):
    return self.size - sum(n > 0 for n in self.holders.values())

  def took(self, pages):
    free = self.size - sum(n > 0 for n in self.holders.values()) - len(self.idle)
    # Prefixes are forgotten only if there is no other page, the oldest first.
    evicted, self.idle = (
      self.idle[: max(0, len(pages) - free)],
      self.idle[max(0, len(pages) - free) :],
    )
    assert set(evicted) == set(pages) & set(self.names)
    for page in evicted:
      del self.names[page]
    for page in pages:
      assert not self.holders[page] and page not in self.idle
      self.holders[page] = 1

  def hold(self, pages):
    for page in pages:
      self.holders[page] += 1
      self.idle = [p for p in self.idle if p != page]

  def drop(self, pages):
    for page in reversed(pages):
      self.holders[page] -= 1
      if not self.holders[page] and page in self.names:
        self.idle.append(page)

  def name(self, page, name):
    if page not in self.names and name not in self.names.values():
      self.names[page] = name

  def find(self, names):
    of = {name: page for page, name in self.names.items()}
    out = []
    for name in names:
      if name not in of:
        break
      out.append(of[name])
    return out


operations = st.lists(
  st.tuples(
    st.sampled_from(["take", "share", "drop", "name", "find", "forget"]),
    st.integers(0, 9),
    st.integers(0, 9),
  ),
  max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_it_counts_as_a_plain_model_does(operations):
  pool, plain, rows = PagePool(SIZE), Plain(SIZE), []
  for kind, a, b in operations:
    row = rows[a % len(rows)] if rows else []
    if kind == "take":
      pages = pool.take(min(a % 4, pool.available))
      plain.took(pages)
      rows.append(pages)
    elif kind == "share":  # a prefix, idle pages included
      found = pool.find(map(digest, range(a, b + 1)))
      assert found == plain.find(map(digest, range(a, b + 1)))
      assert [pool.is_idle(p) for p in found] == [p in plain.idle for p in found]
      pool.hold(found)
      plain.hold(found)
      rows.append(found)
    elif kind == "drop" and rows:
      rows.remove(row)
      pool.drop(row)
      plain.drop(row)
    elif kind == "name" and row:
      page = row[b % len(row)]
      pool.name(page, digest(a))
      plain.name(page, digest(a))
    elif kind == "find":
      assert pool.find([digest(a)]) == plain.find([digest(a)])
    elif kind == "forget":
      pool.forget_all()
      plain.names, plain.idle = {}, []
    pool.audit(rows)
    assert (pool.available, pool.kept) == (plain.available, len(plain.idle))


def test_every_page_once_and_never_the_page_of_idle_rows():
  pool = PagePool(SIZE)
  assert sorted(pool.take(SIZE)) == list(range(1, SIZE + 1))
  assert pages_lib.TRASH == 0 and pool.available == 0
  with pytest.raises(AssertionError):
    pool.take(1)


def test_the_end_of_the_oldest_prefix_is_forgotten_first():
  pool = PagePool(5)
  old, new = pool.take(3), pool.take(2)
  for row, names in ((old, (1, 2, 3)), (new, (4, 5))):
    for page, name in zip(row, names):
      pool.name(page, digest(name))
  pool.drop(old)
  pool.drop(new)
  # Without the page of digest 3, the first two are still a prefix.
  assert pool.take(1) == [old[2]]
  assert pool.find(map(digest, (1, 2, 3))) == old[:2]
  # A prefix that is used again is the youngest.
  pool.hold(old[:2])
  pool.drop(old[:2])
  assert pool.take(3) == [new[1], new[0], old[1]]
  assert pool.find([digest(1)]) == old[:1]


def test_pages_without_a_prefix_are_used_before_kept_ones():
  pool = PagePool(3)
  pages = pool.take(3)
  pool.name(pages[0], digest(1))
  pool.drop(pages)
  assert (pool.available, pool.kept) == (3, 1)
  assert set(pool.take(2)) == set(pages[1:])
  assert pool.find([digest(1)]) == pages[:1]


def test_pages_that_are_held_while_all_is_forgotten_are_not_found_later():
  pool = PagePool(2)
  held = pool.take(1)
  pool.name(held[0], digest(1))
  pool.forget_all()
  pool.audit([held])
  assert pool.find([digest(1)]) == []
  pool.drop(held)
  assert (pool.available, pool.kept) == (2, 0)


@pytest.mark.parametrize("rows", [[], [[1]], [[1, 2], [2]], [[1, 2, 3]], [[0, 1, 2]]])
def test_an_audit_finds_what_is_wrong(rows):
  pool = PagePool(4)
  pool.take(2)
  pool.audit([[1], [2]])
  with pytest.raises(AssertionError):
    pool.audit(rows)


def chain(tokens, size, version=0, adapter=0):
  digests = [pages_lib.root_digest(version, adapter)]
  pages_lib.extended(digests, tokens, size)
  return digests


tokens = st.lists(st.integers(0, 3), max_size=12)


@given(tokens, tokens, st.integers(1, 4))
def test_digests_are_equal_where_prefixes_are(a, b, size):
  one, other = chain(a, size), chain(b, size)
  assert len(one) == 1 + len(a) // size
  for page in range(min(len(one), len(other))):
    same = a[: page * size] == b[: page * size]
    assert (one[page] == other[page]) == same
  # In parts, as a completion grows, and whatever holds the tokens.
  parts = chain(np.array(a[: len(a) // 2], np.int32), size)
  pages_lib.extended(parts, np.array(a, np.int64), size)
  assert parts == one


def test_digests_name_the_weights_and_the_adapter():
  row = list(range(8))
  kinds = [(0, 0), (1, 0), (0, 1), (11, 1), (1, 11)]
  firsts = [chain(row, 4, *kind) for kind in kinds]
  for page in range(3):
    assert len({digests[page] for digests in firsts}) == len(kinds)
  assert chain(row, 4) == chain(row, 4)
