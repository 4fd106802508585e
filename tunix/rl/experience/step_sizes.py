"""The mini-batches of a step of RL: how many rows, and which."""

from __future__ import annotations

from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.common import TrainExample, mini_batches
from tunix.rl.config import PromptSizes


def mini_rows(sizes: PromptSizes, group: int, largest: int) -> int:
  """Returns the number of completions of a mini-batch.

  If no size is set, it is that of the largest batch so far. A smaller batch, such as
  the last one of the data, is padded to it, so that its update runs a program that is
  already compiled.

  Args:
    sizes: settings of the run.
    group: completions of a prompt.
    largest: completions of the largest batch so far.
  """
  if (mini := sizes.mini_batch_size) is not None:
    return mini * group
  micro = (sizes.train_micro_batch_size or 1) * group
  return -(-largest // micro) * micro


def minis(
  example: TrainExample,
  config: AlgorithmConfig,
  *,
  rows: int,
  shuffle: tuple[int, int] | None,
) -> list[TrainExample]:
  """Cuts the mini-batches of all iterations.

  Args:
    example: a whole batch.
    config: settings of the algorithm.
    rows: rows of a mini-batch.
    shuffle: seed and number of the batch; None: the order of the prompts.

  Raises:
    ValueError: no completion has weight.
  """
  out = list(
    mini_batches(
      example,
      group=config.num_generations * example.episode_rows,
      rows=rows,
      iterations=config.num_iterations,
      shuffle=shuffle,
    )
  )
  if not out:
    raise ValueError(
      "no completion of a whole batch has weight: every reward failed, or every "
      "completion was truncated under mask_truncated; look at rewards/failed and "
      "completions/truncated, and at the errors of the reward functions"
    )
  return out


def parts(mini: TrainExample, sizes: PromptSizes, config: AlgorithmConfig) -> int:
  """Returns the number of micro-batches of a mini-batch."""
  if (micro := sizes.train_micro_batch_size) is None:
    return 1
  return mini.rows // (micro * config.num_generations * mini.episode_rows)
