"""What coordination_test runs in each of two processes: RANK PORT."""

import sys

import jax

from tunix.utils import coordination


def expect(kind, part, function, *arguments):
  try:
    function(*arguments)
  except kind as error:
    assert part in str(error), error
    return
  raise AssertionError(f"no {kind.__name__} that says {part!r}")


def values_of_all_come_in_order(rank):
  for turn in range(3):  # the same words again are another meeting
    got = coordination.gather("places", {"turn": turn, "rank": rank}, 20)
    assert got == [{"turn": turn, "rank": 0}, {"turn": turn, "rank": 1}]


def exchanges_with_numbers_leave_one_key(rank):
  for step in range(4):
    what = f"saving {step}"
    assert coordination.gather(what, rank, 20, topic="saving") == [0, 1]
  coordination.gather("all have deleted", None, 20)
  kept = [key for key, _ in coordination.client().key_value_dir_get("tunix")]
  assert [key for key in kept if "/saving" in key] == [
    "tunix/saving 3/1/0",
    "tunix/saving 3/1/1",
  ], kept


def who_does_not_come_is_named(rank):
  if rank == 0:
    part = "alone: process 1 of 2 did not take part within 0.5 s"
    expect(coordination.AbsentError, part, coordination.gather, "alone", 1, 0.5)
  # The one that was left alone has lost nothing: the next meeting is about its own.
  assert coordination.gather("after it", rank, 20) == [0, 1]


def what_differs_is_named(rank):
  coordination.agree("versions", {"jax": "1"}, "install one", 20)
  mine = {"jax": "1", "flax": str(rank)}
  part = "versions: flax is '0' on process 0 and '1' on process 1: install one"
  expect(ValueError, part, coordination.agree, "versions", mine, "install one", 20)
  more = {"jax": "1"} | ({"seed": "3"} if rank else {})
  part = "seed is None on process 0 and '3' on process 1"
  expect(ValueError, part, coordination.agree, "settings", more, "use one", 20)


def shares_are_exchanged_and_a_failure_is_raised_on_both(rank):
  mine = list(coordination.share(5))
  assert coordination.exchange("shares", lambda: mine, 20) == [[0, 1], [2, 3, 4]]
  work = lambda: {0: "kept"}[rank]
  part = "1" if rank else "process 1 of 2 failed: KeyError: 1"
  kind = KeyError if rank else coordination.AbsentError
  expect(kind, part, coordination.exchange, "work", work, 20)


def all_stop_after_the_same_step(rank):
  notice = coordination.StopNotice(lag=3)
  stopped = None
  for step in range(10):
    # A barrier, so that no process is ahead of the other by more than a step.
    coordination.gather(f"step {step}", None, 20)
    stopped = notice.due(15 if rank == 1 and step >= 2 else None, step)
    if stopped is not None:
      break
  assert (step, stopped) == (5, 15), (step, stopped)
  # A later run has its own notice.
  assert coordination.StopNotice(lag=3).due(None, 100) is None


def main(rank: int, port: str) -> None:
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
  values_of_all_come_in_order(rank)
  exchanges_with_numbers_leave_one_key(rank)
  who_does_not_come_is_named(rank)
  shares_are_exchanged_and_a_failure_is_raised_on_both(rank)
  what_differs_is_named(rank)
  all_stop_after_the_same_step(rank)
  print("done")


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2])
