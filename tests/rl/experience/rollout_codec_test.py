import dataclasses
import json
import pathlib

import numpy as np
import pytest

from tunix.generate.tokens import Tokens
from tunix.rl import common
from tunix.rl.common import Rollouts
from tunix.rl.env.env import Action
from tunix.rl.env.episode import Episode, Turn
from tunix.rl.experience import episodes, rollout_codec
from tunix.rl.pipeline import prompt_batch
from tunix.rl.reward.outcomes import Failed, TimedOut, Value
from tunix.rl.reward.rewards import RewardOutput
from tunix.rl.rollout import shared_rollout, wire
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.utils import array_codec

GOLDEN = pathlib.Path(__file__).parent.parent.parent / "golden"


def rollouts(**columns):
  action = Action([5, 1], text="5", message={"role": "assistant", "content": "5"})
  tokens = Tokens(
    prompt=np.array([2, 3], np.int32),
    ids=np.array([5, 1], np.int32),
    sampling_logps=np.array([-0.1, -0.2], np.float32),
  )
  turn = Turn(
    tokens=tokens,
    action=action,
    reward=0.5,
    logs={"page": object()},
  )
  episode = Episode(turns=[turn], messages=[{"role": "user", "content": "2 3"}])
  outcomes = {"a": [Value(0.1), Failed("why")], "b": [Value(1.0), TimedOut(2.0)]}
  batch = prompt_batch({"prompts": [[2, 3]], **columns}, number=3)
  return Rollouts(
    batch=batch,
    text=["5", "7"],
    finish_reasons=["done", "failed"],
    prompt_ids=np.array([[2, 3], [2, 3]], np.int32),
    prompt_mask=np.ones((2, 2), bool),
    completion_ids=np.array([[5, 1], [7, 0]], np.int32),
    completion_mask=np.array([[True, True], [True, False]]),
    rollout_logps=np.array([[-0.1, -0.2], [-np.pi, 0]], np.float32),
    versions=np.array([[4, 4], [4, 0]], np.int32),
    group_size=2,
    episodes=[episode, Episode(failure="no")],
    rewards=RewardOutput(outcomes=outcomes, weights={"a": 0.5}),
    scores=np.array([[0.1, np.nan]]),
  )


def test_rollouts_return_from_json_as_they_were():
  before = rollouts(answer=["x"])
  after = rollout_codec.from_json(json.loads(json.dumps(rollout_codec.to_json(before))))
  for field in dataclasses.fields(Rollouts):
    a, b = getattr(before, field.name), getattr(after, field.name)
    if isinstance(a, np.ndarray):
      np.testing.assert_array_equal(a, b)
      assert a.dtype == b.dtype
    elif field.name != "episodes":
      assert a == b, field.name
  (turn,), (again,) = before.episodes[0].turns, after.episodes[0].turns
  assert vars(again.action) == vars(turn.action) and again.action == turn.action
  assert again.prompt.tolist() == [2, 3] and again.reward == 0.5
  assert after.episodes[1].failure == "no"
  assert after.episodes[0].messages == before.episodes[0].messages


def test_rollouts_without_recorded_routes_join_those_with_them():
  # A group whose environments all failed has drawn nothing.
  failed = rollouts(answer=["x"])
  routes = np.arange(1, 13, dtype=np.uint8).reshape(2, 1, 3, 2)
  some = {"prompt_routes": routes, "completion_routes": routes}
  both = common.joined([failed, dataclasses.replace(failed, **some)])
  assert both.prompt_routes.shape == (4, 1, 3, 2) and both.prompt_ids.shape == (4, 2)
  assert not both.completion_routes[:2].any()
  np.testing.assert_array_equal(both.completion_routes[2:], routes)
  assert both.completion_routes.dtype == np.uint8


def test_a_column_that_is_not_json_is_named():
  with pytest.raises(TypeError, match=r"cannot be saved as JSON.*complex"):
    rollout_codec.to_json(rollouts(answer=[1j]))


def plain(value):
  """JSON whose arrays show their values: other zlibs compress them otherwise."""
  if isinstance(value, np.ndarray):
    return [str(value.dtype), value.tolist()]
  if isinstance(value, dict):
    return {name: plain(x) for name, x in value.items()}
  return [plain(x) for x in value] if isinstance(value, list) else value


def test_tokens_keep_the_forms_of_an_earlier_version():
  """The JSON of before is read, padded and written again as it was."""
  before = json.loads((GOLDEN / "tokens.json").read_text())
  every = rollout_codec.episodes_from_json(before["episodes"])
  batch = prompt_batch({"prompts": [[2, 3]]}, number=3)
  options = {"bucketed": False, "has_versions": True}
  rollouts = episodes.rollouts_of(every, batch, (4, 8), 2, 2, **options)
  out = shared_rollout.from_json(before["completions"], version=None)
  config = RolloutConfig(max_prompt_length=4, max_tokens_to_generate=4)
  padded = common.rollouts_of(out, batch, config, group_size=2, bucketed=False)
  actions = wire.actions_from_json(before["actions"], version=7)
  after = {
    "episodes": rollout_codec.episodes_to_json(every),
    "rollouts": rollout_codec.to_json(rollouts),
    "actions": wire.actions_to_json(actions),
    "completions": shared_rollout.to_json(RolloutOutput.of(out.completions())),
    "padded": rollout_codec.to_json(padded),
  }
  for name, form in before.items():
    want, got = (plain(array_codec.from_json(x)) for x in (form, after[name]))
    # Checkpoints keep their bytes; the order of keys in a request is free.
    sort = {"sort_keys": name == "actions"}
    assert json.dumps(got, **sort) == json.dumps(want, **sort), name
  read = rollout_codec.from_json(before["rollouts"])
  assert rollout_codec.to_json(read) == before["rollouts"]
