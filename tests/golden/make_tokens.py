"""Makes tokens.json: tokens in the JSON forms of an earlier version.

Run it with the last version that had a container for each step of a token:

  git worktree add ../before 2d24565a
  PYTHONPATH=../before python tests/golden/make_tokens.py

The forms are episodes, rollouts of them, the actions and the completions that a
rollout host sends, and rollouts of these completions.
"""

# ruff: noqa: I001 (modules of an earlier version, which are not here)
import json
import pathlib

import numpy as np

from tunix.rl import common, episodes, saved_rollouts
from tunix.rl.env.env import Action
from tunix.rl.env.episode import Episode, Turn
from tunix.rl.env.policy import Drawn
from tunix.rl.pipeline import prompt_batch
from tunix.rl.rollout import shared_rollout
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.utils import json_arrays

RNG = np.random.default_rng(0)
ids = lambda *numbers: np.array(numbers, np.int32)
logps = lambda count: -RNG.random(count, np.float32)
routes = lambda count: RNG.integers(1, 99, (count, 1, 2)).astype(np.uint8)


def turn(prompt, action, version, reward):
  return Turn(
    prompt=ids(*prompt),
    action=Action(action, text=str(action)),
    logps=logps(len(action)),
    versions=np.full(len(action), version, np.int32),
    routes=routes(len(prompt) + len(action)),
    reward=reward,
    metrics={"tries": 1.0},
  )


def main() -> None:
  # Two turns of one row, a row of its own after a rewritten prompt, and a failure.
  one = Episode(
    turns=[
      turn([2, 3], [4, 5], 7, 0.5),
      turn([2, 3, 4, 5, 6], [7], 8, 0.25),
      turn([9, 9, 9, 9, 9, 9], [8, 1], 8, 1.0),
    ],
    messages=[{"role": "user", "content": "2 3"}],
  )
  every = [one, Episode(failure="no", finish_reason="failed")]
  batch = prompt_batch({"prompts": [[2, 3]]}, number=3)
  options = {"bucketed": False, "has_versions": True}
  drawn = Drawn(3, ids(4, 1), logps(2), ids(7, 7), "eos", routes(4))
  out = RolloutOutput(
    text=["4", "5 6"],
    tokens=[ids(4, 1), ids(5, 6, 7)],
    prompt_tokens=[ids(2, 3)] * 2,
    logprobs=[logps(2), logps(3)],
    finish_reasons=["eos", "length"],
    routes=[routes(4), routes(5)],
  )
  config = RolloutConfig(max_prompt_length=4, max_tokens_to_generate=4)
  padded = common.rollouts_of(out, batch, config, group_size=2, bucketed=False)
  made = {
    "episodes": saved_rollouts.episodes_to_json(every),
    "rollouts": saved_rollouts.to_json(
      episodes.rollouts_of(every, batch, (4, 8), 2, 2, **options)
    ),
    "actions": json_arrays.encoded([drawn._asdict()]),
    "completions": shared_rollout.to_json(out),
    "padded": saved_rollouts.to_json(padded),
  }
  file = pathlib.Path(__file__).with_name("tokens.json")
  file.write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
  main()
