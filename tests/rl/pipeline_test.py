import pytest

from tests.rl import clusters
from tunix.rl.pipeline import PromptSource


def data(count):
  return [{"prompts": [f"p{i}"], "answer": [i]} for i in range(count)]


def test_looking_whether_there_is_more_moves_nothing_that_is_saved():
  source = PromptSource(data(2))
  assert source.has_more() and source.has_more()
  first = source.take()
  assert (first.prompts, first.number) == (["p0"], 1)
  place = source.commit()
  assert source.has_more() and place == {"drawn": 1}
  again = PromptSource(data(2), place)
  assert again.take().prompts == source.take().prompts == ["p1"]
  assert source.take() is None and not source.has_more()


def test_what_waits_goes_first_and_is_not_drawn_twice():
  pending = [{"prompts": "old", "answer": 7}]
  source = PromptSource(data(1), pending=pending)
  assert source.has_more()
  assert source.take().prompts == ["old"]
  batch = source.take()
  source.give_back(batch)
  assert source.has_more() and source.take().prompts == batch.prompts == ["p0"]
  assert not source.has_more()


def test_going_back_gives_what_was_looked_at_and_what_waited_anew():
  def endless():
    yield from data(3)

  stream = endless()
  source = PromptSource(stream, pending=[{"prompts": "old", "answer": 7}])
  source.take()
  source.commit()
  source.take()
  assert source.has_more() and source.continues(stream)
  source.go_back()
  assert [source.take().prompts for _ in range(3)] == [["p0"], ["p1"], ["p2"]]


def test_a_source_that_was_ended_gives_nothing_more_until_it_goes_back():
  source = PromptSource(data(2))
  source.take()
  source.end()
  assert not source.has_more() and source.take() is None
  source.go_back()
  assert source.take().prompts == ["p0"]


@pytest.mark.parametrize("batch", [{"prompts": []}, {"prompts": ["a"], "x": [1, 2]}])
def test_a_batch_that_makes_no_sense_is_refused_when_it_is_looked_at(batch):
  with pytest.raises(ValueError, match=r"at least one|2 values for 1"):
    PromptSource([batch]).has_more()


def test_ids_beside_a_prompt_are_sampled_from_and_rewards_get_the_text():
  seen = []

  def reward(prompts, completions, **columns):
    seen.append((prompts, columns))
    return [0.0] * len(prompts)

  learner = clusters.grpo(reward_fns=reward)
  generate, given = learner.rl_cluster.generate, []

  def spy(prompts, *args, **options):
    given.append(prompts)
    return generate(prompts, *args, **options)

  learner.rl_cluster.generate = spy
  batch = {"prompts": ["5 6"], "prompt_token_ids": [[7, 8, 9]], "number": [3]}
  learner.train([batch])
  assert given == [[[7, 8, 9]]]
  assert seen == [(["5 6"] * 4, {"number": [3] * 4})]
