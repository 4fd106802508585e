"""Samples: what is written, when, and that a page shows texts as texts."""

import json

import numpy as np
import pytest

from tests.report import dom
from tests.rl import clusters
from tunix.rl.common import Rollouts
from tunix.rl.experience import samples
from tunix.rl.experience.samples import Samples
from tunix.rl.pipeline import prompt_batch
from tunix.rl.reward.rewards import RewardManager
from tunix.sft.peft_trainer import CheckpointOptions

NASTY = '</script><script>alert(1)</script><b>&amp;"\u2028\ud800'


def length(prompts, completions):
  return [float("nan") if text == "lost" else float(len(text)) for text in completions]


def rollouts(texts, group=2, prompts=None):
  count = len(texts)
  masks = np.arange(3) < np.arange(count)[:, None] % 3 + 1
  prompts = prompts or [f"p{i}" for i in range(count // group)]
  batch = prompt_batch({"prompts": prompts, "answer": list(range(len(prompts)))})
  rewards = RewardManager(length, [2.0]).compute(
    [p for p in prompts for _ in range(group)], texts
  )
  return Rollouts(
    batch=batch,
    text=texts,
    finish_reasons=["eos"] * (count - 1) + ["length"],
    prompt_ids=np.ones((count, 2), np.int32),
    prompt_mask=np.ones((count, 2), bool),
    completion_ids=np.ones((count, 3), np.int32),
    completion_mask=masks,
    rollout_logps=np.zeros((count, 3), np.float32),
    group_size=group,
    rewards=rewards,
    scores=rewards.total.reshape(-1, group) - 1.0,
  )


def lines(folder, number):
  return [json.loads(x) for x in (folder / f"{number:06}.jsonl").open()]


def embedded(page):
  """The batches on a page of samples."""
  (section,) = dom.data(page)["sections"]
  (part,) = section["parts"]
  return part["batches"]


def test_a_line_holds_a_group(tmp_path):
  made = rollouts(["a", "bbb", "lost", "cc"])
  Samples(tmp_path).add(made, np.array([-1.0, 1.0, 0.0, 0.5]), number=0, step=7)
  first, second = lines(tmp_path, 0)
  assert first["prompt"] == "p0" and first["columns"] == {"answer": 0}
  assert (first["rollout"], first["step"], first["group"]) == (0, 7, 0)
  assert first["batch_reward"] == (2 + 6 + 4) / 3
  assert first["completions"][1] == {
    "text": "bbb",
    "reward": 6.0,
    "score": 5.0,
    "rewards": {"length": 3.0},
    "advantage": 1.0,
    "tokens": 2,
    "finish_reason": "eos",
  }
  assert second["completions"][0]["reward"] is None
  assert second["completions"][1]["finish_reason"] == "length"


def test_advantages_by_token_are_shown_by_their_mean_over_tokens():
  made = rollouts(["a", "b"])  # of 1 and 2 tokens
  (group,) = samples.groups_of(made, np.array([[1.0, 9, 9], [2.0, 4.0, 9]]), 8)
  assert [row["advantage"] for row in group["completions"]] == [1.0, 3.0]


def test_cadence_and_number_of_groups(tmp_path):
  writer = Samples(tmp_path, every_n_rollouts=3, max_groups=1)
  for number in range(5):
    writer.add(rollouts(["a", "b", "c", "d"]), np.zeros(4), number=number, step=number)
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "000000.jsonl",
    "000003.jsonl",
    "index.html",
  ]
  assert [group["group"] for group in lines(tmp_path, 3)] == [0]
  assert [b["rollout"] for b in embedded((tmp_path / "index.html").read_text())] == [
    0,
    3,
  ]
  for name in ("every_n_rollouts", "max_groups"):
    with pytest.raises(ValueError, match=f"{name} is 0"):
      Samples(tmp_path, **{name: 0})


def test_what_a_killed_run_wrote_beyond_its_checkpoint_goes(tmp_path):
  writer = Samples(tmp_path, every_n_rollouts=1)
  for number in (0, 1, 2, 1):
    writer.add(rollouts(["a", "b"]), np.zeros(2), number=number, step=number)
  batches = embedded((tmp_path / "index.html").read_text())
  assert [batch["rollout"] for batch in batches] == [0, 1]
  assert not (tmp_path / "000002.jsonl").exists()


def test_the_page_shows_best_and_worst_and_all_rewards(tmp_path):
  made = rollouts(["aa", "lost", "a", "aaa", "b", "c", "d", "e"], group=4)
  Samples(tmp_path).add(made, np.zeros(8), number=0, step=0)
  (batch,) = embedded((tmp_path / "index.html").read_text())
  first, second = batch["groups"]
  assert [row["text"] for row in first["shown"]] == ["aaa", "a"]
  assert first["rewards"] == [4.0, None, 2.0, 6.0]
  assert len(second["shown"]) == 1  # they are all equal


def test_texts_stay_texts(tmp_path):
  made = rollouts([NASTY, "x" * 9000], prompts=[NASTY])
  Samples(tmp_path).add(made, np.zeros(2), number=0, step=0)
  page = (tmp_path / "index.html").read_text()
  (batch,) = embedded(page)
  assert batch["groups"][0]["prompt"] == NASTY
  long, nasty = batch["groups"][0]["shown"]
  assert nasty["text"] == NASTY
  assert long["text"].endswith("... (5,000 characters more)")
  drawn = dom.draw(page)
  assert not list(drawn.iter("script")) and not list(drawn.iter("b"))
  assert [pre.text for pre in drawn.iter("pre")][:2] == [NASTY, long["text"]]


def test_the_page_draws_the_mean_reward_and_the_newest_batch(tmp_path):
  writer = Samples(tmp_path, every_n_rollouts=1)
  for number, text in enumerate(("a", "bb", "ccc")):
    writer.add(rollouts([text, "d"]), np.zeros(2), number=number, step=number)
  drawn = dom.draw((tmp_path / "index.html").read_text())
  assert len(drawn.find(".//polyline").get("points").split()) == 3
  assert [pre.text for pre in drawn.iter("pre")] == ["p0", "ccc", "d"]
  # 2 x the mean length of "ccc" and "d".
  assert "rollouts 2 · step 2 · mean reward 4" in dom.text(drawn)


def test_a_learner_leaves_the_same_samples_when_it_is_resumed(tmp_path):
  def train(folder, batches):
    learner = clusters.grpo(
      checkpoint_root_directory=str(tmp_path / folder / "ckpt"),
      checkpointing_options=CheckpointOptions(save_every_n_steps=1),
    )
    learner.with_samples(Samples(tmp_path / folder / "samples", every_n_rollouts=2))
    learner.train(clusters.prompts(5)[:batches])
    learner.close()

  train("whole", 5)
  train("cut", 3)
  train("cut", 5)
  whole, cut = (tmp_path / name / "samples" for name in ("whole", "cut"))
  names = sorted(file.name for file in whole.iterdir())
  assert names == ["000000.jsonl", "000002.jsonl", "000004.jsonl", "index.html"]
  for name in names:
    assert (whole / name).read_bytes() == (cut / name).read_bytes()
  text = lines(whole, 4)[0]["completions"][0]["text"]
  assert all(word.isdigit() for word in text.split())
