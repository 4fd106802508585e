"""The greedy schedule: its bytes, its journal, kills, replays and faults."""

import contextlib
import json
import shutil
import threading

import pytest

from tests.rl import clusters
from tests.rl.env import toy_envs
from tests.rl.schedules import schedule_test
from tests.rl.schedules.schedule_test import (
  Watched,
  assert_same,
  data,
  trained,
  weights,
)
from tunix.generate.engine.engine import Engine
from tunix.rl.env.env import StepResult
from tunix.rl.experience.experience import Experience
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.rl.schedules import journal, schedule
from tunix.rl.schedules.deciders import Replayed, ReplayError
from tunix.rl.schedules.decisions import Inbox
from tunix.rl.schedules.journal import FOLDER, JournalError
from tunix.sft.metrics_logger import Mode

STEPS = 4


def learner(folder=None, *, lag=1, **options):
  options = {"schedule": "greedy", "rollout_timeout_s": 300.0} | options
  return schedule_test.learner(0, folder, own_lag=lag, **options)


def threads():
  return [t for t in threading.enumerate() if t.name.startswith("tunix-greedy")]


def decisions(folder):
  with contextlib.closing(journal.Journal(folder / FOLDER, reads=True)) as found:
    return found.decisions


def assert_ended_once(folder, steps):
  """Each prompt of each batch has exactly one end in the journal."""
  ends = [tuple(r[2:4]) for r in decisions(folder) if r[0] == "end"]
  assert len(ends) == len(set(ends))
  assert set(ends) >= {(batch, prompt) for batch in range(steps) for prompt in (0, 1)}


def replayed(folder, **options):
  made = learner(replay=str(folder / FOLDER), **options)
  try:
    made.train(data(STEPS), data(1))
  finally:
    made.close()
  return made


def test_prompts_that_may_start_by_the_rule_of_areal():
  # B = 4 prompts a step. Before step 1 those of S + 1 = 3 steps may start, before step
  # 2 those of 4: 2 + 2 more than the 4 that are trained then.
  assert schedule.admissible(2, 1, 4) == 12
  assert schedule.admissible(2, 2, 4) == 16


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run of environments with several turns."""
  folder = tmp_path_factory.mktemp("greedy") / "whole"
  made = learner(folder, env=toy_envs.Echo)
  made.train(data(STEPS), data(1))
  made.close()
  return made, folder


def test_every_prompt_is_trained_once_in_its_order_and_no_token_is_too_old(whole):
  made, folder = whole
  assert [x.batch.number for x in trained(made)] == [1, 2, 3, 4]
  assert_ended_once(folder, STEPS)
  history = made.metrics_logger
  ages = history.get_metric_history("", "staleness/max", Mode.TRAIN)
  assert len(ages) == STEPS and max(ages) <= 1
  for name in ("perf/queue_age_sec", "perf/engine_idle_sec", "perf/data_wait_sec"):
    assert len(history.get_metric_history("", name, Mode.TRAIN)) == STEPS
  assert made.algo_config.rollout_correction.kind == "truncate"
  assert not threads()


def test_a_replay_takes_the_same_decisions_and_ends_with_the_same_bytes(whole):
  made, folder = whole
  again = replayed(folder, env=toy_envs.Echo)
  assert_same(weights(again), weights(made))
  for a, b in zip(trained(again), trained(made), strict=True):
    assert_same([a.versions, a.rollout_logps], [b.versions, b.rollout_logps])


def test_a_replay_names_the_environment_that_answers_otherwise(whole):
  made, folder = whole
  prompt = made.seen[0].batch.prompts[1]

  class Rewards(toy_envs.Echo):
    async def step(self, action):
      result = await super().step(action)
      if self._prompt == prompt and result.episode_done:
        return StepResult(reward=0.25, episode_done=True, metrics=result.metrics)
      return result

  class Answers(toy_envs.Echo):
    async def step(self, action):
      result = await super().step(action)
      if self._prompt == prompt:
        result = StepResult(
          reward=result.reward, episode_done=False, next_observation="3 3 3"
        )
      return result

  message = "environment of completion 0 of prompt 1 of batch 0 answered otherwise"
  for env in (Rewards, Answers):
    with pytest.raises(ReplayError, match=message):
      replayed(folder, env=env)
    assert not threads()


def test_a_replay_that_waits_for_the_learner_blames_nobody(whole):
  _, folder = whole
  decider = Replayed(journal.Journal(folder / FOLDER, reads=True), timeout_s=0.0)
  for _ in range(2):  # an update or an evaluation that takes long
    assert decider.take(Inbox(), 0, None) == ([], False)
    decider.check(is_needed=False)
  decider.take(Inbox(), 0, None)
  with pytest.raises(ReplayError, match="goes on with weights 0"):
    decider.check(is_needed=True)


def test_a_run_that_is_stopped_goes_on_from_its_journal_and_is_replayed(
  whole, tmp_path
):
  made, folder = whole
  # Killed after its last update and before its checkpoint: nothing is sampled again.
  shutil.copytree(folder, tmp_path / "late")
  for step in (2, 3, 4):
    shutil.rmtree(tmp_path / "late" / str(step))
  late = learner(tmp_path / "late", env=toy_envs.Echo)
  assert late.train_steps == 1
  late.train(data(STEPS), data(1))
  late.close()
  assert_same(weights(late), weights(made))
  assert decisions(tmp_path / "late") == decisions(folder)
  # Killed in the middle: what had not ended starts again.
  shutil.copytree(folder, tmp_path / "early")
  for step in (2, 3, 4):
    shutil.rmtree(tmp_path / "early" / str(step))
  cut_after_batch(tmp_path / "early", 0)
  early = learner(tmp_path / "early", env=toy_envs.Echo)
  early.train(data(STEPS), data(1))
  early.close()
  assert [r[0] for r in decisions(tmp_path / "early")].count("start") == 2
  assert_ended_once(tmp_path / "early", STEPS)
  assert_same(weights(replayed(tmp_path / "early", env=toy_envs.Echo)), weights(early))


def test_a_run_that_is_resumed_in_a_smaller_batch_has_engines_of_one_size(
  tmp_path, monkeypatch
):
  made, sizes = VanillaRollout.separate_engine, []

  def noted(self, rows, max_tokens):
    sizes.append(rows)
    return made(self, rows, max_tokens)

  monkeypatch.setattr(VanillaRollout, "separate_engine", noted)
  batches = [*data(1), *clusters.prompts(1, 1)]
  for _ in range(2):
    run = learner(tmp_path)
    run.train(batches)
    run.close()
    assert run.train_steps == 2
    shutil.rmtree(tmp_path / "2")  # as if it was killed in the last batch
    kept = [r for r in decisions(tmp_path) if r[0] != "end" or r[2] == 0]
    (tmp_path / FOLDER / journal.DECISIONS).unlink()
    written = journal.Journal(tmp_path / FOLDER)
    for record in kept:
      written.add(*record)
    written.close()
  assert sizes == [8, 8]


def cut_after_batch(folder, number):
  """Cuts the journal as a kill does, in the middle of the first end after a batch's."""
  file = folder / FOLDER / "decisions.bin"
  ends = [r for r in decisions(folder) if r[0] == "end"]
  last = max(i for i, record in enumerate(ends) if record[2] == number)
  text = json.dumps(ends[last + 1], separators=(",", ":")).encode()
  data = file.read_bytes()
  file.write_bytes(data[: data.index(text) - 7])  # in its head of 12 bytes


def test_another_schedule_or_lag_does_not_resume(whole, tmp_path):
  _, folder = whole
  shutil.copytree(folder, tmp_path / "run")
  with pytest.raises(JournalError, match="lag 1, and this run has 2"):
    learner(tmp_path / "run", lag=2, env=toy_envs.Echo)
  with pytest.raises(ValueError, match="run with schedule greedy"):
    schedule_test.learner(1, tmp_path / "run", env=toy_envs.Echo)


def test_the_journal_of_another_model_is_refused_without_a_checkpoint(whole, tmp_path):
  made, folder = whole
  shutil.copytree(folder / FOLDER, tmp_path / FOLDER)  # killed before the first save
  other = learner(tmp_path, env=toy_envs.Echo, actor=clusters.model(seed=1))
  with pytest.raises(JournalError, match="began with other weights"):
    other.train(data(STEPS))
  other.close()
  same = learner(tmp_path, env=toy_envs.Echo)
  same.train(data(STEPS), data(1))
  same.close()
  assert_same(weights(same), weights(made))


def test_an_error_in_a_group_is_raised_and_can_be_tried_again(tmp_path, monkeypatch):
  sampled, calls = Experience.sample_group, []

  def fails(self, *args):
    calls.append(1)
    if len(calls) == 4:
      raise SystemExit("the sandbox is gone")
    return sampled(self, *args)

  monkeypatch.setattr(Experience, "sample_group", fails)
  made = learner(tmp_path)
  with pytest.raises(SystemExit, match="the sandbox is gone"):
    made.train(data(3))
  made.train(data(3))
  made.close()
  assert made.train_steps == 3
  assert_ended_once(tmp_path, 3)
  assert not threads()


def test_an_evaluation_waits_for_the_rewards_of_a_group_and_not_for_ever():
  made = learner(rollout_timeout_s=0.1)
  with (
    made._experience._one_at_a_time,  # as a group's thread holds it
    pytest.raises(TimeoutError, match=r"rollout_timeout_s is 0\.1 .* slow or hangs"),
  ):
    made.evaluate(data(1))
  made.close()


@pytest.mark.parametrize("party", ["environment", "engine", "learner"])
def test_a_party_that_stops_ends_the_run_with_its_name(party, monkeypatch):
  released = threading.Event()

  class Hangs(toy_envs.OneAnswer):
    def step(self, action):
      released.wait(20)
      return super().step(action)

  made = learner(env=Hangs if party == "environment" else toy_envs.OneAnswer)
  if party == "environment":
    made._schedule._timeout_s = 1.0
  if party == "engine":
    monkeypatch.setattr(Engine, "_step", lambda self: 1 / 0)
  if party == "learner":
    monkeypatch.setattr(Watched, "_update", lambda *args: 1 / 0)
  kinds = {
    "environment": (TimeoutError, "prompt 0 of batch 0 of the rollouts"),
    "engine": (RuntimeError, "the engine failed"),
    "learner": (ZeroDivisionError, "division by zero"),
  }
  kind, message = kinds[party]
  with pytest.raises(kind, match=message):
    made.train(data(2))
  released.set()
  made.close()  # waits for one second here, which a busy machine may exceed
  for thread in threads():
    thread.join(20)
  assert not threads()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"rollout_engine": "padded"}, "padded sampler"),
    ({"rollout_engine": "vllm"}, "schedule is 'greedy'"),
    ({"rollout_micro_batch_size": 1}, "rollout_micro_batch_size is 1 and schedule"),
  ],
)
def test_settings_that_it_cannot_use_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    learner(**options)


@pytest.mark.slow
def test_a_plain_run_is_replayed_and_evaluations_change_nothing(tmp_path):
  made = learner(tmp_path, lag=2, eval_every_n_steps=1)
  made.train(data(STEPS), data(1))
  made.close()
  again = replayed(tmp_path, lag=2)
  assert_same(weights(again), weights(made))
