"""Schedules without a model: a stream, a cluster and rewards that take milliseconds."""

import dataclasses
import types

import jax
import numpy as np

from tests.rl import clusters
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Completion
from tunix.rl import common
from tunix.rl.metrics import Phases
from tunix.rl.pipeline import PromptSource
from tunix.rl.rollout import one_turn
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.client import ClientLost
from tunix.rl.weights.placement import Weights
from tunix.rl.weights.policy_version import PolicyVersion
from tunix.sft.metrics_logger import Mode

CONFIG = RolloutConfig(max_tokens_to_generate=4, max_prompt_length=8)
GENERATIONS = 2


class FakeStream:
  """Completes three actions a launch, whose ids depend on what an engine's depend on.

  Args:
    lost_at: numbers of launches, over all streams of a run, at which one is lost.
  """

  vocab_size: int | None = None

  def __init__(self, lost_at):
    self._waiting, self._version, self._lost_at = [], 0, lost_at
    self.launches = 0

  @property
  def open(self):
    return len(self._waiting)

  def submit(self, draws):
    self._waiting += draws

  def load(self, weights):
    self._version = weights.version.step

  def cancel(self):
    self._waiting.clear()

  def poll(self):
    self.launches += 1
    if self._lost_at and self.launches >= self._lost_at[0]:
      self._lost_at.pop(0)
      raise ClientLost("the host fake was lost")
    ready, self._waiting = self._waiting[:3], self._waiting[3:]
    return [self._drawn(draw) for draw in ready]

  def _drawn(self, draw):
    key = int(jax.random.key_data(draw.key)[-1])
    parts = [*draw.group, draw.episode, key, self._version, self.launches]
    ids = np.array([2 + x % 7 for x in parts[:4]], np.int32)
    # The last bits of an engine's numbers depend on what else is in a launch.
    logps = np.full(4, -1.0 - 0.01 * self.launches, np.float32)
    versions = np.full(4, self._version, np.int32)
    return Completion(
      number=draw.id,
      ids=ids,
      sampling_logps=logps,
      versions=versions,
      finish_reason="length",
    )


class WholeBatch(FakeStream):
  """Draws with one key."""

  def __init__(self, key):
    super().__init__([])
    self._key = key

  def submit(self, draws):
    more = {"group": (0, 0), "key": self._key}
    super().submit([dataclasses.replace(draw, **more) for draw in draws])


class FakeCluster:
  """The weights of a run, which are numbers of updates; also its rollout."""

  mesh, engine_count, actor, perf = None, 1, None, None

  def __init__(self, lost_at=()):
    self.lost_at, self.loaded = list(lost_at), []
    self.rollout = self.actor_trainer = self.cluster_config = self
    self.train_steps = 0
    self.cluster_config = types.SimpleNamespace(rollout=lambda mode: CONFIG)

  def check_stream(self):
    pass

  def sampling_stream(self, config, rows, limit):
    return FakeStream(self.lost_at)

  @property
  def version(self):
    return PolicyVersion(self.train_steps, f"stamp {self.train_steps}")

  def weights(self):
    return Weights(version=self.version, arrays={})

  def load_weights(self, weights):
    self.loaded.append(weights.version.step)


class FakeExperience:
  """Draws one action a completion; a whole batch draws from the newest weights."""

  def __init__(self, cluster):
    self.phases, self.measured, self._cluster = Phases(), [], cluster
    self._tokenizer = TokenizerAdapter(clusters.Words())

  def key(self, batch, number):
    return jax.random.key(100 * batch.number + number)

  def add(self, measured, phases):
    self.measured += measured

  def sample_group(self, batch, client, phases):
    ids = np.array([int(word) for word in batch.prompts[0].split()], np.int32)
    out = one_turn.completions(self._tokenizer, ids, CONFIG, GENERATIONS, client)
    options = {"group_size": GENERATIONS, "bucketed": False}
    return common.rollouts_of(out, batch, CONFIG, **options)

  def rollouts(self, batch, mode, number, shape_rewards, *, measured=(), phases=None):
    parts = [
      self.sample_group(batch.take([n]), WholeBatch(self.key(batch, number)), phases)
      for n in range(len(batch.prompts))
    ]
    return dataclasses.replace(common.joined(parts), versions=None)

  def with_images(self, rollouts):
    return rollouts

  def shaped(self, rollouts, shape_rewards, measured):
    return rollouts


def train(schedule, cluster, batches):
  """Trains as a learner does; returns the rollouts of all steps."""
  source, seen = PromptSource(batches), []
  try:
    schedule.begin()
    while schedule.has_more(source):
      if (batch := schedule.next(source, len(seen))) is None:
        break
      seen.append(schedule.rollouts(batch, Mode.TRAIN, len(seen)))
      cluster.train_steps += 1
      schedule.commit()
      source.commit()
    schedule.end()
  finally:
    schedule.close()
  return seen
