"""Environments of other libraries, with the packages themselves where they install.

The extra `envs` has none of these packages: each one pins many others. The tests run in
an environment that has them.
"""

import threading
import time

import numpy as np
import pytest

from tests import toys_calls
from tests.rl import clusters
from tests.rl.env import fakes
from tunix.rl.env.adapters.gym import GymEnvironment
from tunix.rl.env.adapters.openenv import OpenEnvEnvironment
from tunix.rl.env.config import EpisodeConfig

ENDS = 1  # the end-of-sequence id of `clusters.Words`


class Script(fakes.FixedPolicy):
  """Draws given lists of ids, one a turn."""

  def __init__(self, *turns):
    super().__init__()
    self._turns = turns

  def poll(self):
    ready, self._waiting = self._waiting, []
    return [fakes.drawn(draw.episode, self._turns[draw.turn]) for draw in ready]


def test_gymnasium_frozen_lake():
  gymnasium = pytest.importorskip("gymnasium")
  lake = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
  seen = []

  def shown(observation):
    seen.append(lake.render())
    return str(observation)

  def to_action(text):
    if not text.isdigit() or int(text) - 2 not in range(4):
      raise ValueError(f"{text!r} is no direction")
    return int(text) - 2

  # Left, down, right and up are the ids 2 to 5; 9 is none of them.
  path = [9, 3, 3, 4, 4, 3, 4]
  (episode,) = fakes.run(
    lambda: GymEnvironment(lake, to_action, shown, seed=0, penalty=-0.5),
    policy=Script(*[[i, ENDS] for i in path]),
    max_turns=9,
  )
  assert episode.failure is None and episode.finish_reason == "done"
  assert [turn.reward for turn in episode.turns] == [-0.5, 0, 0, 0, 0, 0, 1]
  assert episode.turns[0].metrics == {"no_action": 1.0}
  # What the policy reads: cells 0, 4, 8, 9, 10, 14 on the way to 15.
  last = episode.turns[-1].prompt.tolist()
  assert [i for i in last if i in (4, 8, 9, 10, 14)][-1] == 14
  assert "SFFF" in seen[0].replace("\x1b[41m", "").replace("\x1b[0m", "")


def test_gymnasium_spaces_of_text_and_a_time_limit():
  gymnasium = pytest.importorskip("gymnasium")

  class Repeats(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(20, charset="0123456789 ")
    action_space = gymnasium.spaces.Text(20, charset="0123456789 ")

    def reset(self, *, seed=None, options=None):
      super().reset(seed=seed, options=options)
      self.wanted = str(int(self.np_random.integers(2, 9)))
      return self.wanted, {}

    def step(self, action):
      reward = np.float64(action.split()[0] == self.wanted)
      return self.wanted, reward, np.bool_(False), False, {}

  limited = gymnasium.wrappers.TimeLimit(Repeats(), max_episode_steps=3)
  (episode,) = fakes.run(
    lambda: GymEnvironment(limited, str, seed=1), policy=fakes.FixedPolicy([5, ENDS])
  )
  assert episode.finish_reason == "done" and len(episode.turns) == 3
  wanted = episode.turns[0].prompt.tolist()
  assert {turn.reward for turn in episode.turns} == {float(wanted == [5])}


@pytest.fixture(scope="module")
def echo_server():
  """A server of OpenEnv whose environment repeats what it gets, at a free port."""
  pytest.importorskip("openenv")
  import uvicorn
  from openenv.core.env_server import http_server, interfaces, types

  class Echo(interfaces.Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
      self.state_ = types.State(episode_id=episode_id, step_count=0)
      first = str(options.get("first", 3))
      return Words(text=first, done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
      self.state_.step_count += 1
      count = len(action.text.split())
      done = self.state_.step_count == 3
      return Words(text=action.text, done=done, reward=None if count > 1 else 1.0)

    @property
    def state(self):
      return self.state_

  app = http_server.create_fastapi_app(Echo, Said, Words, max_concurrent_envs=8)
  server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  end = time.monotonic() + 30
  while not server.started and time.monotonic() < end:
    time.sleep(0.05)
  port = server.servers[0].sockets[0].getsockname()[1]
  yield f"http://127.0.0.1:{port}"
  server.should_exit = True
  thread.join(10)


try:
  from openenv.core.env_server import types as openenv_types
except ImportError:  # the tests that need them are skipped
  pass
else:

  class Said(openenv_types.Action):
    text: str

  class Words(openenv_types.Observation):
    text: str


def test_openenv_echo(echo_server):
  from openenv.core import GenericEnvClient

  def make():
    return OpenEnvEnvironment(
      GenericEnvClient(base_url=echo_server),
      lambda text: {"text": text},
      lambda observation: observation["text"],
      first=7,
    )

  turns = [[5, ENDS], [5, 6, ENDS], [8, ENDS]]
  episodes = fakes.run(make, count=4, policy=Script(*turns))
  for episode in episodes:
    assert episode.failure is None and episode.finish_reason == "done"
    assert episode.turns[0].prompt.tolist() == [7]
    assert episode.turns[2].prompt.tolist() == [7, 5, ENDS, 5, 5, 6, ENDS, 5, 6]
    assert [turn.reward for turn in episode.turns] == [1.0, 0.0, 1.0]


class Letters:
  """A tokenizer of letters, with the methods that renderers of tinker-cookbook call."""

  bos_token = None
  eos_token_id = ENDS

  def encode(self, text, add_special_tokens=False):
    del add_special_tokens
    return [2 + ord(c) % 94 for c in text]

  def decode(self, ids, **_):
    return "".join(chr(94 + (i - 2) if i - 2 < 32 else i - 2) for i in map(int, ids))


def test_a_group_of_tinker_cookbook_trains_unmodified():
  pytest.importorskip("tinker_cookbook")
  from tinker_cookbook.recipes.multiplayer_rl.guess_number import env as cookbook
  from tinker_cookbook.renderers.role_colon import RoleColonRenderer

  from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

  groups = []

  def make(prompt):
    del prompt
    renderer = RoleColonRenderer(Letters())
    groups.append(cookbook.GuessNumberEnvGroupBuilder(7, renderer, 4))
    return groups[-1]

  rollout = {"max_tokens_to_generate": 6, "max_prompt_length": 400}
  learner = GRPOLearner(
    clusters.cluster(rollout=rollout),
    GRPOConfig(num_generations=4, beta=0.0),
    env=make,
    episodes=EpisodeConfig(max_turns=2, max_tokens=256, timeout_s=20),
  )
  seen = []
  learner._rollouts, rollouts = (
    lambda *a, **k: seen.append(rollouts(*a, **k)) or seen[-1],
    learner._rollouts,
  )
  learner.train([{"prompts": ["?"]}])
  assert learner.train_steps == 1
  for episode in seen[0].episodes:
    assert episode.failure is None, episode.failure
    assert len(episode.turns) == 2 and episode.finish_reason == "turns"
    assert {turn.reward for turn in episode.turns} == {cookbook.FORMAT_PENALTY}
    assert episode.turns[0].logs["target"] == 7
  learner.close()


def test_cookbook_rewards_of_a_group_and_the_reason_of_an_end():
  pytest.importorskip("tinker_cookbook")
  import tinker
  from tinker_cookbook.rl import types

  class OneTurn(types.Env):
    async def initial_observation(self):
      return tinker.ModelInput.from_ints([3, 4]), [ENDS]

    async def step(self, action, *, extra=None):
      return types.StepResult(
        reward=float(extra["stop_reason"] == "stop"),
        episode_done=True,
        next_observation=tinker.ModelInput.empty(),
        next_stop_condition=[],
        metrics={"stop/completed": 1.0},
      )

  class Group(types.EnvGroupBuilder):
    async def make_envs(self):
      return [OneTurn(), OneTurn()]

    async def compute_group_rewards(self, trajectory_group, env_group):
      for trajectory in trajectory_group:
        (step,) = trajectory.transitions
        assert step.ob.to_ints() == [3, 4] and step.ob.length == 2
        assert step.ac.tokens == [5, ENDS] and step.ac.maybe_logprobs == [0.0, 0.0]
        assert step.episode_done and trajectory.stop_reason == "completed"
        assert trajectory.final_ob.to_ints() == [3, 4, 5, ENDS]
      return [(10.0, {}), (20.0, {"second": 1})]

  policy = fakes.FixedPolicy([5, ENDS])
  episodes = fakes.run(Group, count=2, policy=policy)
  assert [episode.failure for episode in episodes] == [None, None]
  assert [episode.reward for episode in episodes] == [11.0, 21.0]


def answers(tokenizer, *texts):
  end = tokenizer.eos_ids()[0]
  return Script(*[[*tokenizer.encode(text), end] for text in texts])


def add(a: int, b: int) -> int:
  """Adds two numbers."""
  return a + b


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@pytest.mark.parametrize("kind", ["tools", "turns"])
def test_older_environments_of_verifiers(kind):
  verifiers = pytest.importorskip("verifiers")
  if not hasattr(verifiers, "MultiTurnEnv"):
    pytest.skip("this version of verifiers has no MultiTurnEnv")
  datasets = pytest.importorskip("datasets")
  import pyarrow

  from tunix.rl.env.adapters.verifiers import VerifiersEnvironment

  class Asks(verifiers.MultiTurnEnv):
    async def env_response(self, messages, state, **options):
      return [{"role": "user", "content": "again ?"}]

  async def is_right(completion, answer, **options):
    last = completion[-1]
    content = last["content"] if isinstance(last, dict) else last.content
    return float(answer in content)

  prompt = [{"role": "user", "content": "what is 3 + 4 ?"}]
  row = {"prompt": prompt, "answer": "seven", "example_id": 0}
  table = pyarrow.Table.from_pylist([{**row, "task": "sum"}])
  options = {
    # A fingerprint of ours: some versions of pyarrow and dill cannot make one.
    "dataset": datasets.Dataset(table, fingerprint="test"),
    "rubric": verifiers.Rubric(funcs=[is_right]),
  }
  if kind == "tools":
    environment = verifiers.ToolEnv(tools=[add], **options)
  else:
    environment = Asks(max_turns=2, **options)
  tokenizer = toys_calls.tokenizer_of("qwen25")
  first = CALL if kind == "tools" else "we ask"
  (episode,) = fakes.run(
    lambda: VerifiersEnvironment(environment, row),
    tokenizer=tokenizer,
    policy=answers(tokenizer, first, "it is seven"),
    prompt=800,
  )
  assert episode.failure is None, episode.failure
  assert episode.finish_reason == "done" and episode.reward == 1.0
  new = episode.messages[2]
  assert new["content"] == {"tools": "7", "turns": "again ?"}[kind]
  assert episode.turns[-1].metrics["is_right"] == 1.0
  assert len(episode.rows()) == 1
