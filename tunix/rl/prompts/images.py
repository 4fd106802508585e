"""The images of prompts: their pixels, and what cannot be combined with them yet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from tunix.data.images import ImageReader
from tunix.data.records import IMAGE_TOKENS_COLUMN, IMAGES_COLUMN
from tunix.models import calling
from tunix.models.images.prompt_images import PromptImages
from tunix.rl.rollout.vanilla_rollout import PaddedRollout, VanillaRollout
from tunix.sft.metrics_logger import Mode
from tunix.utils import checks


class BatchImages(NamedTuple):
  """The images of a batch of prompts.

  Attributes:
    prompts: images of each prompt, for `Sampler`; None for a prompt without images.
    rows: pixels of all prompts, stacked: the model's argument `images`, [P, ...].
  """

  prompts: Sequence[PromptImages | None]
  rows: Any


def read(reader: ImageReader | None, batch: Any) -> BatchImages | None:
  """Reads the images of a batch; None if its prompts have no columns of images.

  Args:
    reader: the reader of the cluster.
    batch: a `PromptBatch` of `tunix.data.questions.build_prompts`, or of the command.

  Raises:
    ValueError: there is no reader; or an image is missing or damaged, or has another
      number of tokens than when the prompts were made.
  """
  if (capacities := batch.columns.get(IMAGE_TOKENS_COLUMN)) is None:
    return None
  if reader is None:
    raise ValueError(
      "images of RLCluster is None and the prompts have images; expected an "
      "ImageReader. Pass RLCluster(images=ImageReader(...))"
    )

  def one(number: int) -> PromptImages | None:
    where = f"prompt {number} of batch {batch.number}"
    pictures = reader.open(batch.columns[IMAGES_COLUMN][number], None, where)
    reader.check(np.asarray(batch.inputs[number]), pictures)
    return reader.prompt(pictures, max(capacities))

  # Pillow and NumPy let other threads run.
  with futures.ThreadPoolExecutor() as pool:
    prompts = list(pool.map(one, range(len(capacities))))
  blank = reader.row((), max(capacities))
  rows = [blank if prompt is None else prompt.pixels for prompt in prompts]
  return BatchImages(prompts, jax.tree.map(lambda *x: np.stack(x), *rows))


def check_image_support(
  cluster: Any, *, env_room: int | None, reads_hints: bool
) -> None:
  """Checks a cluster that reads images.

  Args:
    cluster: the models and their settings.
    env_room: `EpisodeConfig.max_image_tokens`; None without environments.
    reads_hints: True if a teacher reads the prompts with a hint.

  Raises:
    ValueError: a setting cannot be combined with images, or a model reads text alone.
  """
  schedule = cluster.cluster_config.training_config.schedule
  engine, ours = type(cluster.rollout), (VanillaRollout, PaddedRollout)
  replays = cluster.cluster_config.rollout(Mode.TRAIN).replay_routes
  for is_set, what, remedy in (
    (
      env_room == 0,
      "env is set, max_image_tokens is 0",
      "Set max_image_tokens of the episodes (episode.max_image_tokens)",
    ),
    (
      env_room is not None and schedule == "greedy",
      "env is set, schedule is 'greedy'",
      "Set schedule to sync or lagged",
    ),
    (reads_hints, "the algorithm is SDPO", "Use another algorithm"),
    (
      engine not in ours,
      f"rollout_engine is {engine.__name__}",
      'Set rollout_engine to "vanilla" or "padded"',
    ),
    (replays, "replay_routes is True", "Set replay_routes to False"),
  ):
    if is_set:
      raise ValueError(
        f"{what} and prompts have images; expected prompts without images. {remedy}, "
        "or remove the images"
      )
  models = {"actor": cluster.actor, "critic": cluster.critic}
  models |= {"reference": cluster.reference, "reward model": cluster.reward}
  for role, model in models.items():
    if model is not None and not reads_images(model):
      raise ValueError(
        f"the {role} is {checks.type_of(model)}, which reads text alone, and prompts "
        "have images: load it with images=True (model.images), or leave the images out"
      )


def reads_images(model: nnx.Module) -> bool:
  """Returns True if a model's call takes images."""
  return "images" in calling.call_parameters(model)
