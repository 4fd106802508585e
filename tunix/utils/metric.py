"""Declarations of metrics: the name, the unit and the meaning of each logged number.

A module that computes metrics declares them in a tuple `METRICS`, next to the code.
docs/metrics.md has a table for each of these tuples.
"""

from __future__ import annotations

from typing import NamedTuple

# Value of `known_as` for a metric that has the same name in google-tunix.
SAME = "="


class Metric(NamedTuple):
  """One metric that a run logs.

  Attributes:
    name: the name without the prefix of a role; `<...>` stands for a part that varies.
    unit: the unit of the value; a "share" is between 0 and 1.
    meaning: a noun phrase.
    modes: the modes in which it is logged, "train", "eval" or "train, eval".
    condition: the condition under which it is logged; empty: always.
    known_as: its name in google-tunix, or SAME; empty: there is none.
  """

  name: str
  unit: str
  meaning: str
  modes: str = "train, eval"
  condition: str = ""
  known_as: str = ""
