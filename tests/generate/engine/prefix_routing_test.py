"""Routing by prefix: the prefixes of members, and the choice of a member."""

import pytest

from tunix.generate.engine import prefix_routing
from tunix.generate.engine.prefix_routing import PrefixIndex


def chain(text, root=b""):
  return prefix_routing.chained(root, [c.encode() for c in text])


def test_digests_name_the_whole_prefix():
  assert chain("abc")[:2] == chain("abd")[:2]
  assert chain("abc")[2] != chain("abd")[2]
  assert chain("bc")[1] != chain("abc")[2]
  assert chain("a") != chain("a", root=b"other version")


def test_lengths_are_those_of_leading_digests():
  index = PrefixIndex(100)
  index.record(chain("abcd"), 0)
  index.record(chain("abx"), 2)
  assert index.lengths(chain("abcz"), range(3)) == {0: 3, 1: 0, 2: 2}
  assert index.lengths(chain("zbcd"), [0]) == {0: 0}
  assert index.lengths([], [0]) == {0: 0}
  index.forget(0)
  assert index.lengths(chain("abcd"), range(3)) == {0: 0, 1: 0, 2: 2}
  assert len(index) == 3


def test_the_size_is_bounded_and_ends_go_first():
  index = PrefixIndex(4)
  index.record(chain("abc"), 0)
  index.record(chain("xy"), 0)
  assert len(index) == 4
  assert index.lengths(chain("abc"), [0]) == {0: 2}
  assert index.lengths(chain("xy"), [0]) == {0: 2}


@pytest.mark.parametrize(
  ("lengths", "loads", "most", "chosen"),
  [
    ([0, 0, 0], [2, 1, 1], 3, 1),  # the least load; the first of equals
    ([0, 3, 1], [0, 2, 0], 3, 1),  # the longest prefix
    ([2, 2, 0], [1, 0, 0], 3, 1),  # the least load of equal prefixes
    ([0, 3, 1], [1, 4, 2], 3, 2),  # a full member is passed over
  ],
)
def test_choose(lengths, loads, most, chosen):
  assert (
    prefix_routing.choose(dict(enumerate(lengths)), dict(enumerate(loads)), most)
    == chosen
  )
