"""The order of sampling and training, and lost engines, without a model."""

import collections
import contextlib

import numpy as np
import pytest

from tests.rl import clusters
from tests.rl.schedules import fakes
from tunix.rl.rollout.client import ClientLost
from tunix.rl.schedules import journal
from tunix.rl.schedules.deciders import ReplayError
from tunix.rl.schedules.greedy import Greedy
from tunix.rl.schedules.lagged import Lagged
from tunix.rl.schedules.schedule import Schedule

STEPS = 5


def batches():
  return clusters.prompts(STEPS, 3)


def run(name, lag=0, lost_at=(), folder=None, replay=None):
  cluster = fakes.FakeCluster(lost_at)
  arguments: Any = (
    fakes.FakeExperience(cluster),
    lambda rollouts, size: rollouts.scores,
  )
  options = {"lag": lag, "timeout_s": 20.0}
  if name == "sync":
    made = Schedule(*arguments)
  elif name == "lagged":
    made = Lagged(cluster, *arguments, **options)
  else:
    options |= {"max_tokens": 12, "generations": fakes.GENERATIONS}
    places = {"folder": folder and str(folder), "replay": replay and str(replay)}
    made = Greedy(cluster, *arguments, **options, **places)
  return fakes.train(made, cluster, batches()), cluster


CASES = [("sync", 0), ("lagged", 1), ("lagged", 3), ("greedy", 1), ("greedy", 3)]


@pytest.mark.parametrize(("name", "lag"), CASES)
def test_batches_are_trained_once_in_their_order_by_weights_of_the_lag(name, lag):
  seen, cluster = run(name, lag)
  assert [x.batch.prompts for x in seen] == [x["prompts"] for x in batches()]
  for step, rollouts in enumerate(seen):
    if name == "sync":
      assert rollouts.versions is None
    else:
      drawn = rollouts.versions[rollouts.completion_mask]
      oldest = max(0, step - lag)
      assert oldest <= drawn.min() and drawn.max() <= step
      assert name == "greedy" or drawn.max() == oldest
  assert name == "sync" or cluster.loaded[-1] == STEPS


def arrays(seen):
  return [
    x for out in seen for x in (out.completion_ids, out.rollout_logps, out.versions)
  ]


@pytest.mark.parametrize("lost_at", [(1,), (2, 3), (1, 1, 4)])
def test_a_lost_engine_loses_no_prompt_and_is_replayed(tmp_path, lost_at):
  seen, _ = run("greedy", 2, lost_at, tmp_path)
  assert [x.batch.prompts for x in seen] == [x["prompts"] for x in batches()]
  with contextlib.closing(journal.Journal(tmp_path / journal.FOLDER)) as found:
    kinds = collections.Counter(record[0] for record in found.decisions)
    ends = [tuple(r[2:4]) for r in found.decisions if r[0] == "end"]
  assert kinds["start"] == 1 + len(lost_at)
  assert sorted(ends) == [(b, p) for b in range(STEPS) for p in range(3)]
  again, _ = run("greedy", 2, replay=tmp_path / journal.FOLDER)
  for a, b in zip(arrays(seen), arrays(again), strict=True):
    np.testing.assert_array_equal(a, b)
  with pytest.raises(ReplayError, match="the host fake was lost, and a replay must"):
    run("greedy", 2, (1,), replay=tmp_path / journal.FOLDER)


def test_an_engine_that_is_always_lost_ends_the_run():
  with pytest.raises(ClientLost, match="the host fake was lost"):
    run("greedy", 1, [1] * 100)
