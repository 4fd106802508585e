"""The engine of a run on a host of its own, as its methods are called over HTTP.

    the run: RemoteRollout            this host: RolloutHost
      take      ----------------------> a run takes the host over
      begin, part, end ---------------> weights, if their stamps differ
      generate  ----------------------> completions
      open, poll, close --------------> actions of episodes
      stream, switch, poll -----------> actions of many batches, as weights change

The host has the same model as the run, from the same configuration. Arguments and
results are JSON (array_codec.py); the bits of arrays are kept. `serve/rollouts.py` has
the routes, and calls the methods in one thread, in the order of their arrival.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.generate.tokenizer_adapter import adapted
from tunix.models import calling
from tunix.rl.rollout import shared_rollout, wire
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.client import SamplingClient, Stream
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.rl.weights import placement, policy_version
from tunix.rl.weights.placement import Weights
from tunix.rl.weights.policy_version import PolicyVersion
from tunix.sft.steps.module_state import trained_variables
from tunix.utils import array_codec, attributes, mesh as mesh_lib

# Codes of `HostError`.
OTHER_OWNER, OTHER_WEIGHTS = "other_owner", "other_weights"
# The host has no call or no episodes that a request continues: they are begun again.
NOT_BEGUN = "not_begun"
CODES = (OTHER_OWNER, OTHER_WEIGHTS, NOT_BEGUN)
# Bytes of the arrays in a request: prompts, which are far smaller.
_MOST_BYTES = 1 << 30
# Fields of a model's configuration that change no token, or that weights show.
_OF_DEVICES = ("attention", "param_dtype", "remat", "scan_layers", "sharding")


class HostError(Exception):
  """A call that does not fit the state of the host.

  Attributes:
    code: OTHER_OWNER: the caller has not taken the host, or another run has taken it
      since. OTHER_WEIGHTS: the host has other weights than the call names. NOT_BEGUN:
      the call continues what this process has not begun.
  """

  def __init__(self, message: str, code: str):
    super().__init__(message)
    self.code = code


class RolloutHost:
  """The engine of a run, and the weights that it draws with.

  Args:
    model: a model like the run's actor, on the devices of this process.
    tokenizer: tokenizer of the run.
    config: sampling settings of the run; of evaluations too, if their rows are longer.

  Attributes:
    stamp: content stamp of the weights; "" while new ones arrive.
    draws: number of calls that drew, for metrics.
  """

  def __init__(self, model: nnx.Module, tokenizer: object, config: RolloutConfig):
    self._model, self._mesh = model, mesh_lib.mesh_of(nnx.state(model))
    config = dataclasses.replace(config, engine_options={})
    with mesh_lib.use_mesh(self._mesh):
      self._rollout = VanillaRollout(model, tokenizer, config)
      self.stamp = policy_version.policy_stamp(model)
    self._variables = trained_variables(model)
    self._form = form_of(model, tokenizer, config)
    # If the number changes, a run knows that the process of the host was restarted.
    self.life = uuid.uuid4().hex
    self.draws = 0
    self._owner: str | None = None
    self._arriving: _Array | None = None
    self._missing: set[str] = set()
    self._client: SamplingClient | None = None
    self._session = contextlib.ExitStack()
    self._stream: Stream | None = None
    self._last: tuple[int, Any] = (0, None)  # number and answer of its last launch

  @property
  def methods(self) -> Mapping[str, Callable[..., Any]]:
    """The methods that may be called, by name."""
    names = "take begin part end generate open poll close stream switch"
    return attributes.of(self, names.split())

  def take(self, owner: str, life: str | None) -> dict[str, Any]:
    """Gives the host to a run; episodes of an earlier run are dropped.

    Args:
      owner: name of the run's process, which all its further calls give.
      life: the life in which the run has taken the host before; None: it has not.

    Returns:
      {"life": number of this process's life, "stamp": of the weights, "vocab_size":
      number of ids of the model or None, "form": see `form_of`}.

    Raises:
      HostError: another run has taken the host in this life since.
    """
    if owner != self._owner:
      if life == self.life:
        self._check_owner(owner)
      self._leave()
      self._end_stream()
      self._owner = owner
    state = {"life": self.life, "stamp": self.stamp, "form": self._form}
    return state | {"vocab_size": calling.vocab_size(self._model)}

  # Weights.

  def begin(self, owner: str, arrays: Mapping[str, tuple[str, list[int]]]) -> None:
    """Begins to take new weights. Until `end`, the host draws nothing.

    Args:
      owner: see `take`.
      arrays: {path: (dtype, shape)} of the parameters that are trained.

    Raises:
      ValueError: the parameters of the host's model differ.
    """
    self._check_owner(owner)
    held = {
      path: (str(variable.get_value().dtype), list(variable.get_value().shape))
      for path, variable in self._variables.items()
    }
    form = {path: (dtype, list(shape)) for path, (dtype, shape) in arrays.items()}
    if form != held:
      path = sorted(p for p in form.keys() | held if form.get(p) != held.get(p))[0]
      raise ValueError(
        f"the run trains {path!r} as {form.get(path)}, and the host has "
        f"{held.get(path)}: start the host with the configuration of the run"
      )
    self._leave()
    self._missing, self._arriving = set(form), None
    self.stamp = ""

  def part(self, owner: str, path: str, start: int, data: bytes) -> None:
    """Takes a part of a parameter. The parts of one arrive in order.

    Args:
      owner: see `take`.
      path: path of the parameter.
      start: number of the first byte.
      data: the bytes.

    Raises:
      ValueError: no such part is expected.
    """
    self._check_owner(owner)
    if path not in self._missing:
      raise ValueError(f"parameter {path!r} is not expected: call begin first")
    variable = self._variables[path]
    if start == 0:
      self._arriving = _Array(path, variable.get_value())
    array = self._arriving
    if array is None or array.path != path or not array.takes(start, data):
      raise ValueError(f"{len(data)} bytes of {path!r} from {start} are not expected")
    if array.add(data):
      variable.set_value(array.value())
      self._missing.remove(path)
      self._arriving = None

  def end(self, owner: str, stamp: str) -> None:
    """Completes new weights.

    Raises:
      ValueError: a parameter is missing, or the weights have another stamp.
    """
    self._check_owner(owner)
    if self._missing:
      raise ValueError(f"{len(self._missing)} parameters have not arrived")
    with mesh_lib.use_mesh(self._mesh):
      actual = policy_version.policy_stamp(self._model)
    if actual != stamp:
      raise ValueError(
        f"with the run's trained weights the host has the stamp {actual}, and the run "
        f"has {stamp}: their frozen weights differ. Start the host with the "
        "configuration of the run, and the same model"
      )
    self.stamp = stamp

  # Completions and episodes.

  def generate(
    self,
    owner: str,
    stamp: str,
    prompts: list[Any],
    config: dict[str, Any],
    num_generations: int,
    seed: jax.Array | int | None,
    first_prompt: int,
  ) -> dict[str, Any]:
    """Draws completions; see `BaseRollout.generate` and `shared_rollout.to_json`."""
    self._check(owner, stamp)
    self._leave()
    with mesh_lib.use_mesh(self._mesh):
      out = self._rollout.generate(
        array_codec.from_json(prompts, _MOST_BYTES),
        RolloutConfig(**config),
        num_generations=num_generations,
        seed=wire.seed_from_json(seed),
        first_prompt=first_prompt,
      )
    self.draws += 1
    return shared_rollout.to_json(out)

  def open(
    self,
    owner: str,
    stamp: str,
    config: dict[str, Any],
    seed: jax.Array | int | None,
    episodes: int,
    limit: int,
    first: int,
  ) -> None:
    """Begins a batch of episodes; see `BaseRollout.sampling_client`.

    Raises:
      ValueError: the model is for the padded sampler.
    """
    self._check(owner, stamp)
    self._leave()
    if self._rollout.sampler != "engine":
      raise ValueError(
        "the model of this host is for the padded sampler, which draws no episodes "
        "here: use a model and a mesh that suit the engine (engine_sampler.suits)"
      )
    options = {"episodes": episodes, "limit": limit, "first": first}
    with mesh_lib.use_mesh(self._mesh):
      client = self._rollout.sampling_client(
        RolloutConfig(**config), wire.seed_from_json(seed), **options
      )
      self._client = self._session.enter_context(client)

  def poll(
    self, owner: str, draws: list[dict[str, Any]], launch: int | None = None
  ) -> list[dict[str, Any]]:
    """Takes actions to draw, and works on all for a bounded time; see `SamplingClient`.

    Args:
      owner: see `take`.
      draws: the actions, of `wire.draw_to_json`.
      launch: number of this launch of the stream, from 1; None: of the open batch.

    Returns:
      The actions that are ready; of the stream's last launch, if that is asked again.

    Raises:
      HostError: nothing is open, or no action waits.
    """
    self._check_owner(owner)
    client = self._client if launch is None else self._stream
    if client is None:
      raise HostError("no batch of episodes is open: call open first", NOT_BEGUN)
    if launch is not None and launch == self._last[0]:
      return self._last[1]
    with mesh_lib.use_mesh(self._mesh):
      read = array_codec.from_json(draws, _MOST_BYTES)
      client.submit([wire.draw_from_json(draw) for draw in read])
      if not client.open:  # else a client that waits for one would ask forever
        raise HostError("no action waits: call open, and send all again", NOT_BEGUN)
      done = wire.actions_to_json(client.poll())
    self.draws += 1
    if launch is not None:
      self._last = launch, done
    return done

  def close(self, owner: str) -> None:
    """Ends a batch of episodes."""
    self._check_owner(owner)
    self._leave()

  def stream(
    self,
    owner: str,
    stamp: str,
    version: int,
    config: dict[str, Any],
    rows: int,
    limit: int,
  ) -> None:
    """Begins a stream with the host's weights, whose number is `version`.

    It ends with the next one, or with the next run; see `BaseRollout.sampling_stream`.

    Raises:
      ValueError: the model is for the padded sampler.
    """
    self._check(owner, stamp)
    self._end_stream()
    with mesh_lib.use_mesh(self._mesh):
      self._stream = self._rollout.sampling_stream(RolloutConfig(**config), rows, limit)
    self._load(stamp, version)

  def switch(self, owner: str, stamp: str, version: int) -> None:
    """Gives the stream the host's weights, whose number is `version`.

    Raises:
      HostError: there is no stream.
    """
    self._check(owner, stamp)
    if self._stream is None:
      raise HostError("there is no stream: call stream first", NOT_BEGUN)
    self._load(stamp, version)

  def _load(self, stamp: str, version: int) -> None:
    assert self._stream is not None
    arrays = {path: x.get_value() for path, x in self._variables.items()}
    sent = Weights(version=PolicyVersion(version, stamp), arrays=arrays)
    with mesh_lib.use_mesh(self._mesh):
      self._stream.load(sent)

  def _end_stream(self) -> None:
    if self._stream is not None:
      self._stream.cancel()
    self._stream, self._last = None, (0, None)

  def _leave(self) -> None:
    """Ends the episodes that are open."""
    self._client = None
    with mesh_lib.use_mesh(self._mesh):
      self._session.close()

  def _check(self, owner: str, stamp: str) -> None:
    self._check_owner(owner)
    if stamp != self.stamp:
      raise HostError(
        f"the host has the weights {self.stamp or 'of no version'}, and {stamp} is to "
        "draw: send them first",
        OTHER_WEIGHTS,
      )

  def _check_owner(self, owner: str) -> None:
    if owner != self._owner:
      raise HostError("another run has taken this host, or none has", OTHER_OWNER)


class _Array:
  """A parameter that arrives in parts."""

  def __init__(self, path: str, held: jax.Array):
    self.path, self._held = path, held
    self._bytes, self._filled = bytearray(held.nbytes), 0

  def takes(self, start: int, data: bytes) -> bool:
    return start == self._filled and start + len(data) <= len(self._bytes)

  def add(self, data: bytes) -> bool:
    """Adds the next part; returns True if it was the last one."""
    end = self._filled + len(data)
    self._bytes[self._filled : end], self._filled = data, end
    return end == len(self._bytes)

  def value(self) -> Any:
    """Returns the array on the devices of the one that it replaces."""
    held = self._held
    whole = np.frombuffer(self._bytes, held.dtype).reshape(held.shape)
    return mesh_lib.put(whole, held.sharding)


def form_of(
  model: nnx.Module, tokenizer: object, config: RolloutConfig
) -> dict[str, str]:
  """Returns what decides tokens beside the parameters, each part as a text.

  They are the fields of the model's configuration, the scales of its adapters, the ids
  that end a completion, `replay_routes` and `center_scores`, which an engine is made
  with.
  """
  form = {
    "eos_ids": str([int(i) for i in adapted(tokenizer).eos_ids()]),
    "rollout.replay_routes": str(config.replay_routes),
  }
  if config.center_scores:
    form["rollout.center_scores"] = str(config.center_scores)
  sizes: Any = getattr(model, "config", None)
  if dataclasses.is_dataclass(sizes):
    for name, value in attributes.of_fields(sizes).items():
      if name == "dtype":
        value = jnp.dtype(value)  # one spelling of it
      if name not in _OF_DEVICES:
        form[f"model.{name}"] = str(value)
  for path, scale in placement.scales(model).items():
    form[f"lora scale of {path}"] = str(scale)
  return form
