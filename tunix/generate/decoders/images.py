"""Prompts with images: what a call or a request must fulfill."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tunix.generate.drawing.options import SamplingOptions
from tunix.models import calling
from tunix.models.images.prompt_images import PromptImages
from tunix.utils import checks


def soft_token(model: Any) -> int:
  """Returns the id of the tokens that images' vectors replace.

  Raises:
    ValueError: the model has no vision tower.
  """
  token = calling.config_value(model, "soft_token")
  if token is None:
    raise ValueError(
      f"a prompt has images and the model is {checks.type_of(model)}; expected a "
      "model with a vision tower. Load the model with images=True "
      "(docs/guides/images.md lists the families), or leave the images out"
    )
  return token


def check(model: Any, prompt: np.ndarray, images: PromptImages | None) -> None:
  """Refuses a prompt whose soft tokens are not those of its images.

  Raises:
    ValueError: the numbers differ, or the model has no vision tower.
  """
  soft = soft_token(model)
  found = int(np.sum(prompt == soft))
  counts = [] if images is None else list(images.counts)
  if found != sum(counts):
    raise ValueError(
      f"a prompt has {found} image tokens (id {soft}) and images of {counts} tokens; "
      "expected equal sums. Write the tokens of each image where it belongs "
      "(ImageReader.expand), and do not cut prompts with images"
    )


def forbidding(model: Any, options: SamplingOptions) -> SamplingOptions:
  """Returns the options of a call; with images, the soft token is forbidden.

  A drawn soft token would have no image, and its row could not be scored.
  """
  given = tuple(options.forbidden_tokens or ())
  if not options.images or not (more := {*forbidden(model)} - {*given}):
    return options
  return dataclasses.replace(options, forbidden_tokens=(*given, *more))


def forbidden(model: Any) -> tuple[int, ...]:
  """Returns the ids that are never drawn in calls with images."""
  soft = soft_token(model)
  return (soft,) if soft < calling.config_value(model, "vocab_size") else ()
