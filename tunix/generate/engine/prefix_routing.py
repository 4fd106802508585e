"""Routing by prefix: chooses the replica or host that received the longest prefix.

A member is a replica (replicas.py) or a server of the router (serve/http/hosts.py). The
index remembers which member received which prefix. It asks no engine: a member may
have evicted a prefix that the index still lists. The request is then prefilled again,
and its tokens are the same.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Mapping, Sequence

Digest = bytes


def chained(root: bytes, blocks: Iterable[bytes]) -> list[Digest]:
  """Returns one digest for each block: a hash of the block and of the digest before it.

  Equal digests therefore mean equal prefixes.

  Args:
    root: bytes that separate prefixes of different models or versions.
    blocks: blocks of a prefix, in order.
  """
  digests, last = [], root
  for block in blocks:
    last = hashlib.blake2b(last + block, digest_size=16).digest()
    digests.append(last)
  return digests


class PrefixIndex:
  """Finds the members that received a prefix.

  The digest that was used least recently is forgotten first.

  Args:
    size: largest number of digests.
  """

  def __init__(self, size: int):
    self._size = size
    self._members: collections.OrderedDict[Digest, int] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._members)

  def lengths(
    self, digests: Sequence[Digest], members: Iterable[int]
  ) -> dict[int, int]:
    """Returns the number of leading digests that each member received.

    Args:
      digests: digests of a prefix.
      members: numbers of the members.
    """
    out = dict.fromkeys(members, 0)
    open_members = set(out)
    for length, digest in enumerate(digests, 1):
      have = self._members.get(digest, 0)
      open_members = {m for m in open_members if have >> m & 1}
      if not open_members:
        break
      out.update(dict.fromkeys(open_members, length))
    return out

  def record(self, digests: Sequence[Digest], member: int) -> None:
    """Records that a member receives a prefix."""
    # The end of the prefix first, so that its beginning is forgotten last.
    for digest in reversed(digests):
      self._members[digest] = self._members.get(digest, 0) | 1 << member
      self._members.move_to_end(digest)
    while len(self._members) > self._size:
      self._members.popitem(last=False)

  def forget(self, member: int) -> None:
    """Forgets all prefixes of a member, for example because it restarted."""
    for digest, have in list(self._members.items()):
      if left := have & ~(1 << member):
        self._members[digest] = left
      else:
        del self._members[digest]


def choose(lengths: Mapping[int, int], loads: Mapping[int, int], most: int) -> int:
  """Returns the member with the longest prefix, and among equals the least load.

  Args:
    lengths: length of the known prefix of each member.
    loads: load of each member.
    most: largest load of a member that can be chosen. A member with more would make the
      request wait longer than a prefill on another one takes. At least the least load.
  """
  able = [m for m in loads if loads[m] <= most]
  return min(able, key=lambda m: (-lengths[m], loads[m], m))
