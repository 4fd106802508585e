"""The service inside this process, with the classes and methods of the Tinker SDK.

    service = ServiceClient(model, tokenizer)
    trainer = service.create_lora_training_client(rank=8)
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=1e-4)).result()
    sampler = trainer.save_weights_and_get_sampling_client()

Methods that compute return futures at once, as those of the SDK. Data may be objects of
the SDK's types or of the types below.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.engine import Engine
from tunix.models.transformer.model import Transformer
from tunix.tinker import client_data
from tunix.tinker.client_data import (
  Datum,
  ForwardBackwardOutput,
  SampledSequence,
  SampleResponse,
  SamplingParams,
)
from tunix.tinker.errors import BusyError, RequestFailedError
from tunix.tinker.learning.learner import AdamParams, AdapterSpec
from tunix.tinker.protocol.results import Result
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings
from tunix.utils import attributes

__all__ = [
  "AdamParams",
  "Datum",
  "ForwardBackwardOutput",
  "Future",
  "SampleResponse",
  "SampledSequence",
  "SamplingClient",
  "SamplingParams",
  "ServiceClient",
  "TrainingClient",
]

T = TypeVar("T")
_TENANT = "local"
_PAUSE = 0.01  # seconds until a request is sent again that found too many waiting
_STOP = 30.0  # seconds that the engine's thread gets to finish its launch


class Future(Generic[T]):
  """The result of a request, which may not be computed yet."""

  def __init__(self, service: Service, id: str, convert: Callable[[Result], T]):
    self._service, self._convert, self.request_id = service, convert, id

  def result(self, timeout: float | None = None) -> T:
    """Waits for the result.

    Args:
      timeout: seconds; None: no bound.

    Raises:
      RequestFailedError: the request failed.
      TimeoutError: the result did not come in time.
    """
    result = self._service.wait(_TENANT, self.request_id, timeout)
    if result is None:
      raise TimeoutError(f"request {self.request_id} has no result yet")
    if result.error is not None:
      raise RequestFailedError(result.error, result.category)
    return self._convert(result)


class ServiceClient:
  """Makes training and sampling clients of one base model.

  Args:
    model: the base model, without adapters. It is unchanged.
    tokenizer: its tokenizer, for samples; None: no samples.
    settings: files and limits; None keeps everything in memory.
    engine: sizes of the engine; None: the defaults, with 128 ranks.
    name: name of the base model.
  """

  def __init__(
    self,
    model: Transformer,
    tokenizer: object = None,
    *,
    settings: TinkerSettings | None = None,
    engine: EngineConfig | None = None,
    name: str = "base",
  ):
    self._driver: Driver | None = None
    if tokenizer is not None:
      config = EngineConfig(adapter_ranks=128) if engine is None else engine
      self._driver = Driver(Engine(model, tokenizer, config))
      self._driver.start()
    self.service = Service(model, settings, name=name, driver=self._driver)
    self._session = self.service.create_session(_TENANT, {})
    self._models, self._samplers = itertools.count(), itertools.count()

  def __enter__(self) -> ServiceClient:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the service's threads."""
    self.service.close()
    if self._driver is not None:
      self._driver.stop(_STOP)

  def create_lora_training_client(
    self,
    base_model: str | None = None,
    rank: int = 32,
    seed: int | None = None,
    train_mlp: bool = True,
    train_attn: bool = True,
    user_metadata: Mapping[str, str] | None = None,
  ) -> TrainingClient:
    """Returns a client of a new adapter; see `Service.create_model`."""
    spec = AdapterSpec(rank=rank, train_attn=train_attn, train_mlp=train_mlp)
    future, model = self.service.create_model(
      _TENANT,
      self._session,
      next(self._models),
      spec,
      base_model=base_model,
      seed=seed,
      metadata=user_metadata,
    )
    Future(self.service, future, lambda _: None).result()
    return TrainingClient(self, model)

  def create_training_client_from_state(self, path: str) -> TrainingClient:
    """Returns a client of a new model with a checkpoint's adapter."""
    return self._from_state(path, optimizer=False)

  def create_training_client_from_state_with_optimizer(
    self, path: str
  ) -> TrainingClient:
    """Returns a client of a new model with a checkpoint's adapter and optimizer."""
    return self._from_state(path, optimizer=True)

  def _from_state(self, path: str, optimizer: bool) -> TrainingClient:
    future, model = self.service.create_from_checkpoint(
      _TENANT, self._session, next(self._models), path, optimizer=optimizer
    )
    Future(self.service, future, lambda _: None).result()
    return TrainingClient(self, model)

  def create_sampling_client(
    self, model_path: str | None = None, base_model: str | None = None
  ) -> SamplingClient:
    """Returns a client that samples from a checkpoint, or from the base model."""
    self.service.check_base(base_model)
    session = self.service.sampling.create(
      _TENANT, self._session, self.next_sampler(), model_path
    )
    return SamplingClient(self.service, session)

  def next_sampler(self) -> int:
    """Returns the number of a new sampling session."""
    return next(self._samplers)


class TrainingClient:
  """Trains one adapter; made by `ServiceClient`.

  Requests are computed in the order of the calls.

  Attributes:
    model_id: id of the model.
  """

  def __init__(self, client: ServiceClient, model_id: str):
    self._client, self._service, self.model_id = client, client.service, model_id
    self._numbers = itertools.count(1)
    self._lock = threading.Lock()

  def forward(
    self,
    data: Sequence[Any],
    loss_fn: str = "cross_entropy",
    loss_fn_config: Mapping[str, float] | None = None,
  ) -> Future[ForwardBackwardOutput]:
    """Computes a loss without its gradient."""
    return self._forward(data, loss_fn, loss_fn_config, backward=False)

  def forward_backward(
    self,
    data: Sequence[Any],
    loss_fn: str,
    loss_fn_config: Mapping[str, float] | None = None,
  ) -> Future[ForwardBackwardOutput]:
    """Computes a loss, and adds its gradient to the gradients since the last step."""
    return self._forward(data, loss_fn, loss_fn_config, backward=True)

  def forward_backward_custom(
    self, data: Sequence[Any], loss_fn: Callable[..., tuple[Any, Mapping[str, float]]]
  ) -> Future[ForwardBackwardOutput]:
    """Computes the gradient of a loss that is a function of log-probabilities.

    A forward pass gives the log-probabilities, and the gradient of the loss with
    respect to them gives the weights of a cross-entropy with the same gradient. The
    call waits for the forward pass.

    Args:
      data: rows with `target_tokens`.
      loss_fn: function of (data, log-probabilities of each row as jax arrays) that
        returns the loss and metrics. jax differentiates it.
    """
    rows = [client_data.row_of(x) for x in data]
    plain = [
      Datum(r.tokens, {"target_tokens": r.inputs["target_tokens"]}) for r in rows
    ]
    outputs = self.forward(plain).result().loss_fn_outputs
    logps = [x["logprobs"] for x in outputs]
    (loss, metrics), slopes = jax.value_and_grad(
      lambda values: loss_fn(data, values), has_aux=True
    )([jax.numpy.asarray(x) for x in logps])
    surrogate = [
      Datum(x.model_input, {**x.loss_fn_inputs, "weights": -np.asarray(slope)})
      for x, slope in zip(plain, slopes)
    ]
    future = self.forward_backward(surrogate, "cross_entropy")

    def convert(result: Result) -> ForwardBackwardOutput:
      out = client_data.outputs_of(result)
      named = {**{k: float(v) for k, v in metrics.items()}, "loss:sum": float(loss)}
      return dataclasses.replace(out, metrics=named)

    return Future(self._service, future.request_id, convert)

  def optim_step(self, adam_params: object) -> Future[dict[str, float]]:
    """Updates the adapter with the gradients since the last step; returns metrics."""
    names = [field.name for field in dataclasses.fields(AdamParams)]
    params = attributes.of(adam_params, names)
    return self._submit(
      lambda n: self._service.training.optim_step(_TENANT, self.model_id, n, params),
      lambda result: dict(result.values["metrics"]),
    )

  def save_state(
    self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
  ) -> Future[str]:
    """Saves adapter and optimizer; the result is the path."""
    return self._submit(
      lambda n: self._service.training.save_weights(
        _TENANT, self.model_id, n, name, overwrite=overwrite, ttl_seconds=ttl_seconds
      ),
      _path,
    )

  def save_weights_for_sampler(
    self, name: str, ttl_seconds: int | None = None
  ) -> Future[str]:
    """Saves the adapter for sampling; the result is the path."""
    return self._submit(
      lambda n: self._service.training.save_weights_for_sampler(
        _TENANT, self.model_id, n, name, ttl_seconds=ttl_seconds
      ),
      _path,
    )

  def save_weights_and_get_sampling_client(self) -> SamplingClient:
    """Returns a client that samples from the present adapter."""
    number = self._client.next_sampler()
    future = self._submit(
      lambda n: self._service.training.save_weights_for_sampler(
        _TENANT, self.model_id, n, None, sampler_number=number
      ),
      lambda result: result.values["sampling_session_id"],
    )
    return SamplingClient(self._service, future.result())

  def load_state(self, path: str) -> Future[None]:
    """Loads an adapter, with a fresh optimizer."""
    return self._load(path, optimizer=False)

  def load_state_with_optimizer(self, path: str) -> Future[None]:
    """Loads an adapter and its optimizer."""
    return self._load(path, optimizer=True)

  def _load(self, path: str, optimizer: bool) -> Future[None]:
    return self._submit(
      lambda n: self._service.training.load_weights(
        _TENANT, self.model_id, n, path, optimizer=optimizer
      ),
      lambda _: None,
    )

  def _forward(
    self,
    data: Sequence[Any],
    loss: str,
    config: Mapping[str, float] | None,
    *,
    backward: bool,
  ) -> Future[ForwardBackwardOutput]:
    rows = [client_data.row_of(x) for x in data]
    return self._submit(
      lambda n: self._service.training.forward_backward(
        _TENANT, self.model_id, n, lambda: rows, loss, config, backward=backward
      ),
      client_data.outputs_of,
    )

  def _submit(
    self, send: Callable[[int], str], convert: Callable[[Result], T]
  ) -> Future[T]:
    with self._lock:
      number = next(self._numbers)
      while True:
        try:
          return Future(self._service, send(number), convert)
        except BusyError:  # a loop that does not wait for results; the SDK waits too
          time.sleep(_PAUSE)


class SamplingClient:
  """Samples from one adapter; made by `ServiceClient` or `TrainingClient`."""

  def __init__(self, service: Service, session: str):
    self._service, self._session = service, session
    self._numbers = itertools.count()

  def sample(
    self,
    prompt: object,
    num_samples: int,
    sampling_params: object,
    include_prompt_logprobs: bool = False,
  ) -> Future[SampleResponse]:
    """Completes a prompt of token ids."""
    fields = dataclasses.fields(SamplingParams)
    args = {
      "num_samples": num_samples,
      "sampling_params": {
        field.name: getattr(sampling_params, field.name, field.default)
        for field in fields
      },
      "prompt_logprobs": include_prompt_logprobs,
    }
    number = next(self._numbers)
    id = self._service.sampling.sample(
      _TENANT, self._session, number, client_data.ids_of(prompt), args
    )
    return Future(self._service, id, client_data.samples_of)

  def compute_logprobs(self, prompt: object) -> list[float | None]:
    """Returns the log-probability of each token of a prompt; None for the first."""
    params = SamplingParams(max_tokens=1)
    result = self.sample(prompt, 1, params, include_prompt_logprobs=True).result()
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs


def _path(result: Result) -> str:
  return result.values["path"]
