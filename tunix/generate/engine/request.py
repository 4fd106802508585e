"""Requests to the engine and their results."""

from __future__ import annotations

import dataclasses
import math
import numbers
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np

from tunix.generate.drawing.params import SamplingParams
from tunix.generate.tokens import Delta, Tokens
from tunix.models.images.prompt_images import PromptImages
from tunix.utils import checks

_INT32, _FLOAT32 = 2**31 - 1, 3.4028234e38


class Matcher(Protocol):
  """The state of a constraint while one completion grows; see grammar.py."""

  def mask(self) -> np.ndarray:
    """Returns uint32 [ceil(V / 32)]: bit v % 32 of word v // 32 allows token v."""
    ...

  def accept(self, token: int) -> None:
    """Takes the token that was drawn, which the last mask allowed."""
    ...


class Constraint(Protocol):
  """A set of allowed texts: a JSON schema, a regular expression or choices."""

  def matcher(self) -> Matcher:
    """Returns the state of a new completion."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequest(SamplingParams):
  """One prompt and the rules of its completions, see `SamplingParams`.

  `EngineRequest.of(params, prompt=..., max_tokens=...)` takes the rules of an object.
  A completion depends on the seed and its number, and not on other requests.

  Attributes:
    prompt: int32 [T], ids of the prompt; at least one.
    max_tokens: largest number of new tokens of a completion, its end-of-sequence token
      included.
    num_samples: number of completions. They share the prefill of the prompt.
    first_row: number of the first completion under the seed, so that several requests
      with one seed can differ.
    stop_ids: the rule `eos_tokens` under the name that it has in a request.
    logit_bias: number that is added to the logit of each id; -inf forbids an id.
    logprobs: return the log-probabilities of the chosen tokens.
    top_logprobs: number of most likely tokens whose log-probabilities are returned
      with each chosen token; 0: none.
    prompt_logprobs: return log-probabilities of the prompt's tokens, and those of
      `top_logprobs` most likely tokens.
    images: the images of the prompt, which holds their soft tokens; None: there are
      none. With images, the soft token is not drawn.
    adapter: name of a loaded adapter; None: the model alone.
    constraint: texts that a completion must belong to; None: all.
    priority: requests with a lower number are admitted first.
    id: name of the request in messages; None: the engine chooses one.

  Raises:
    TypeError: see `SamplingParams`.
    ValueError: the prompt is empty, or a number is out of range.
  """

  _keywords: ClassVar = {"eos_tokens": "stop_ids"}

  prompt: np.ndarray
  max_tokens: int
  num_samples: int = 1
  first_row: int = 0
  stop_ids: Sequence[int] | None = None
  eos_tokens: Sequence[int] | None = dataclasses.field(init=False, default=None)
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  logprobs: bool = False
  top_logprobs: int = 0
  prompt_logprobs: bool = False
  images: PromptImages | None = None
  adapter: str | None = None
  constraint: Constraint | None = None
  priority: int = 0
  id: str | None = None

  def __post_init__(self):
    super().__post_init__()
    prompt = np.asarray(self.prompt)
    if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype.kind not in "iu":
      raise ValueError(
        f"prompt has shape {prompt.shape} and dtype {prompt.dtype}, expected at least "
        "one token id in a flat array of integers"
      )
    if prompt.min() < 0 or prompt.max() > _INT32:
      raise ValueError(
        f"prompt has ids from {prompt.min()} to {prompt.max()}, expected ids of a "
        "vocabulary. Check the tokenizer"
      )
    object.__setattr__(self, "prompt", prompt.astype(np.int32))
    checks.fields(
      self,
      max_tokens=checks.COUNT,
      num_samples=checks.COUNT,
      first_row=checks.NOT_NEGATIVE,
      top_logprobs=checks.NOT_NEGATIVE,
    )
    if self.first_row > _INT32 - self.num_samples:
      raise ValueError(
        f"first_row is {self.first_row}, expected at most {_INT32 - self.num_samples}: "
        f"the number of the last of {self.num_samples} completions must fit in 32 bits"
      )
    if self.images is not None and self.prompt_logprobs:
      raise ValueError(
        "prompt_logprobs is True and the prompt has images; expected at most one: the "
        "tokens of an image have no log-probability. Leave one out"
      )
    self._check_bias()

  def _check_bias(self) -> None:
    bias = self.logit_bias
    if not isinstance(bias, Mapping):
      raise TypeError(f"logit_bias is {bias!r}: it must map ids to numbers")
    for id, value in bias.items():
      is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
      if not isinstance(id, numbers.Integral) or not is_number:
        raise TypeError(
          f"logit_bias has {value!r} for {id!r}: it must map whole ids to numbers"
        )
      if not (-_FLOAT32 <= value <= _FLOAT32 or value == -math.inf):
        raise ValueError(
          f"logit_bias[{id}] is {value}: it must be a finite number, or -inf to forbid "
          "the id"
        )


class RequestError(RuntimeError):
  """A request that failed while it ran; other requests are not concerned."""


class EngineDead(RuntimeError):
  """The engine cannot run any more; its cause says why."""


class Ticket:
  """A submitted request: where its deltas arrive.

  The engine's thread puts deltas in, any other thread takes them out.

  Attributes:
    id: name of the request.
    request: the request.
    prompt_scores: the tokens of the prompt but the first with their log-probabilities,
      once it was prefilled; None if not asked for.
    cached_tokens: number of the prompt's tokens that were found in the prefix cache.
  """

  def __init__(self, id: str, request: EngineRequest):
    self.id = id
    self.request = request
    self.prompt_scores: Tokens | None = None
    self.cached_tokens = 0
    self._deltas: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
    self._listener: Callable[[], None] | None = None

  def listen(self, listener: Callable[[], None] | None) -> None:
    """Has `listener()` called, in the engine's thread, after each new delta."""
    self._listener = listener

  def put(self, item: Delta | BaseException) -> None:
    """Adds a delta, or the exception that ended the request."""
    self._deltas.put(item)
    listener = self._listener  # another thread may take it away meanwhile
    if listener is not None:
      listener()

  def get(self, timeout: float | None = None) -> Delta:
    """Waits for the next delta.

    Args:
      timeout: seconds; 0 does not wait, None waits without a bound (only if this thread
        itself, or a live driver, steps the engine).

    Raises:
      queue.Empty: no delta arrived in time.
      RequestError: the request failed.
      EngineDead: the engine failed.
    """
    item = self._deltas.get(block=timeout != 0, timeout=timeout or None)
    if isinstance(item, BaseException):
      raise item
    return item

  def arrived(self) -> Iterator[Delta]:
    """Yields the deltas that are there, without a wait; raises as `get` does."""
    while True:
      try:
        yield self.get(timeout=0)
      except queue.Empty:
        return
