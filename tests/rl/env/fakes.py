"""A policy without a model, for tests of episodes that take milliseconds."""

import numpy as np

from tests.rl.clusters import Words
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Completion
from tunix.rl.env import making
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.runner import Runner


class FixedPolicy:
  """Draws the same ids at every turn."""

  vocab_size = None

  def __init__(self, ids=(3, 4)):
    self._ids, self._waiting = np.array(ids, np.int32), []
    self.draws = []

  @property
  def open(self):
    return len(self._waiting)

  def submit(self, draws):
    self._waiting += draws
    self.draws += draws

  def poll(self):
    ready, self._waiting = self._waiting, []
    return [drawn(draw.episode, self._ids) for draw in ready]


def run(make, *, count=1, groups=1, policy=None, tokenizer=None, prompt=64, **limits):
  """Runs groups of `count` episodes whose environments `make` makes."""
  tokenizer = TokenizerAdapter(Words()) if tokenizer is None else tokenizer
  config = EpisodeConfig(**limits)
  runner = Runner(tokenizer, config, max_prompt_length=prompt, max_action_tokens=8)
  maker = lambda: making.group_of(make, count)
  return runner.run([maker] * groups, count, policy or FixedPolicy())


def drawn(episode, ids, finish_reason="stop"):
  """An action with given ids."""
  return Completion(
    number=episode,
    ids=np.array(ids, np.int32),
    sampling_logps=np.zeros(len(ids), np.float32),
    finish_reason=finish_reason,
  )
