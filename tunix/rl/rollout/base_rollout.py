"""Base class, settings and output of every rollout engine."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.generate.decoders import layout
from tunix.generate.decoders.layout import GatherWeights
from tunix.generate.drawing.params import SamplingParams
from tunix.generate.engine.engine import Engine
from tunix.generate.sizes import batching
from tunix.generate.tokens import COLUMNS, Completion
from tunix.models.images.prompt_images import PromptImages
from tunix.models.transformer.dense.quantized import OF_A_BYTE
from tunix.rl.rollout.client import SamplingClient, Stream
from tunix.rl.rollout.local_clients import BatchClient, EngineClient
from tunix.rl.weights import placement, reshard
from tunix.rl.weights.placement import Weights
from tunix.utils import checks, coordination, mesh as mesh_lib
from tunix.utils.setting import known_values, named_values

# Seconds that a process waits for the others' completions after its own are drawn.
_TIMEOUT_S = 3600.0

# Rules that each call of a sampler names. Samplers of users need not know the others,
# which are named only if they are set.
_ALWAYS = ("temperature", "top_p", "top_k", "min_p", "eos_tokens", "stop_strings")
_DEFAULTS = SamplingParams().rules()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingParams):
  """The settings of sampling completions, see `SamplingParams` for the other fields.

  Attributes:
    max_tokens_to_generate: largest number of tokens of a completion, including its
      end-of-sequence token.
    max_prompt_length: largest number of tokens of a prompt; a longer one is an error.
    temperature: divisor of the logits, both in sampling and in scoring. 0 is greedy,
      for evaluation only.
    seed: seed of the run. The tokens of a completion depend on it, and on the numbers
      of the step, the prompt and the sample.
    kv_cache_size: largest number of tokens of prompt and completion together; None: the
      sum of the two limits.
    gather_weights: layout of our own sampler's weights that are sharded over the batch
      axes. True: all-gather them once per batch instead of in every decode step.
      "split": reshard them once per batch so that the devices share the products of a
      step, and activations move instead of weights. False: leave them unchanged. None:
      the first of True and "split" whose weights take at most a quarter of a device's
      memory, else False. On CPUs: False, and True for batch-invariant models.
    slots: number of completions that our engine samples at the same time; None: all of
      a batch, at most 64 on a CPU and 512 elsewhere. The padded sampler takes all.
    replay_routes: for a mixture of experts: record the experts of each token while it
      is sampled, and use them in training in place of the router's choice; see
      docs/guides/rl.md. Only with our own engine and sampler.
    center_scores: score centering (see docs/algorithms.md): record the probabilities of
      this number of most likely tokens with each drawn token, and subtract from the
      loss the gradient that the sampler expects whatever the rewards are. 0: off.
      Only with our own engine; 64 is a good start.
    weights: form of the kernels that sample: "int8" or "fp8" (8 bits, with a scale for
      each output), made from the policy's whenever the engine gets its weights; None:
      as they are trained. Only with our own engine and sampler. Tokens then come from
      another policy, so `rollout_correction` is truncated importance sampling unless
      it is set.
    engine_options: options that are passed to the engine unchanged (address, structured
      output, ...). Our own sampler has none and refuses them.
  """

  max_tokens_to_generate: int = 64
  max_prompt_length: int = 64
  temperature: float = 1.0
  seed: int = 0
  stop_strings: Sequence[str] | None = None
  kv_cache_size: int | None = None
  gather_weights: GatherWeights = None
  slots: int | None = None
  replay_routes: bool = False
  center_scores: int = 0
  weights: Literal["int8", "fp8"] | None = None
  engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    layout.check(self.gather_weights)
    checks.fields(
      self,
      max_tokens_to_generate=checks.COUNT,
      max_prompt_length=checks.COUNT,
      kv_cache_size=checks.COUNT,
      slots=checks.COUNT,
      center_scores=checks.NOT_NEGATIVE,
    )
    if self.weights not in (None, *OF_A_BYTE):
      raise ValueError(
        f"weights is {self.weights!r}; expected one of {', '.join(OF_A_BYTE)}, or None"
      )
    need = self.max_prompt_length + self.max_tokens_to_generate
    if self.kv_cache_size is not None and self.kv_cache_size < need:
      raise ValueError(
        f"kv_cache_size is {self.kv_cache_size}: prompts of {self.max_prompt_length} "
        f"and completions of {self.max_tokens_to_generate} tokens need {need}. Raise "
        "it, or leave it out"
      )

  @property
  def sampling_options(self) -> dict[str, Any]:
    """Options of a sampler's call: the choice of tokens and the end of rows.

    The seed is not among them: each call has its own.
    """
    rules = {**self.rules(), "stop_strings": self.stop_strings or ()}
    del rules["seed"]
    return {k: v for k, v in rules.items() if k in _ALWAYS or v != _DEFAULTS[k]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOutput:
  """The completions of a batch, B rows ordered by prompt.

  Attributes:
    text: B completions without their end-of-sequence tokens.
    tokens: B int32 arrays, each with the end-of-sequence token that ended its row.
    prompt_tokens: B int32 arrays, prompt of each row (equal within a group).
    logprobs: B float32 arrays, in nats, under the distribution that was sampled from.
    finish_reasons: B of "eos", "stop", "length".
    version: version of the weights that sampled, from `update_params`.
    versions: B int32 arrays, the optimizer updates of the weights that drew each token,
      for an engine that changes its weights while it samples; or None.
    routes: B arrays [T + n, M, k] or None, the experts of the tokens of each prompt and
      completion, see `SamplerOutput.routes`; or None.
    head_ids, head_probs: B int32 and float32 arrays [n, k], see `Tokens`; or None.
  """

  text: list[str]
  tokens: list[np.ndarray]
  prompt_tokens: list[np.ndarray]
  logprobs: list[np.ndarray]
  finish_reasons: list[str]
  version: Any = None
  versions: list[np.ndarray] | None = None
  routes: list[np.ndarray | None] | None = None
  head_ids: list[np.ndarray] | None = None
  head_probs: list[np.ndarray] | None = None

  @classmethod
  def of(cls, rows: Sequence[Completion], version: Any = None) -> RolloutOutput:
    """Returns completions that a version of the weights drew as an output."""
    columns: dict[str, Any] = {}
    for name, column in _COLUMNS.items():
      values = [getattr(row, column) for row in rows]
      if any(x is not None for x in values):
        columns[name] = values
    return cls(**columns, version=version)

  def completions(self) -> list[Completion]:
    """Returns the completions, in the form of those of the engine."""
    columns = {_COLUMNS[n]: x for n, x in known_values(self, _COLUMNS).items()}
    of_row = lambda i: {c: _typed(c, x[i]) for c, x in columns.items()}
    return [Completion(number=i, **of_row(i)) for i in range(len(self.text))]

  def joined(self, others: Iterable[RolloutOutput]) -> RolloutOutput:
    """Returns these rows and then those of `others`, all of the same version."""
    names = known_values(self, _COLUMNS)
    every = [named_values(out, names) for out in (self, *others)]
    rows = {name: [x for out in every for x in out[name]] for name in names}
    return RolloutOutput(**rows, version=self.version)

  def with_versions(self) -> RolloutOutput:
    """Returns the output with the step of `version` as the version of every token."""
    step = self.version.step
    stamps = [np.full(len(row), step, np.int32) for row in self.tokens]
    return dataclasses.replace(self, versions=stamps)

  @property
  def left_padded_prompt_tokens(self) -> np.ndarray:
    """int32 [B, P], prompts padded on the left with 0."""
    width = max(map(len, self.prompt_tokens))
    rows = len(self.prompt_tokens)
    return batching.left_padded(self.prompt_tokens, rows, width, 0)[0]


# Fields of `RolloutOutput`, by their columns in `Completion`.
_COLUMNS = {
  "text": "text",
  "tokens": "ids",
  "prompt_tokens": "prompt",
  "logprobs": "sampling_logps",
  "finish_reasons": "finish_reason",
  "versions": "versions",
  "routes": "routes",
  "head_ids": "head_ids",
  "head_probs": "head_probs",
}


def _typed(column: str, value: object) -> Any:
  """Returns a value of a user's engine in the type of its column in `Tokens`."""
  if value is None or isinstance(value, str):
    return value
  return np.asarray(value, COLUMNS[column].dtype if column in COLUMNS else np.int32)


class BaseRollout(abc.ABC):
  """An engine that samples completions from the policy.

  Subclasses write `generate`, which is called with the prompts of a batch, and
  `update_params`, which is called after every update of the policy. The cluster makes
  an engine as `Class(model, tokenizer, rollout_config)`.

  Attributes:
    version: version of the engine's weights; None before the first `update_params`.
    sampler: name of the sampler that draws, for an engine that has several whose tokens
      may differ; it is part of a checkpoint. None: there is one.
    engine_count: number of engines that share the prompts of this process.
    mesh: the mesh that is current in the thread that samples, if this process samples
      its share of a batch alone, on its own devices or hosts; None: all processes
      sample together.
    reads_images: True if prompts may have images; `RLCluster` sets it.
  """

  version: Any = None
  sampler: str | None = None
  engine_count: int = 1
  mesh: Mesh | None = None
  reads_images: bool = False
  _waited_s = 0.0

  @classmethod
  def module_of(
    cls,
    actor: nnx.Module,
    actor_mesh: Mesh | None,
    rollout_mesh: Mesh | None,
    *,
    samples_behind: bool,
  ) -> nnx.Module:
    """Returns the module that an engine of this class is made with.

    Args:
      actor: the policy that is trained.
      actor_mesh: its mesh, with Auto axes.
      rollout_mesh: the mesh of the role "rollout"; None: none was given.
      samples_behind: True if older weights sample while the actor changes.
    """
    if rollout_mesh is not None and mesh_lib.auto(rollout_mesh) != actor_mesh:
      return reshard.reshard_model_to_mesh(nnx.clone(actor), rollout_mesh)
    # On the actor's mesh, the engine samples with the actor's arrays and needs no copy.
    # A clone shares the arrays that are not trained.
    return nnx.clone(actor) if samples_behind else actor

  def use_sampler(self, name: str) -> None:
    """Draws with another sampler from now on: that of a run that is resumed.

    Raises:
      ValueError: the engine has no sampler of this name.
    """
    if name != self.sampler:
      raise ValueError(
        f"the run was begun with the sampler {name!r}, and {type(self).__name__} has "
        f"only {self.sampler!r}: resume with the rollout engine of that run"
      )

  @abc.abstractmethod
  def generate(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int = 1,
    seed: jax.Array | int | None = None,
    first_prompt: int = 0,
    images: Sequence[PromptImages | None] = (),
  ) -> RolloutOutput:
    """Returns `num_generations` completions of each prompt.

    Args:
      prompts: strings or sequences of token ids.
      rollout_config: settings of this call.
      num_generations: completions of each prompt.
      seed: an int or a jax.random key; None: the seed of `rollout_config`.
      first_prompt: number of the first prompt. A batch that is sampled in parts with
        one seed then draws the same tokens as in one call.
      images: those of each prompt, given only if prompts have images.
    """

  def session(
    self, rows: int, max_tokens: int
  ) -> contextlib.AbstractContextManager[Engine | None]:
    """Lends the engine of this process for requests that follow from each other.

    Args:
      rows: rows that may run at the same time.
      max_tokens: most tokens of a row.

    Returns: a context whose value is the engine, or None if there is none.
    """
    del rows, max_tokens
    return contextlib.nullcontext(None)

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
    """Lends a client that draws the actions of a batch of episodes.

    Args:
      config: choice of the tokens.
      key: key of the batch.
      episodes: number of the episodes.
      limit: most tokens of a prompt and its action together.
      first: number of the first episode in its batch. `Draw.episode` counts from it.
    """
    with self.session(episodes, limit) as engine:
      if engine is None:
        assert not first  # a share of a batch is drawn by an engine of this process
        client: SamplingClient = BatchClient(self, config, key, limit)
      else:
        version = getattr(self.version, "step", None)
        client = EngineClient(engine, config, key, version, first)
      try:
        yield client
      finally:
        client.cancel()

  def check_stream(self) -> None:
    """Checks that there is a `sampling_stream`.

    Raises:
      ValueError: the engine or its model has none.
    """
    raise ValueError(
      f"rollout_engine is {type(self).__name__}, and schedule is 'greedy', which needs "
      'our engine: set rollout_engine to "vanilla", or schedule to sync'
    )

  def sampling_stream(self, config: RolloutConfig, rows: int, limit: int) -> Stream:
    """Returns a client for the whole run, whose weights may change.

    Args:
      config: choice of the tokens.
      rows: actions that are drawn at the same time.
      limit: most tokens of a prompt and its action together.

    Raises:
      ValueError: see `check_stream`.
    """
    self.check_stream()
    raise NotImplementedError

  def exchange(self, what: str, work: Callable[[], Any]) -> list[Any]:
    """Returns the results of all processes, and counts the wait for them.

    The arguments and the errors are those of `coordination.exchange`.
    """
    if jax.process_count() == 1:
      return [work()]
    finished = [0.0]

    def timed() -> Any:
      out = work()
      finished[0] = time.monotonic()
      return out

    parts = coordination.exchange(what, timed, _TIMEOUT_S)
    self._waited_s += time.monotonic() - finished[0]
    return parts

  def take_waited(self) -> float:
    """Returns the seconds since the last call that exchanges waited for others."""
    waited, self._waited_s = self._waited_s, 0.0
    return waited

  @abc.abstractmethod
  def update_params(self, model: nnx.Module, version: Any) -> None:
    """Takes the weights of `model` and stores their `version`."""

  @abc.abstractmethod
  def pad_id(self) -> int:
    """Returns the id of the padding token."""

  @abc.abstractmethod
  def eos_id(self) -> int:
    """Returns the id of the end-of-sequence token."""

  def model(self) -> Any:
    """Returns the module that samples.

    Raises:
      TypeError: the weights are in another process.
    """
    raise TypeError(f"{type(self).__name__} holds no nnx.Module")

  def sampling_devices(self) -> set[Any]:
    """Returns the devices of this run that sample.

    Raises:
      TypeError: the weights are in another process.
    """
    return placement.devices_of(self.model())

  def weights_of(self, actor: nnx.Module) -> Mapping[str, Any]:
    """Returns the actor's weights of now, for a later `load`, by path.

    The learner's thread calls it. It starts no program on the devices of the engine.
    """
    return placement.sent(actor, self.model())

  def load(self, weights: Weights) -> None:
    """Takes weights of now or earlier; the thread that samples calls it."""
    model = self.model()
    placement.put(model, weights.arrays)
    self.update_params(model, weights.version)
