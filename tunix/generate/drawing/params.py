"""The rules by which tokens are drawn, and by which a completion ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax

from tunix.generate.drawing import filters as filters_lib, stops as stops_lib
from tunix.utils import attributes, checks

# Logits are divided by the temperature. A difference of 1e4 becomes 1e14 with 1e-10,
# and with 1e-38 it would exceed 3e38, the largest float32.
_LOWEST_TEMPERATURE = 1e-10

_RANGES = {
  "temperature": checks.NOT_NEGATIVE,
  "top_p": checks.Range(0, 1, beyond=True),
  "top_k": checks.COUNT,
  "min_p": checks.SHARE,
  "seed": checks.SEED,
  "eos_tokens": checks.NOT_NEGATIVE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """The rules of drawing and ending, the same for every way to ask for completions.

  The options of a sampler's call, the requests of an engine, and the settings of
  rollouts and of on-policy distillation are subclasses, which add what only they need.
  `of` takes the rules of one to another.

  Attributes:
    temperature: 0 takes the most likely token; above 0, tokens are sampled from
      softmax(logits / temperature).
    top_p: sample from the most likely tokens with this total probability; None: all.
    top_k: sample from this number of the most likely tokens; None: all.
    min_p: sample from tokens with at least min_p times the probability of the most
      likely one; None: all.
    seed: an int or a jax.random key; None: another one each time.
    eos_tokens: ids that end a completion; None: the tokenizer's.
    stop_strings: texts that end a completion.

  Raises:
    TypeError: a number or a stop string has another type.
    ValueError: a number is out of range, or there is a filter at temperature 0.
  """

  temperature: float = 0.0
  top_p: float | None = None
  top_k: int | None = None
  min_p: float | None = None
  seed: int | jax.Array | None = None
  eos_tokens: Sequence[int] | None = None
  stop_strings: str | Sequence[str] | None = ()

  # Rules whose keyword has another name in a subclass: {rule: keyword}. The subclass
  # declares the rule again with `field(init=False)`.
  _keywords: ClassVar[Mapping[str, str]] = {}

  def __post_init__(self):
    for rule, keyword in self._keywords.items():
      object.__setattr__(self, rule, getattr(self, keyword))
    keywords = self.keywords()
    checks.fields(self, **{keywords[rule]: x for rule, x in _RANGES.items()})
    if 0 < self.temperature < _LOWEST_TEMPERATURE:
      raise ValueError(
        f"temperature is {self.temperature}, expected 0 (greedy) or at least "
        f"{_LOWEST_TEMPERATURE:g}: logits overflow when they are divided by less"
      )
    if self.temperature == 0 and self.filters:
      name, value = next(iter(self.filters.items()))
      raise ValueError(
        f"{name} is {value}, and at temperature 0 no token is sampled. Raise the "
        f"temperature, or leave {name} out"
      )
    stops_lib.check(self.stops)

  @classmethod
  def keywords(cls) -> dict[str, str]:
    """Returns the keyword of each rule in this class: {rule: keyword}."""
    rules = [field.name for field in dataclasses.fields(SamplingParams)]
    return {rule: cls._keywords.get(rule, rule) for rule in rules}

  @classmethod
  def of(cls, params: SamplingParams, **more: object) -> Self:
    """Returns an object of this class with the rules of another one.

    Args:
      params: the rules.
      **more: further fields, and fields that replace a rule.
    """
    keywords = cls.keywords()
    rules = {keywords[rule]: value for rule, value in params.rules().items()}
    return cls(**{**rules, **more})

  def rules(self) -> dict[str, Any]:
    """Returns the rules alone, as options of a sampler's call."""
    return attributes.of(self, SamplingParams.keywords())

  @property
  def stops(self) -> tuple[str, ...]:
    """Stop strings as a tuple; one string alone counts as one."""
    texts = self.stop_strings
    return (texts,) if isinstance(texts, str) else tuple(texts or ())

  @property
  def filters(self) -> dict[str, float | int]:
    """Filters that can exclude a token, by name (a `top_p` of 1 cannot)."""
    off = filters_lib.OFF
    return {k: v for k, v in attributes.known(self, off).items() if v != off[k]}
