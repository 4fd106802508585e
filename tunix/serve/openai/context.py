"""The parts that all routes share: driver, settings, limits and metrics."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import pathlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tunix.data.images import ImageReader
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.replicas import Replicas
from tunix.generate.engine.request import Constraint
from tunix.generate.sizes import text_size
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.serve.http.errors import ApiError, bad
from tunix.serve.http.gate import Gate
from tunix.serve.metrics import Metrics
from tunix.serve.openai.logprobs import TokenTexts
from tunix.serve.openai.running import Clock, DrainDeadline
from tunix.serve.openai.work import Readers
from tunix.serve.settings import ServeSettings


class Grammars(Protocol):
  """Builds constraints; each method raises ValueError for what cannot be enforced."""

  def json_schema(self, schema: Mapping[str, Any] | str) -> Constraint: ...
  def json_object(self) -> Constraint: ...
  def regex(self, pattern: str) -> Constraint: ...
  def choice(self, choices: Sequence[str]) -> Constraint: ...


LoadModel = Callable[[pathlib.Path], Any]


@dataclasses.dataclass(frozen=True)
class Tenants:
  """The tenants of a server, each with models of its own.

  Attributes:
    keys: key of each tenant, by the tenant's name; empty: there are no tenants.
    owns: returns True if an adapter is a tenant's, given the names of both.
  """

  keys: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
  owns: Callable[[str, str], bool] = lambda tenant, adapter: False


class Context:
  """The parts of a server.

  Attributes:
    driver: the driver of the engine.
    settings: the settings.
    grammars: builder of constraints; None: requests with constraints are refused.
    load_model: loads a checkpoint folder for `/update_weights`; None: the route is
      refused.
    images: reader of images; None: requests with images are refused.
    gate: limits on running and waiting requests.
    drain: time at which a shutdown ends running requests.
    readers: threads that read requests.
    admin: held while the engine is paused, or its adapters or weights change.
    metrics: metrics of the server and the engine.
    created: time of the start, in seconds since 1970.
    tenants: the tenants, whose keys open the routes that generate.
    tenant: the tenant that this context is for; None: it shows all adapters.
    on_drain: called when a shutdown begins, in the thread of the server.
  """

  def __init__(
    self,
    driver: Driver | Replicas,
    settings: ServeSettings,
    grammars: Grammars | None = None,
    load_model: LoadModel | None = None,
    images: ImageReader | None = None,
  ):
    self.driver, self.settings, self.images = driver, settings, images
    self.grammars, self.load_model = grammars, load_model
    self.gate = Gate(
      settings.max_concurrent,
      settings.max_queue,
      settings.queue_timeout,
      settings.retry_after,
    )
    self.drain = DrainDeadline()
    self.readers = Readers()
    self.admin = asyncio.Lock()
    self.metrics = Metrics(self._gauges)
    self.created = int(time.time())
    self.tenants = Tenants()
    self.tenant: str | None = None
    self.on_drain: Callable[[], None] = lambda: None

  def seen_by(self, tenant: str | None) -> Context:
    """Returns the context with the adapters that a tenant sees; None: all of them."""
    if tenant is None:
      return self
    _ = self.texts  # cached before the copy, so that all copies share it
    seen = copy.copy(self)
    seen.tenant = tenant
    return seen

  @property
  def adapters(self) -> tuple[str, ...]:
    """Names of the loaded adapters that requests can name."""
    names, tenant = self.engine.adapters, self.tenant
    if tenant is None:
      return tuple(names)
    return tuple(name for name in names if self.tenants.owns(tenant, name))

  @property
  def engine(self) -> Any:
    """The engine."""
    return self.driver.engine

  @property
  def tokenizer(self) -> TokenizerAdapter:
    """The tokenizer of the engine."""
    return self.driver.engine.tokenizer

  @functools.cached_property
  def texts(self) -> TokenTexts:
    """Texts of single tokens."""
    return TokenTexts(self.tokenizer)

  @property
  def max_tokens(self) -> int:
    """Largest number of tokens of a prompt and its completion."""
    return self.engine.config.max_tokens

  def _gauges(self) -> dict[str, float]:
    """Returns the state that is read when metrics are scraped."""
    stats = dataclasses.asdict(self.engine.stats())
    return {
      **{f"engine_{name}": value for name, value in stats.items()},
      "engine_weights_version": self.engine.version,
      "requests_running": self.gate.running,
      "requests_waiting": self.gate.waiting,
      "is_paused": int(self.driver.is_paused),
      "is_degraded": int(self.driver.degraded is not None),
    }

  def clock(self) -> Clock:
    """Returns the time of a call that begins now."""
    settings = self.settings
    return Clock(settings.request_timeout, self.drain, settings.retry_after)

  def start_drain(self) -> None:
    """Refuses new requests; those that run have `drain_timeout` left."""
    if self.drain.at is None:
      self.drain.at = time.monotonic() + self.settings.drain_timeout
      self.gate.drain()
      self.on_drain()

  def adapter(self, model: str | None) -> str | None:
    """Returns the adapter that a request's model names; None for the model itself.

    Raises:
      ApiError: 404 if there is no model of this name.
    """
    if model is None or model == self.settings.model_name:
      return None
    if model in self.adapters:
      return model
    names = [self.settings.model_name, *self.adapters]
    raise ApiError(
      404,
      f"model is {model!r}, expected one of {names}",
      param="model",
      code="model_not_found",
    )

  def prompt_ids(self, text: str, adds_special: bool) -> list[int]:
    """Returns the token ids of a plain prompt.

    Args:
      text: the prompt.
      adds_special: begin with BOS where training and `TokenizerAdapter.tokenize` do.

    Raises:
      ApiError: as for `check_size`.
    """
    self.check_size(text, "prompt")
    if not adds_special:
      return self.tokenizer.encode(text)
    return self.tokenizer.tokenize(text, add_eos=False).tolist()

  def check_size(self, texts: object, param: str) -> None:
    """Refuses texts that cannot fit, before a tokenizer spends seconds on them.

    Args:
      texts: a text, or an object with texts.
      param: field of the request.

    Raises:
      ApiError: 400 if they have more characters than the context's tokens can have.
    """
    most = min(self.max_tokens, self.settings.max_prompt_tokens or self.max_tokens)
    if not text_size.may_fit(texts, most):
      raise bad(
        param,
        f"{param} has more than {most * text_size.TOKEN_CHARACTERS} characters, and "
        f"the longest prompt is {most} tokens. Send a shorter one",
        "context_length_exceeded",
      )

  def room(self, prompt: Sequence[int], max_tokens: int | None) -> int:
    """Returns the largest number of new tokens after a prompt.

    Args:
      prompt: ids of the prompt.
      max_tokens: what the client asks for; None: as many as fit.

    Raises:
      ApiError: the prompt is empty, or both together are too long.
    """
    limit, most = self.max_tokens, self.settings.max_prompt_tokens
    if len(prompt) == 0:
      raise bad("prompt", "the prompt has no tokens, expected at least one")
    if most is not None and len(prompt) > most:
      raise bad(
        "prompt",
        f"the prompt has {len(prompt)} tokens, and this server takes {most}. Send a "
        "shorter one",
        "context_length_exceeded",
      )
    left = limit - len(prompt)
    size = max(1, left) if max_tokens is None else max_tokens
    if size > left:
      raise bad(
        "max_tokens",
        f"the prompt has {len(prompt)} tokens and max_tokens is {size}: the maximum "
        f"context length of this server is {limit} tokens (--max_tokens). Shorten the "
        "prompt, or ask for fewer tokens",
        "context_length_exceeded",
      )
    return size


def new_id(prefix: str) -> str:
  """Returns a fresh id such as "cmpl-..."."""
  return f"{prefix}-{uuid.uuid4().hex}"


def as_prompt(ids: Sequence[int]) -> np.ndarray:
  """Returns token ids as int32 [T]."""
  return np.asarray(ids, np.int32)
