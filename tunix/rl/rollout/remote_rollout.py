"""Rollouts by our own engine on hosts of its own, which the run calls over HTTP.

    the run's process          host 0: tunix rollouts     host 1: tunix rollouts
    updates                 -> weights                 -> weights
    a block of the prompts  -> tokens of prompts 0..3     tokens of prompts 4..7

The key of a token is computed from the numbers of its prompt, sample and position.
Tokens therefore do not depend on the host that draws them, nor on one that is lost and
comes back. Each of several processes of the run has hosts of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.generate.outputs import fill_id
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Completion
from tunix.rl.rollout import host as host_lib, shared_rollout, wire
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.rollout.client import Draw, SamplingClient, Stream
from tunix.rl.rollout.engine_rollout import take_options
from tunix.rl.rollout.remote_host import RemoteHost, together
from tunix.rl.rollout.remote_stream import RemoteStream
from tunix.rl.rollout.shared_rollout import SharedRollout
from tunix.rl.weights.placement import Weights
from tunix.sft.steps.module_state import trained_variables
from tunix.utils import array_codec, attributes, env, mesh as mesh_lib

KEY = "TUNIX_API_KEY"
_URLS = 'the addresses of the hosts, such as ["http://10.0.0.2:8700"]'
_TIMEOUT_S, _LOST_S = 3600.0, 300.0
T = TypeVar("T")


class RemoteRollout(SharedRollout):
  """Rollouts by `RolloutHost`s, see the module.

  The API key of the hosts is read from the environment variable TUNIX_API_KEY.

  Args:
    model: the policy. It stays in the run; `update_params` sends its weights.
    tokenizer: tokenizer of the model.
    rollout_config: its `engine_options` must have "urls", the addresses of the hosts;
      each process of the run takes an equal share of them, in order. They may have
      "timeout_s", the longest time of one call (3600), and "lost_s", the time in which
      a host that gives no answer may come back (300).

  Raises:
    TypeError, ValueError: "urls" is missing or malformed, its number is no multiple of
      the processes, an option is unknown, or a time is no positive number.
  """

  sampler = "remote"

  def __init__(
    self, model: nnx.Module, tokenizer: TokenizerAdapter, rollout_config: RolloutConfig
  ):
    names = ("timeout_s", "lost_s")
    options = take_options(rollout_config, "remote", {"urls": _URLS}, names)
    urls = _share_of(options["urls"])
    limits = options.get("timeout_s", _TIMEOUT_S), options.get("lost_s", _LOST_S)
    key = env.value(KEY)
    form = host_lib.form_of(model, tokenizer, rollout_config)
    self._hosts = [RemoteHost(url, key, *limits, form) for url in urls]
    self.engine_count = len(self._hosts)
    self._tokenizer = tokenizer
    self._weights: Weights | None = None
    if jax.process_count() > 1:
      # The thread of `lagged` makes keys beside the updates, which must not be programs
      # over the devices of all processes.
      self.mesh = mesh_lib.create_mesh({"tp": 1}, jax.local_devices()[:1])

  def update_params(self, model: nnx.Module, version: Any) -> None:
    """Sends the weights to the hosts that have others.

    Raises:
      RemoteError: a host does not come back in time, or does not hold the weights that
        were sent.
    """
    self.load(Weights(version=version, arrays=self.weights_of(model)))

  def weights_of(self, actor: nnx.Module) -> Mapping[str, Any]:
    """Returns the trained parameters in host memory, whole on every process."""
    variables = trained_variables(actor)
    return {path: mesh_lib.to_host(v.get_value()) for path, v in variables.items()}

  def load(self, weights: Weights) -> None:
    self._weights, self.version = weights, weights.version
    self.on_hosts([(host, lambda: None) for host in self._hosts])

  def on_hosts(self, works: Sequence[tuple[RemoteHost, Callable[[], T]]]) -> list[T]:
    """Runs work of several hosts at the same time, see `RemoteHost.run`.

    Raises:
      RemoteError: see `RemoteHost.run`; raised when all works have ended.
    """
    weights = self._weights
    assert weights is not None  # the cluster sends some before it samples
    return together(
      [functools.partial(host.run, weights, work) for host, work in works]
    )

  def _draw(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int,
    seed: jax.Array | int | None,
    first_prompt: int,
  ) -> RolloutOutput:
    stamp = self.version.stamp
    shared = {
      "stamp": stamp,
      "config": _as_json(rollout_config),
      "num_generations": num_generations,
      "seed": wire.seed_to_json(seed),
    }

    def drawn_by(host: RemoteHost, block: range) -> Callable[[], Any]:
      mine = array_codec.to_json(list(prompts[block.start : block.stop]))
      first = first_prompt + block.start
      return lambda: host.call("generate", prompts=mine, first_prompt=first, **shared)

    works = [
      (host, drawn_by(host, block))
      for host, block in zip(self._hosts, _blocks(len(prompts), len(self._hosts)))
      if block
    ]
    outs = [shared_rollout.from_json(x, self.version) for x in self.on_hosts(works)]
    return outs[0].joined(outs[1:])

  @contextlib.contextmanager
  def sampling_client(
    self,
    config: RolloutConfig,
    key: jax.Array,
    *,
    episodes: int,
    limit: int,
    first: int = 0,
  ) -> Iterator[SamplingClient]:
    shared = {
      "stamp": self.version.stamp,
      "config": _as_json(config),
      "seed": wire.seed_to_json(key),
      "limit": limit,
      "first": first,
    }
    client = RemoteClient(self, self._hosts, shared, episodes)
    try:
      yield client
    finally:
      client.cancel()

  @classmethod
  def module_of(
    cls, actor: nnx.Module, *meshes: Mesh | None, samples_behind: bool
  ) -> nnx.Module:
    del meshes, samples_behind  # it samples nothing in this process
    return actor

  def sampling_devices(self) -> set[Any]:
    return set()

  def check_stream(self) -> None:
    """Hosts have streams, or refuse them when one is opened."""

  def sampling_stream(self, config: RolloutConfig, rows: int, limit: int) -> Stream:
    each = -(-rows // self.engine_count)
    return RemoteStream(
      self._hosts, {"config": _as_json(config), "rows": each, "limit": limit}
    )

  def pad_id(self) -> int:
    return fill_id(self._tokenizer)

  def eos_id(self) -> int:
    return self._tokenizer.eos_ids()[0]


class RemoteClient:
  """Draws actions of episodes on hosts; each host has a block of the episodes.

  Args:
    rollout: the engine.
    hosts: its hosts.
    shared: arguments of `RolloutHost.open` that are the same on all hosts.
    episodes: number of the episodes.
  """

  def __init__(
    self,
    rollout: RemoteRollout,
    hosts: Sequence[RemoteHost],
    shared: Mapping[str, Any],
    episodes: int,
  ):
    self._rollout, self._shared = rollout, dict(shared)
    blocks = _blocks(episodes, len(hosts))
    self._parts = [_Part(host, block) for host, block in zip(hosts, blocks) if block]
    self.vocab_size: int | None = hosts[0].vocab_size
    # A host that was left in the middle of a batch begins this one anew.
    for part in self._parts:
      part.host.is_open = False

  @property
  def open(self) -> int:
    return sum(len(part.open) for part in self._parts)

  def submit(self, draws: Sequence[Draw]) -> None:
    for draw in draws:
      part = next(part for part in self._parts if draw.episode in part.block)
      part.open[draw.episode] = draw
      part.new.append(draw)

  def poll(self) -> list[Completion]:
    busy = [part for part in self._parts if part.open]
    works = [(part.host, lambda part=part: self._polled(part)) for part in busy]
    return [drawn for done in self._rollout.on_hosts(works) for drawn in done]

  def cancel(self) -> None:
    """Forgets the batch; the next one, or another run, ends it on the hosts."""
    for part in self._parts:
      part.host.is_open = False

  def _polled(self, part: _Part) -> list[Completion]:
    """Sends what is new to a host, and returns what is ready there."""
    host, draws = part.host, part.new
    if not host.is_open:
      host.call("open", episodes=len(part.block), **self._shared)
      draws, host.is_open = list(part.open.values()), True
    sent = [wire.draw_to_json(draw) for draw in draws]
    answers = host.call("poll", draws=sent)
    part.new = []
    done = wire.actions_from_json(answers, self._rollout.version.step)
    for drawn in done:
      del part.open[drawn.number]
    return done


@dataclasses.dataclass
class _Part:
  """The episodes of a host: those that wait for an action, and new ones of these."""

  host: RemoteHost
  block: range
  open: dict[int, Draw] = dataclasses.field(default_factory=dict)
  new: list[Draw] = dataclasses.field(default_factory=list)


def _blocks(count: int, parts: int) -> list[range]:
  """Returns nearly equal blocks of `count` numbers."""
  return [range(n * count // parts, (n + 1) * count // parts) for n in range(parts)]


def _as_json(config: RolloutConfig) -> dict[str, Any]:
  return array_codec.to_json(attributes.of_fields(config) | {"engine_options": {}})


def _share_of(urls: Any) -> list[str]:
  """Returns the addresses that this process uses.

  Raises:
    ValueError: there are none, one comes twice, or processes would have other numbers.
  """
  is_list = isinstance(urls, (list, tuple)) and all(isinstance(u, str) for u in urls)
  if not is_list or not urls or len({u.rstrip("/") for u in urls}) < len(urls):
    raise ValueError(f"urls is {urls!r}: give {_URLS}, each once")
  count, me = jax.process_count(), jax.process_index()
  if len(urls) % count:
    raise ValueError(
      f"urls has {len(urls)} addresses and there are {count} processes: give each "
      "process the same number of hosts"
    )
  return list(urls)[me * len(urls) // count : (me + 1) * len(urls) // count]
