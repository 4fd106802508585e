"""Options of a sampler's call, checked in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.generate.drawing import filters as filters_lib
from tunix.generate.drawing.params import SamplingParams
from tunix.models.images.prompt_images import PromptImages
from tunix.utils import checks
from tunix.utils.setting import field_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions(SamplingParams):
  """The options of one call; `BaseSampler.__call__` describes each of them.

  Raises:
    TypeError: see `SamplingParams`.
    ValueError: see `SamplingParams`; or two options exclude each other.
  """

  max_generation_steps: int | Sequence[int]
  max_prompt_length: int | None = None
  echo: bool = False
  return_logits: bool = False
  forbidden_tokens: Sequence[int] | None = None
  beam_size: int | None = None
  pad_output: bool = False
  num_samples: int = 1
  return_logprobs: bool = False
  include_eos: bool = False
  length_penalty: float = 1.0
  exact: bool = False
  return_routes: bool = False
  first_prompt: int = 0
  images: Sequence[PromptImages | None] = ()
  engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    steps = np.asarray(self.max_generation_steps)
    if steps.dtype.kind not in "iu" or steps.ndim > 1 or np.any(steps < 1):
      raise ValueError(
        f"max_generation_steps is {self.max_generation_steps}, expected at least 1: "
        "give an int, or one int for each prompt"
      )
    checks.fields(
      self,
      num_samples=checks.COUNT,
      beam_size=checks.COUNT,
      max_prompt_length=checks.COUNT,
      first_prompt=checks.NOT_NEGATIVE,
      forbidden_tokens=checks.NOT_NEGATIVE,
    )
    if not any(self.images or ()):
      object.__setattr__(self, "images", ())
    self._check_exact()
    self._check_beams()

  def _check_exact(self) -> None:
    if not self.exact:
      return
    if not self.return_logprobs:
      raise ValueError(
        "exact is True and return_logprobs is False: exact changes log-probs only. "
        "Give return_logprobs=True as well"
      )
    if self.filters or self.forbidden_tokens:
      raise ValueError(
        "exact is True, which scores under softmax(logits / temperature): leave top_k, "
        "top_p, min_p and forbidden_tokens out"
      )
    if self.images:
      raise ValueError(
        "exact is True, which scores rows without images: leave exact or the images out"
      )
    if self.return_routes:
      raise ValueError(
        "exact and return_routes are True; expected at most one: exact scores use the "
        "experts that routers choose while scoring. Leave one out"
      )

  def _check_beams(self) -> None:
    if self.beam_size is None:
      if self.length_penalty != 1.0:
        raise ValueError(
          f"length_penalty is {self.length_penalty} and only beams are compared by "
          "length: give beam_size, or leave it out"
        )
      return
    if self.num_samples > self.beam_size:
      raise ValueError(
        f"num_samples is {self.num_samples} of {self.beam_size} beams: raise beam_size"
      )
    excluded = {
      "temperature": self.temperature > 0,
      "stop_strings": bool(self.stops),
      "return_logits": self.return_logits,
      "return_routes": self.return_routes,
    }
    for name, is_used in excluded.items():
      if is_used:
        raise ValueError(f"{name} cannot be combined with beam_size: leave one out")

  @property
  def active(self) -> set[str]:
    """Names of the options that change the output."""
    values = field_values(self)
    names = {
      field.name
      for field in dataclasses.fields(self)
      if not _is_default(values[field.name], field.default)
    }
    idle = filters_lib.OFF.keys() - self.filters.keys()
    if self.temperature == 0:  # no token is sampled, so these options have no effect
      idle |= {"seed", "first_prompt"}
    return names - idle

  def refuse(self, names: Collection[str], sampler: str, remedy: str) -> None:
    """Refuses a call that uses an option which the sampler does not honor.

    Args:
      names: options that are not honored.
      sampler: subject of the message.
      remedy: end of the message: what to do besides leaving the option out.

    Raises:
      ValueError: one of the options is active.
    """
    if refused := sorted(self.active & set(names)):
      raise ValueError(
        f"{sampler} does not honor {' and '.join(refused)}: leave that out, or {remedy}"
      )

  def images_of(self, prompts: int) -> Sequence[PromptImages | None]:
    """Returns the images of each prompt.

    Raises:
      ValueError: the number of entries is not the number of prompts.
    """
    if self.images and len(self.images) != prompts:
      raise ValueError(
        f"images has {len(self.images)} entries for {prompts} prompts: give one entry "
        "for each prompt, None for a prompt without images"
      )
    return self.images or (None,) * prompts

  def limits(self, prompts: int) -> np.ndarray:
    """Returns the largest number of new tokens for the rows of each prompt, int32 [P].

    Raises:
      ValueError: the number of limits is not the number of prompts.
    """
    steps = np.asarray(self.max_generation_steps, np.int32)
    if steps.ndim and len(steps) != prompts:
      raise ValueError(
        f"max_generation_steps has {len(steps)} entries for {prompts} prompts: give "
        "one int, or one int for each prompt"
      )
    return np.broadcast_to(steps, (prompts,))


def _is_default(value: object, default: object) -> bool:
  """Returns True for the default, None and empty sequences."""
  if value is None:
    return True
  if isinstance(value, Sequence | Mapping | np.ndarray):
    return len(value) == 0
  return value is default or (isinstance(value, int | float) and value == default)
