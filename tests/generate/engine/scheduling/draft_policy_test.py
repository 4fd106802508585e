"""The choice between sources of drafts, from acceptance and times that are made up."""

import pytest

from tunix.generate.engine.scheduling.draft_policy import DraftPolicy

DRAFTS, SLOTS, ROUNDS = 4, 8, 16


def used(policy, launches, model_gain, model_cost, hits=0.0):
  """Runs launches in which a round costs 1 without drafts; returns the sources.

  Args:
    model_gain: tokens of a round with drafts of the model.
    model_cost: time of that round.
    hits: share of tokens that prompt lookup predicts. Its round costs 1.3.
  """
  cost = {"none": 1.0, "lookup": 1.3, "model": model_cost}
  gain = {"none": 1.0, "model": model_gain}
  gain["lookup"] = sum(hits**i for i in range(DRAFTS + 1))
  turns, sources = SLOTS * ROUNDS, []
  for _ in range(launches):
    source = policy.choose()
    sources.append(source)
    is_plain = source == "none"
    seen = turns // 8 if is_plain else 0
    policy.record(source, turns, int(turns * gain[source]), int(seen * hits), seen)
    # The first launch after another source computes missing keys, or compiles.
    is_first = len(sources) < 2 or sources[-2] != source
    policy.record_time(source, 128, cost[source] + 50 * is_first)
  return sources


def made(**changes):
  options = {"measures": True, "size_ratio": 0.1, **changes}
  return DraftPolicy(DRAFTS, **options)


def test_a_draft_model_that_is_faster_is_used():
  sources = used(made(), 600, model_gain=3.0, model_cost=1.6)
  assert sources[:3] == ["none"] * 3 and sources[3] == "model"
  assert sources.count("none") < 30 and set(sources) == {"none", "model"}


def test_a_draft_model_that_is_slower_is_switched_off_and_tried_again():
  policy = made()
  sources = used(policy, 640, model_gain=1.2, model_cost=1.6)
  assert 15 <= sources.count("model") <= 24  # two launches in 64
  # Its drafts become right, for example after other requests.
  later = used(policy, 300, model_gain=4.0, model_cost=1.6)
  assert later[-40:].count("model") >= 38


def test_measured_time_counts_and_not_the_assumed_one():
  assert used(made(), 300, model_gain=3.0, model_cost=3.5)[-50:].count("model") <= 2
  # Processes that must decide alike assume 1.5 + 4 * 0.1 rounds.
  sources = used(made(measures=False), 300, model_gain=3.0, model_cost=3.5)
  assert sources[-50:].count("model") >= 48


def test_the_fastest_source_wins():
  """Text that is copied: lookup is always right, and its round is cheaper."""
  sources = used(made(), 300, model_gain=4.0, model_cost=1.9, hits=0.97)
  assert sources[-50:].count("lookup") >= 46


@pytest.mark.parametrize("hits", [0.0, 0.9])
def test_without_a_draft_model_lookup_decides(hits):
  sources = used(made(size_ratio=None), 100, model_gain=1, model_cost=1, hits=hits)
  assert "model" not in sources
  assert (sources[-1] == "lookup") == (hits > 0)
  assert made(size_ratio=None).sources == ("none", "lookup")


def test_no_drafts():
  policy = DraftPolicy(0, measures=True)
  assert policy.sources == ("none",) and policy.choose() == "none"
