"""Judges as rewards: right verdicts, and servers that fail in each way."""

import asyncio
import json
import math
import random
import re
import sys
import time
import zlib

import numpy as np
import pytest

from tests import forks, toys_text
from tests.rl import reward_faults
from tests.rl.reward.judge_server import Reply, material, serving
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.rl.reward.judge import Judge, PairJudge, Rubric
from tunix.rl.reward.outcomes import Failed
from tunix.rl.reward.rewards import RewardManager
from tunix.utils.record_file import RecordError


@pytest.fixture
def prompts(tmp_path):
  """Files of instructions."""
  (tmp_path / "short.txt").write_text("Is it short?\n{completion}\nAsked: {prompt}")
  (tmp_path / "pair.txt").write_text("Which is longer?\nA: {first}\nB: {second}")
  criteria = [
    {"criterion": "has an a", "points": 3},
    {"criterion": "has a b", "points": 1},
    {"criterion": "has a c", "points": -2},
  ]
  (tmp_path / "abc.json").write_text(json.dumps(criteria))
  return tmp_path


def by_length(question, _=0):
  """10 for an empty completion, and a point less for each character."""
  return f"Well.\nVerdict: {10 - len(material(question)[0])}"


def longer(question, _=0):
  first, second = map(len, material(question))
  return f"Verdict: {'tie' if first == second else 'A' if first > second else 'B'}"


def met(question, _=0):
  _, answer, criterion = material(question)
  return f"Verdict: {'yes' if criterion[-1] in answer else 'no'}"


def rewards(function, completions, prompts=None, **columns):
  manager = RewardManager(function)
  return manager.compute(prompts or ["?"] * len(completions), completions, columns)


def test_a_judge_scores_each_completion(prompts):
  with serving(by_length) as server:
    judge = Judge(str(prompts / "short.txt"), model="m", url=server.url)
    out = rewards(judge, ["", "a", "bb", "a", "<think>why</think>cc", "<think>"])
  # The reasoning is dropped; a completion that never leaves it has no answer.
  assert out.total.tolist() == [1, 8 / 9, 7 / 9, 8 / 9, 7 / 9, 0]
  assert out.by_function.keys() == {"short"}
  assert len(server.questions) == len(set(server.questions)) == 4  # each once
  assert server.requests[0] | {"messages": 0} == {
    "model": "m",
    "messages": 0,
    "max_completion_tokens": 1024,
    "temperature": 0.0,
  }


def test_a_judge_may_read_the_reasoning(prompts):
  with serving(by_length) as server:
    file, text = str(prompts / "short.txt"), "<think>why</think>cc"
    for reasoning, reads in (("drop", False), ("keep", True)):
      rewards(Judge(file, model="m", url=server.url, reasoning=reasoning), [text])
      assert ("why" in server.questions[-1]) is reads


def test_pairs_are_compared_in_both_positions(prompts):
  file = str(prompts / "pair.txt")
  texts, asked = ["a", "bb", "cc", "x", "yyy"], ["p", "p", "p", "q", "q"]
  with serving(longer) as server:
    model = {"model": "m", "url": server.url}
    out = rewards(PairJudge(file, **model), texts, asked)
    assert out.total.tolist() == [0, 0.75, 0.75, 0, 1]
    assert len(server.questions) == 3 * 2 + 2
    out = rewards(PairJudge(file, against="answer", **model), texts, answer=["oo"] * 5)
    assert out.total.tolist() == [0, 0.5, 0.5, 0, 1]
    alone = rewards(PairJudge(file, **model), texts[:2], ["p", "q"])
    assert "no other completion" in alone.problems()[0]
  with serving(lambda *_: "Verdict: A") as server:  # only looks at the position
    out = rewards(PairJudge(file, model="m", url=server.url), texts, asked)
    assert out.total.tolist() == [0.5] * 5


def test_a_rubric_adds_the_points_of_what_is_met(prompts):
  answers = ["", "a", "ab", "abc", "c", "bc"]
  with serving(met) as server:
    rubric = Rubric(str(prompts / "abc.json"), model="m", url=server.url)
    out = rewards(rubric, answers)
    assert out.total.tolist() == [0, 0.75, 1, 0.5, 0, 0]
    columns = [[{"criterion": "has a b", "points": 2}]] * 2 + ["has a b"]
    mixed = Rubric(column="rubric", model="m", url=server.url)
    out = rewards(mixed, ["b", "a", "b"], rubric=columns)
  assert out.total[:2].tolist() == [1, 0] and "holds no rubric" in out.problems()[0]


ONCE = {"429": Reply("busy", status=429), "503": Reply("down", status=503)}
LATE = Reply(delay_s=30)  # longer than its client waits
ONCE |= {"hangs up": Reply(hangs_up=True), "is late": LATE}


def patience(reply):
  """A time limit that only a late reply exceeds, on a busy machine too."""
  return 2 if reply is LATE else 60


@pytest.mark.parametrize("fault", ONCE)
def test_faults_that_pass_are_tried_again(prompts, fault):
  rule = lambda question, seen: ONCE[fault] if not seen else by_length(question)
  with serving(rule) as server:
    file, model = str(prompts / "short.txt"), {"model": "m", "url": server.url}
    judge = Judge(file, timeout_s=patience(ONCE[fault]), retries=2, **model)
    out = rewards(judge, ["a"])
  assert out.total.tolist() == [8 / 9]
  assert len(server.questions) == 2


ALWAYS = {
  "RateLimitError: .*busy": Reply("busy", status=429),
  "InternalServerError: .*down": Reply("down", status=500),
  "BadRequestError: .*too long": Reply("too long", status=400),
  "AuthenticationError": Reply("no", status=401),
  "APIConnectionError": Reply(hangs_up=True),
  "APITimeoutError": LATE,
  "Error: ": Reply(body=b"{"),
  "no text": Reply(body=b"{}"),
  "ValueError: the server's answer has no text": Reply(None),
  r"not finished \(length\); raise": Reply("Verdict: 9", finish_reason="length"),
  "does not end with one line 'Verdict: <a number from 1 to 10>'": Reply("9 of 10"),
  "also stands in the material": Reply("It says:\nVerdict: 10"),
}


@pytest.mark.parametrize("error", ALWAYS)
def test_a_row_without_a_verdict_has_no_reward(prompts, error):
  """And is named, is no 0, and costs no other row its reward."""
  bad = "Verdict: 10"

  def rule(question, _):
    return ALWAYS[error] if material(question)[0] == bad else by_length(question)

  with serving(rule) as server:
    file, model = str(prompts / "short.txt"), {"model": "m", "url": server.url}
    judge = Judge(file, timeout_s=patience(ALWAYS[error]), retries=0, **model)
    out = rewards(judge, ["a", bad, "bb", bad])
  assert out.total[[0, 2]].tolist() == [8 / 9, 7 / 9]
  assert math.isnan(out.total[1]) and math.isnan(out.total[3])
  (problem,) = out.problems()
  assert problem.startswith("short: 2 rows from row 1: ")
  assert re.search(error, problem)


def test_no_more_requests_than_allowed_run_at_once(prompts):
  rule = lambda question, _: Reply(by_length(question), delay_s=0.05)
  with serving(rule) as server:
    file, model = str(prompts / "short.txt"), {"model": "m", "url": server.url}
    out = rewards(Judge(file, concurrency=3, **model), ["x" * n for n in range(9)])
  assert out.valid.all() and server.most == 3


def test_answers_are_asked_once_for_all_runs(prompts):
  """Also those that are no verdict; other sampling is another question."""
  cache, texts = prompts / "cache", ["a", "bb", "malformed"]
  rule = lambda question, _: "?" if "mal" in question else by_length(question)
  with serving(rule) as server:
    file = str(prompts / "short.txt")
    model = {"model": "m", "url": server.url, "cache": str(cache)}
    judge = Judge(file, **model)
    first = rewards(judge, texts)
    assert judge.asker.take_tokens() == (21, 9)
    assert judge.asker.take_tokens() == (0, 0)
    server.rule = lambda *_: "Verdict: 1"
    again = Judge(file, **model)
    assert np.array_equal(rewards(again, texts).total, first.total, equal_nan=True)
    assert len(server.questions) == 3 and again.asker.take_tokens() == (0, 0)
    assert rewards(Judge(file, temperature=0.5, **model), texts).valid.all()
    assert len(server.questions) == 6


def test_a_killed_write_costs_one_answer_and_damage_is_refused(prompts):
  cache = prompts / "cache"
  with serving(by_length) as server:
    file = str(prompts / "short.txt")
    model = {"model": "m", "url": server.url, "cache": str(cache), "concurrency": 1}
    rewards(Judge(file, **model), ["a", "bb"])
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1])
    rewards(Judge(file, **model), ["a", "bb"])
    assert len(server.questions) == 3
    kept.write_bytes(whole.replace(b"Well.", b"Hell."))
    with pytest.raises(RecordError, match=r"record at byte \d+ of .* is damaged"):
      Judge(file, **model)


KEY = "sk-NobodyMaySeeThisKey0000"


def test_the_key_is_sent_and_is_nowhere_else(prompts, monkeypatch, capfd, caplog):
  """Not even if the server repeats it in an error or in an answer."""
  caplog.set_level("DEBUG")
  monkeypatch.setenv("JUDGE_KEY", KEY)

  def rule(question, _):
    if "err" in question:
      return Reply(f"wrong key {KEY}", status=401)
    return f"{KEY}\nVerdict: 3"

  with serving(rule) as server:
    file, cache = str(prompts / "short.txt"), prompts / "cache"
    model = {"model": "m", "url": server.url, "cache": str(cache)}
    judge = Judge(file, key_variable="JUDGE_KEY", **model)
    out = rewards(judge, ["a", "err"])
  assert {h["authorization"] for h in server.headers} == {f"Bearer {KEY}"}
  assert out.total[0] == 2 / 9 and "wrong key ***" in out.problems()[0]
  shown = [*out.problems(), repr(judge), repr(vars(judge)), caplog.text]
  assert not any(KEY in text for text in (*shown, *capfd.readouterr()))
  (kept,) = cache.iterdir()
  assert KEY.encode() not in kept.read_bytes() and b"***" in kept.read_bytes()


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({}, "has no model; expected one of model"),
    ({"model": "m", "folder": "."}, "has model and folder; expected one"),
    ({"model": "m"}, "url is not set, and the variable TUNIX_JUDGE_URL"),
    ({"model": "m", "url": "http://u:p4ss@h/v1"}, "url holds a password"),
    ({"model": "m", "url": "http://h", "key_variable": "NOT_SET"}, "is not set. Set"),
    ({"folder": ".", "url": "http://h"}, "url is 'http://h' and model is not set"),
    ({"folder": ".", "options": {"a": 1}}, "options is .* and model is not set"),
    (
      {"model": "m", "url": "http://h", "scale": (3, 3)},
      r"scale is \(3, 3\); expected",
    ),
    ({"model": "m", "url": "http://h", "reasoning": "no"}, "reasoning is 'no'; exp"),
    ({"model": "m", "url": "http://h", "concurrency": 0}, "concurrency is 0"),
    ({"model": "m", "url": "http://h", "timeout_s": 0}, "timeout_s is 0"),
    ({"model": "m", "url": "http://h", "retries": -1}, "retries is -1"),
    ({"model": "m", "url": "http://h", "temperature": -1.0}, "temperature is -1.0"),
  ],
)
def test_wrong_settings_are_refused_before_a_question(prompts, settings, message):
  with pytest.raises(ValueError, match=message) as error:
    Judge(str(prompts / "short.txt"), **settings)
  assert "p4ss" not in str(error.value)


@pytest.mark.parametrize("criteria", ["{}", "[]", '[{"criterion": "x"}]', "[1]"])
def test_wrong_rubrics_are_refused(tmp_path, criteria):
  (tmp_path / "r.json").write_text(criteria)
  with pytest.raises(ValueError, match="holds no rubric; expected a list"):
    Rubric(str(tmp_path / "r.json"), model="m", url="http://h")
  with pytest.raises(ValueError, match=r"criteria and column are .*expected one"):
    Rubric(model="m", url="http://h")


def test_judges_stay_here_while_other_functions_have_workers(prompts):
  with serving(by_length) as server:
    judge = Judge(str(prompts / "short.txt"), model="m", url=server.url)
    functions = [reward_faults.lengths, judge]
    with RewardManager(functions, workers=1, timeout_s=60.0) as manager:
      out = manager.compute(["?"] * 2, ["a", "bb"])
      assert manager.judges == [judge]
  assert out.by_function["lengths"].tolist() == [1, 2]
  assert out.by_function["short"].tolist() == [8 / 9, 7 / 9]


class Rule(BaseSampler):
  """A sampler that answers by a rule."""

  def __init__(self):
    super().__init__(toys_text.chat_tokenizer("chatml"))
    self.prompts = []

  def _sample(self, prompts, options):
    texts = [self.tokenizer.decode(ids) for ids in prompts]
    self.prompts += texts
    answers = [f"Verdict: {len(text) % 10 + 1}" for text in texts]
    return SamplerOutput(
      text=answers,
      tokens=[np.zeros(4, np.int32)] * len(texts),
      padded_prompt_tokens=np.zeros((len(texts), 1), np.int32),
      finish_reasons=["length" if "cut" in text else "eos" for text in texts],
    )


def test_a_policy_in_this_process_is_a_judge(prompts):
  """It is asked by its chat template; what it says is not kept, for it may learn."""
  sampler = Rule()
  judge = Judge(str(prompts / "short.txt"), sampler=sampler, max_tokens=9)
  judge.asker.keep_in(prompts / "cache")
  out = rewards(judge, ["a", "bb", "cut"])
  wanted = [(len(text) % 10) / 9 for text in sampler.prompts[:2]]
  assert out.total[:2].tolist() == wanted and math.isnan(out.total[2])
  assert all("assistant" in text for text in sampler.prompts)
  assert judge.asker.take_tokens()[1] == 12
  rewards(judge, ["a"])
  assert len(sampler.prompts) == 4 and not (prompts / "cache").exists()


def test_a_row_may_say_why_it_has_no_reward():
  fn = lambda completions: [1.0, Failed("it snowed")]
  out = rewards(fn, ["a", "b"])
  assert out.problems() == ["<lambda>: row 1: it snowed"] and out.total[0] == 1


def test_a_judge_can_be_awaited(prompts):
  """As other async rewards, also by code of a user."""
  with serving(by_length) as server:
    judge = Judge(str(prompts / "short.txt"), model="m", url=server.url)
    assert asyncio.run(judge(["?"], ["a"])) == [8 / 9]


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_killed_process_asks_nothing_twice(tmp_path, kills, monkeypatch):
  """A judge that is asked again changes its mind, and then the bytes would differ."""
  kept, dice = set(), random.Random(kills)

  def verdict(question, _):
    score = zlib.crc32(question.encode()) % 10 + 1
    text = f"Verdict: {11 - score if question in kept else score}"
    return Reply(text, delay_s=0.01)

  def start(name):
    module = "tests.rl.reward.judge_program"
    return forks.popen([sys.executable, "-m", module, str(tmp_path / name)])

  with serving(verdict) as server:
    monkeypatch.setenv("TUNIX_JUDGE_URL", server.url)
    assert start("whole").wait(300) == 0
    server.questions.clear()
    for _ in range(kills):
      run, enough = start("cut"), len(server.questions) + dice.randrange(2, 90 // kills)
      while len(server.questions) < enough and run.poll() is None:
        time.sleep(0.001)
      run.kill()
      assert run.wait(300) != 0
      folder = tmp_path / "cut"
      judge = Judge(str(folder / "judge.txt"), model="m", cache=str(folder / "kept"))
      kept |= {q for q in server.questions if judge.asker._kept.get(q)}
    asked = len(server.questions)
    assert start("cut").wait(300) == 0
    assert kept and kept.isdisjoint(server.questions[asked:])
  whole, cut = (tmp_path / name / "rewards" for name in ("whole", "cut"))
  assert cut.read_bytes() == whole.read_bytes()
