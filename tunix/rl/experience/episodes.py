"""Rollouts by environments: runs prompts as episodes, and pads the episodes' rows."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from tunix.data.records import IMAGE_TOKENS_COLUMN
from tunix.generate.decoders import images as images_lib
from tunix.generate.sizes import batching
from tunix.generate.tokens import Tokens
from tunix.rl import row_arrays
from tunix.rl.common import Rollouts
from tunix.rl.env import making
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.episode import Episode
from tunix.rl.env.live import MakeGroup
from tunix.rl.env.making import MakeEnv
from tunix.rl.env.processes import EnvProcesses
from tunix.rl.env.runner import Runner
from tunix.rl.experience import rollout_codec
from tunix.rl.metrics import Mean
from tunix.rl.pipeline import PROMPTS, PromptBatch
from tunix.rl.reward.outcomes import Failed, Outcome, checked
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.client import SamplingClient
from tunix.sft.metrics_logger import Mode
from tunix.utils import checks, coordination
from tunix.utils.metric import Metric

_WITH_ENV = "if completions are episodes in environments"
METRICS = (
  Metric("episodes/turns", "actions", "mean number of actions", "train", _WITH_ENV),
  Metric(
    "episodes/observation_tokens",
    "tokens",
    "mean number of tokens that environments added",
    "train",
    _WITH_ENV,
  ),
  Metric(
    "episodes/rows", "rows", "mean number of rows that are trained", "train", _WITH_ENV
  ),
  Metric(
    "episodes/malformed_calls",
    "share",
    "actions with a call of a tool that could not be read",
    "train",
    _WITH_ENV,
  ),
  Metric(
    "episodes/finish/<reason>",
    "share",
    "episodes that ended for this reason: done, turns, tokens, observation, seconds, "
    "failed",
    "train",
    _WITH_ENV,
  ),
  Metric(
    "env/<name>",
    "of the environment",
    "mean of a number that environments gave with their answers",
    "train",
    _WITH_ENV,
  ),
  Metric(
    "perf/env_wait_sec",
    "s",
    "time in which nothing was drawn, because all episodes waited for environments",
    condition=_WITH_ENV,
  ),
)


class Episodes:
  """Draws the completions of batches in environments.

  Args:
    cluster: the models.
    make: makes the environments, see `tunix.rl.env.making`.
    config: limits; None: the defaults.
    bucketed: see `setup.buckets_lengths`.

  Attributes:
    config: the limits.

  Raises:
    TypeError: `make` cannot be called.
    ValueError: there is a reward model, `rollout_micro_batch_size` is set, or there are
      several processes that share one engine.
  """

  def __init__(
    self,
    cluster: RLCluster,
    make: MakeEnv,
    config: EpisodeConfig | None = None,
    *,
    bucketed: bool = True,
  ):
    if not callable(make):
      raise TypeError(
        f"env is {checks.type_of(make)}, expected a function env(prompt, **columns) "
        "that makes an environment"
      )
    if jax.process_count() > 1 and cluster.rollout.mesh is None:
      raise ValueError(
        f"env is set and there are {jax.process_count()} processes, whose environments "
        'cannot share one engine: set rollout_engine to "per_process", or start one '
        "process with all devices"
      )
    size = cluster.cluster_config.training_config.rollout_micro_batch_size
    if size is not None:
      raise ValueError(
        f"env is set and rollout_micro_batch_size is {size}, but all episodes of a "
        "batch run at once: bound the completions at once by rollout.slots "
        "(RolloutConfig.slots) instead"
      )
    if cluster.reward is not None:
      raise ValueError(
        "env is set and there is a reward model, which reads one answer: give the "
        "reward in the environment, or as a reward function"
      )
    self._cluster, self._make, self._bucketed = cluster, make, bucketed
    self.config = EpisodeConfig() if config is None else config
    self._processes = processes_of(make, self.config)
    self._waited_s = 0.0

  def check_columns(self, columns: Iterable[str]) -> None:
    """Checks that the data has the columns that `env` needs.

    Raises:
      ValueError: a column is missing.
    """
    making.arguments(self._make, dict.fromkeys(["prompt", *columns]))

  def rollouts(
    self, batch: PromptBatch, mode: Mode, group: int, key: jax.Array
  ) -> Rollouts:
    """Runs the episodes of a batch; reward functions run later.

    With several processes, each one runs the episodes of its share of the prompts. It
    receives the other episodes without their environments.

    Args:
      batch: the prompts.
      mode: the mode whose sampling settings are used.
      group: completions of each prompt.
      key: key of the batch.

    Raises:
      AbsentError: another process failed, or did not join in time.
      TypeError: a message of an environment is not JSON, with several processes.
    """
    _check_prompts(batch)
    mine = coordination.share(len(batch.prompts))
    run = functools.partial(self._share, batch, mine, mode, group, key)
    if jax.process_count() == 1:
      return self._rows(run(), batch, mode, group)

    def to_json():
      return rollout_codec.episodes_to_json(run())

    parts = self._cluster.rollout.exchange("episodes", to_json)
    episodes = [x for part in parts for x in rollout_codec.episodes_from_json(part)]
    return self._rows(episodes, batch, mode, group)

  def _share(
    self, batch: PromptBatch, mine: range, mode: Mode, group: int, key: jax.Array
  ) -> list[Episode]:
    """Runs the episodes of some prompts of a batch."""
    config = self._cluster.cluster_config.rollout(mode)
    most = self.config.new_tokens(config.max_tokens_to_generate)
    limit = config.max_prompt_length + most
    sizes = {"episodes": len(mine) * group, "limit": limit, "first": mine.start * group}
    if not mine:
      return []
    with self._cluster.sampling_client(mode, key, **sizes) as client:
      episodes, waited_s = self._run(batch.take(mine), mode, group, client)
    self._waited_s += waited_s
    return episodes

  def run(
    self, batch: PromptBatch, mode: Mode, group: int, client: SamplingClient
  ) -> Rollouts:
    """Runs the episodes of a batch in this process; safe in several threads.

    Args:
      batch, mode, group: see `rollouts`.
      client: draws the actions; its episodes are numbered from 0. The rollouts have the
        versions of its tokens.
    """
    episodes, _ = self._run(batch, mode, group, client)
    return self._rows(episodes, batch, mode, group, has_versions=True)

  def _run(
    self, batch: PromptBatch, mode: Mode, group: int, client: SamplingClient
  ) -> tuple[list[Episode], float]:
    """Returns the episodes, and the seconds in which only environments worked."""
    cluster, config = self._cluster, self._cluster.cluster_config.rollout(mode)
    makers = makers_of(self._make, batch, group, self._processes)
    runner = Runner(
      cluster.tokenizer,
      self.config,
      max_prompt_length=config.max_prompt_length,
      max_action_tokens=config.max_tokens_to_generate,
      reader=cluster.images,
      forbidden=() if cluster.images is None else images_lib.forbidden(cluster.actor),
    )
    return runner.run(makers, group, client), runner.waited_s

  def _rows(
    self,
    episodes: list[Episode],
    batch: PromptBatch,
    mode: Mode,
    group: int,
    *,
    has_versions: bool = False,
  ) -> Rollouts:
    config = self._cluster.cluster_config.rollout(mode)
    most = self.config.new_tokens(config.max_tokens_to_generate)
    widths = config.max_prompt_length, most
    options = {"bucketed": self._bucketed, "has_versions": has_versions}
    if (reader := self._cluster.images) is not None:
      options["blank"] = reader.row((), self.config.max_image_tokens)
    return rollouts_of(episodes, batch, widths, group, self.config.max_rows, **options)

  def close(self) -> None:
    """Ends the processes of environments."""
    if self._processes is not None:
      self._processes.close()

  def take_waited(self) -> float:
    """Returns the seconds since the last call in which only environments worked."""
    waited, self._waited_s = self._waited_s, 0.0
    return waited


def _check_prompts(batch: PromptBatch) -> None:
  """Refuses rendered texts of prompts with images, which have lost their parts.

  Raises:
    ValueError: see above.
  """
  rooms = batch.columns.get(IMAGE_TOKENS_COLUMN, [0])
  if any(rooms) and any(isinstance(prompt, str) for prompt in batch.prompts):
    raise ValueError(
      "prompts with images are rendered texts and env is set; expected messages with "
      'parts. Pass batches {"prompts": [[message, ...], ...]} in place of build_prompts'
    )


def processes_of(make: MakeEnv, config: EpisodeConfig) -> EnvProcesses | None:
  """Returns the processes of environments; None if they run in this process."""
  if config.isolation != "process":
    return None
  one = functools.partial(making.one, make)
  return EnvProcesses(one, timeout_s=config.timeout_s, memory_bytes=config.memory_bytes)


def makers_of(
  make: MakeEnv, batch: PromptBatch, group: int, processes: EnvProcesses | None
) -> list[MakeGroup]:
  """Returns functions that make the environments of each prompt of a batch.

  Raises:
    ValueError: the batch has no column for an argument of `make`.
  """
  makers = []
  for row in batch.rows():
    values = {"prompt": row.pop(PROMPTS), **row}
    # Checked here, because a missing column must end the run and not one episode.
    making.arguments(make, values)
    made = functools.partial(making.one, make, values)
    if processes is not None:
      made = functools.partial(processes.environment, values=values)
    makers.append(functools.partial(making.group_of, made, group))
  return makers


def rollouts_of(
  episodes: Sequence[Episode],
  batch: PromptBatch,
  widths: tuple[int, int],
  group_size: int,
  max_rows: int,
  *,
  bucketed: bool,
  has_versions: bool = False,
  blank: Any = None,
) -> Rollouts:
  """Pads the rows of episodes to arrays.

  Args:
    episodes: the episodes, group by group.
    batch: their prompts.
    widths: most tokens of a prompt, and most tokens of a row after its prompt.
    group_size: episodes of a prompt.
    max_rows: most rows of an episode; one with more fails.
    bucketed: see `PromptSizes.bucketed_lengths`.
    has_versions: if True, the rollouts have the versions of the drawn tokens.
    blank: the images of a row without images; None: no row has some.
  """
  rows = [_rows_of(episode, max_rows) for episode in episodes]
  # A power of two, so that few programs are compiled.
  most = max(map(len, rows), default=1)
  each = min(max_rows, batching.bucket(max(1, most)))
  width, space = widths
  # The prompt of a later row holds the conversation so far, and may be too long.
  placed = [x.with_prompt_of(width) for group in rows for x in _filled(group, each)]
  if bucketed:

    def longest(parts):
      return batching.bucket(max(map(len, parts)), batching.MIN_TOKENS)

    width = min(width, longest([row.prompt for row in placed]))
    space = min(space, longest([row.ids for row in placed]))
  if not has_versions:
    placed = [dataclasses.replace(row, versions=None) for row in placed]
  return Rollouts(
    batch=batch,
    text=[episode.text for episode in episodes],
    finish_reasons=[episode.finish_reason for episode in episodes],
    group_size=group_size,
    episodes=list(episodes),
    episode_rows=each,
    images=None if blank is None else _images_of(episodes, rows, each, blank),
    **row_arrays.of(placed, width, space),
  )


def _images_of(
  episodes: Sequence[Episode], rows: Sequence[list[Tokens]], count: int, blank: Any
) -> Any:
  """Returns the images of the rows of episodes, with `count` rows for each."""
  pixels = []
  for episode, own in zip(episodes, rows):
    seen = episode.row_images() if own else [None]
    seen += seen[:1] * (count - len(seen))  # added rows have the prompt of the first
    pixels += [blank if x is None else x.pixels for x in seen]
    # The rows have the pixels from here on.
    episode.turns = [dataclasses.replace(turn, images=None) for turn in episode.turns]
  return jax.tree.map(lambda *x: np.stack(x), *pixels)


def _rows_of(episode: Episode, most: int) -> list[Tokens]:
  rows = [] if episode.failure else episode.rows()
  if len(rows) > most:
    episode.finish_reason = "failed"
    episode.failure = (
      f"the episode has {len(rows)} rows, and max_rows is {most}: raise max_rows, or "
      'set history="keep" if a chat template rewrites earlier answers'
    )
    return []
  return rows


def _filled(rows: list[Tokens], count: int) -> list[Tokens]:
  """Adds rows without a drawn token, up to `count` rows."""
  prompt = rows[0].prompt if rows else np.zeros(1, np.int32)
  # If every environment failed, only these rows give the batch its columns.
  columns = dict.fromkeys(("sampling_logps", "rewards", "versions"), np.zeros(0))
  return [*rows, *[Tokens(prompt=prompt, **columns)] * (count - len(rows))]


def outcomes_of(episodes: Sequence[Episode]) -> list[Outcome]:
  """Returns the rewards of episodes; an episode that failed has none."""
  return [
    checked(episode.reward, "the sum of rewards is")
    if episode.failure is None
    else Failed(episode.failure)
    for episode in episodes
  ]


def columns_of(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
  """Returns the columns that reward functions receive in addition to the answers.

  `environments` has the environments (those of TRL as the user made them), and
  `conversations` the messages.
  """
  if not episodes:
    return {}
  envs = [episode.environment for episode in episodes]
  return {
    making.ENVIRONMENTS: [getattr(env, "environment", env) for env in envs],
    making.CONVERSATIONS: [episode.messages for episode in episodes],
  }


def metrics_of(episodes: Sequence[Episode]) -> dict[str, Mean]:
  """Returns the metrics of episodes; {} if there are no episodes."""
  if not episodes:
    return {}

  def mean(values):
    return Mean(float(np.mean(values)), len(values))

  rows = [episode.rows() for episode in episodes]
  drawn = [sum(len(turn.action) for turn in episode.turns) for episode in episodes]
  observed = [
    sum(len(row.ids) for row in each) - count for each, count in zip(rows, drawn)
  ]
  actions = [turn.action for episode in episodes for turn in episode.turns]
  out = {
    "episodes/turns": mean([len(episode.turns) for episode in episodes]),
    "episodes/observation_tokens": mean(observed),
    "episodes/rows": mean([len(each) for each in rows]),
  }
  if actions:
    out["episodes/malformed_calls"] = mean([a.problem is not None for a in actions])
  reasons = [episode.finish_reason for episode in episodes]
  for reason in sorted(set(reasons)):
    out[f"episodes/finish/{reason}"] = mean([r == reason for r in reasons])
  named: dict[str, list[float]] = collections.defaultdict(list)
  for episode in episodes:
    for values in (episode.metrics, *(turn.metrics for turn in episode.turns)):
      for name, value in values.items():
        named[name].append(value)
  return out | {f"env/{name}": mean(values) for name, values in sorted(named.items())}
