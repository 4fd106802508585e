"""What every rollout engine takes and gives."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.generate import batching, layout
from tunix.generate.layout import GatherWeights
from tunix.generate.options import SamplingOptions
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """How completions are sampled.

  Attributes:
    max_tokens_to_generate: most tokens of a completion, end-of-sequence included.
    max_prompt_length: most tokens of a prompt; a longer one is an error.
    temperature: logits are divided by it, in sampling and in scoring alike; 0 is
      greedy, for evaluation only.
    top_p: draw from the likeliest tokens that have this probability together.
    top_k: draw from so many of the likeliest tokens.
    min_p: draw from tokens at least this probable, relative to the likeliest.
    seed: of the run; every step, prompt and sample draws differently from it.
    eos_tokens: ids that end a completion; None: the tokenizer's.
    stop_strings: texts that end a completion.
    kv_cache_size: most tokens of prompt and completion; None: their maxima.
    gather_weights: on a mesh, true: gather our own sampler's weights along the batch's
      axes once a batch, instead of in every decode step; "split": lay them out once so
      that they split the products of a step, and activations are what moves; false:
      leave them; None: the first of these that takes at most a quarter of a device's
      memory, which CPUs do not tell.
    engine_options: passed on to the engine as they are (structured output, ...); our
      own sampler has none and refuses them.
  """

  max_tokens_to_generate: int = 64
  max_prompt_length: int = 64
  temperature: float = 1.0
  top_p: float | None = None
  top_k: int | None = None
  min_p: float | None = None
  seed: int = 0
  eos_tokens: Sequence[int] | None = None
  stop_strings: Sequence[str] | None = None
  kv_cache_size: int | None = None
  gather_weights: GatherWeights = None
  engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    layout.check(self.gather_weights)
    checks.fields(
      self,
      max_tokens_to_generate=checks.COUNT,
      max_prompt_length=checks.COUNT,
      kv_cache_size=checks.COUNT,
      seed=checks.SEED,
    )
    # What a sampler refuses is refused here: its first call comes late in a run.
    SamplingOptions(
      max_generation_steps=self.max_tokens_to_generate, **self.sampling_options
    )
    need = self.max_prompt_length + self.max_tokens_to_generate
    if self.kv_cache_size is not None and self.kv_cache_size < need:
      raise ValueError(
        f"kv_cache_size is {self.kv_cache_size}: prompts of {self.max_prompt_length} "
        f"and completions of {self.max_tokens_to_generate} tokens need {need}"
      )

  @property
  def sampling_options(self) -> dict[str, Any]:
    """What it says of a draw and of an end, as a sampler takes it."""
    names = ("temperature", "top_p", "top_k", "min_p", "eos_tokens")
    options = {name: getattr(self, name) for name in names}
    return {**options, "stop_strings": self.stop_strings or ()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOutput:
  """Completions, group by group: those of the first prompt, then of the second, ...

  Attributes:
    text: B completions without their end-of-sequence tokens.
    tokens: B int32 arrays, the end-of-sequence token included where one came.
    prompt_tokens: int32 ids of the B rows' prompts (equal within a group).
    logprobs: B float32 arrays, in nats, under the distribution that was drawn from.
    finish_reasons: B of "eos", "stop", "length".
    version: of the weights that sampled, as the engine was told (see WeightSync).
  """

  text: list[str]
  tokens: list[np.ndarray]
  prompt_tokens: list[np.ndarray]
  logprobs: list[np.ndarray]
  finish_reasons: list[str]
  version: Any = None

  def joined(self, others: Iterable[RolloutOutput]) -> RolloutOutput:
    """With the rows of other outputs, by the same weights, behind its own."""
    names = [f.name for f in dataclasses.fields(self) if f.name != "version"]
    every = [self, *others]
    rows = {name: [x for out in every for x in getattr(out, name)] for name in names}
    return RolloutOutput(**rows, version=self.version)

  @property
  def left_padded_prompt_tokens(self) -> np.ndarray:
    """int32 [B, P], prompts padded on the left with 0."""
    width = max(map(len, self.prompt_tokens))
    rows = len(self.prompt_tokens)
    return batching.left_padded(self.prompt_tokens, rows, width, 0)[0]


class BaseRollout(abc.ABC):
  """An engine that samples from the policy.

  Subclasses write `generate` and `update_params`; the first is called with prompts of a
  batch, the second after every update of the policy. They are made as
  `Class(model, tokenizer, rollout_config)`.

  Attributes:
    version: of the weights it holds; None before the first `update_params`.
  """

  version: Any = None

  @abc.abstractmethod
  def generate(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int = 1,
    seed: Any = None,
    first_prompt: int = 0,
  ) -> RolloutOutput:
    """`num_generations` completions of each prompt (a string or token ids).

    Prompts are numbered from `first_prompt`: a batch that is sampled in parts, under
    one seed, draws what it would draw at once.
    """

  @abc.abstractmethod
  def update_params(self, model: Any, version: Any) -> None:
    """Takes the weights of `model`, which are known as `version` from here on."""

  @abc.abstractmethod
  def pad_id(self) -> int:
    """The padding token."""

  @abc.abstractmethod
  def eos_id(self) -> int:
    """The end-of-sequence token."""

  def model(self) -> Any:
    """The module that samples.

    Raises:
      TypeError: the weights live in another process.
    """
    raise TypeError(f"{type(self).__name__} holds no nnx.Module")
