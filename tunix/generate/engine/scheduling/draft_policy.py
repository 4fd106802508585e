"""Speculative decoding: chooses the fastest of three sources of a launch's drafts."""

from __future__ import annotations

import math
from typing import Literal

# "none": no drafts. "lookup": device/prompt_lookup.py. "model": a draft model.
Source = Literal["none", "lookup", "model"]

# Number of drawn tokens after which an older observation has 1/e of its weight.
_MEMORY_TOKENS = 256
# Smallest speed-up at which drafts are used. It is above 1 because the speeds with and
# without drafts are estimates.
_MARGIN = 1.05
# Assumed time of a round with drafts, as a multiple of the time of a round without. It
# is used until both times were measured.
_FIRST_COST = 1.5
# Some sources can be measured only in launches that use them. If such a source is not
# in use, it is tried in `_TRIED_FOR` of every `_TRIED_EVERY` launches.
_TRIED_EVERY, _TRIED_FOR = 64, 2
# Launches before the first trial of a draft model. They measure rounds without drafts.
_BEFORE_TRIAL = 3


class DraftPolicy:
  """The choice of a source by two estimates: tokens of a round, and its time.

  In a launch without drafts, the device compares the first draft that prompt lookup
  would have proposed with the token that was drawn. The policy thus knows how often
  these drafts would be accepted, without trying them. The drafts of a model cost passes
  of that model, so they are tried in 2 of 64 launches while another source is in use.
  While a model is in use, launches without drafts are tried in the same way.

  Args:
    draft_tokens: number of drafts of a round that uses them.
    measures: if True, the policy uses the measured times of rounds; if False, an
      assumed cost. Several processes must assume it, because all must decide alike.
    size_ratio: parameters of the draft model over those of the model; None: there is no
      draft model.
    always_model: the draft model is always used. An `MTPLayer` is: a launch without it
      does not keep the hidden states that it needs afterwards.
  """

  def __init__(
    self,
    draft_tokens: int,
    measures: bool,
    size_ratio: float | None = None,
    *,
    always_model: bool = False,
  ):
    self._drafts, self._measures = draft_tokens, measures
    self._always_model = always_model
    self._first_costs = {"lookup": _FIRST_COST}
    if size_ratio is not None:
      self._first_costs["model"] = _FIRST_COST + draft_tokens * size_ratio
    self._only: Source | None = None
    self.reset()

  @property
  def sources(self) -> tuple[Source, ...]:
    """All sources that a launch can use."""
    if not self._drafts:
      return ("none",)
    if self._always_model:
      return ("model",)
    has_model = "model" in self._first_costs
    return ("none", "lookup", "model") if has_model else ("none", "lookup")

  def reset(self) -> None:
    """Forgets the results of all launches."""
    # Tokens of a completion in a round with drafts, by source. A draft model has no
    # entry before it was tried.
    self._gains: dict[str, float] = {"lookup": 1.0}
    self._seconds: dict[str, float] = {}
    self._seen: set[tuple[str, int]] = set()
    self._last: Source = "none"
    self._trial = 0  # launches that are left in the current trial
    self._tried: Source = "model"
    self._since = _TRIED_EVERY - _BEFORE_TRIAL  # launches after the last trial

  def use_only(self, source: Source | None) -> None:
    """Makes `choose` return one source; None: the fastest again."""
    self._only = source

  def choose(self) -> Source:
    """Returns the source of the drafts of the next launch."""
    if self._always_model:
      return "model"
    if self._only is not None:
      return self._only
    best = self._best()
    if "model" not in self.sources:
      return best
    if not self._trial and self._since >= _TRIED_EVERY:
      self._tried = "none" if best == "model" else "model"
      self._trial, self._since = _TRIED_FOR, 0
    return self._tried if self._trial else best

  def record(
    self, source: Source, turns: int, drawn: int, hits: int, seen: int
  ) -> None:
    """Records the results of a launch.

    Args:
      source: the source of the launch's drafts.
      turns: number of rounds, summed over the completions in them.
      drawn: number of tokens that these rounds drew.
      hits: without drafts: number of drawn tokens that prompt lookup predicted.
      seen: without drafts: number of drawn tokens that were compared with a prediction.
    """
    if not self._drafts or not turns:
      return
    if self._trial:
      self._trial -= source == self._tried
    else:
      self._since += 1
    if source != "none":
      self._learn(source, drawn / turns, drawn)
    elif seen:  # a draft is accepted only if all drafts before it are right
      share = hits / seen
      gain = sum(share**i for i in range(self._drafts + 1))
      self._learn("lookup", gain, drawn)

  def record_time(self, source: Source, width: int, seconds: float) -> None:
    """Records the time of a round.

    The first time of each program includes its compilation. The first launch with a
    draft model after launches without it also computes the keys that the draft model
    lacks. Both times are ignored.

    Args:
      source: the source of the round's drafts.
      width: tokens of a row.
      seconds: time of one round.
    """
    key, switched = (source, width), source != self._last
    self._last = source
    if not self._measures or key not in self._seen or switched:
      self._seen.add(key)
      return
    mean = self._seconds.get(source, seconds)
    self._seconds[source] = 0.7 * mean + 0.3 * seconds

  def _learn(self, source: Source, gain: float, drawn: int) -> None:
    weight = 1 - math.exp(-drawn / _MEMORY_TOKENS)
    mean = self._gains.get(source, gain)
    self._gains[source] = mean + weight * (gain - mean)

  def _best(self) -> Source:
    """Returns the source with the most tokens in the time of a round without drafts."""
    best, most = "none", _MARGIN
    for source in self.sources[1:]:
      speed = self._gains.get(source, 1.0) / self._cost(source)
      if speed > most:
        best, most = source, speed
    return best

  def _cost(self, source: Source) -> float:
    if source not in self._seconds or "none" not in self._seconds:
      return self._first_costs[source]
    return self._seconds[source] / self._seconds["none"]
