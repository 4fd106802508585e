"""Sampling clients in this process: for our engine, and for any rollout engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest, Ticket
from tunix.generate.tokens import Completion, Delta, joined
from tunix.rl.rollout.client import Draw, groups_of, keyed
from tunix.rl.weights import placement
from tunix.rl.weights.placement import Weights

if TYPE_CHECKING:
  from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig


class EngineClient:
  """Draws in the slots of an engine; equal prompts are prefilled once.

  Args:
    engine: the engine, which this object alone steps.
    config: choice of the tokens.
    key: random key of the batch; None: each `Draw` has its own key. The tokens of an
      action depend on its key, episode and turn.
    version: number of the weights; None: that of the engine.
    first: number of the first episode in its batch. `Draw.episode` counts from it.
  """

  def __init__(
    self,
    engine: Engine,
    config: RolloutConfig,
    key: jax.Array | None,
    version: int | None = None,
    first: int = 0,
  ):
    self._engine, self._config, self._key = engine, config, key
    self.vocab_size: int | None = engine.vocab_size
    self._version, self._start = version, first
    self.launches = 0
    self._open: dict[Ticket, list[list[Delta]]] = {}
    self._draws: dict[Ticket, list[Draw]] = {}

  @property
  def open(self) -> int:
    return len(self._open)

  def submit(self, draws: Sequence[Draw]) -> None:
    c = self._config
    ends = self._engine.tokenizer.eos_ids() if c.eos_tokens is None else c.eos_tokens
    for group in groups_of(draws):
      first = group[0]
      key = self._key if first.key is None else first.key
      assert key is not None
      request = EngineRequest.of(
        c,
        prompt=first.prompt,
        max_tokens=first.max_tokens,
        num_samples=len(group),
        seed=keyed(key, first.turn),
        first_row=self._start + first.episode,
        stop_ids=tuple(dict.fromkeys((*ends, *first.stop_ids))),
        stop_strings=(*c.stops, *first.stops),
        logit_bias=dict.fromkeys(first.forbidden, -np.inf),
        logprobs=True,
        images=first.images,
      )
      ticket = self._engine.submit(request, streams=False)
      self._open[ticket] = [[] for _ in group]
      self._draws[ticket] = group

  def poll(self) -> list[Completion]:
    """Runs one launch."""
    self.launches += bool(self._engine.step())
    return [drawn for ticket in list(self._open) for drawn in self._arrived(ticket)]

  def cancel(self) -> None:
    if self._engine.is_alive:
      self._engine.cancel_all()  # after an error nobody reads the open actions

  def _arrived(self, ticket: Ticket) -> list[Completion]:
    parts, done = self._open[ticket], list[Completion]()
    for delta in ticket.arrived():
      parts[delta.sample].append(delta)
      if delta.finish_reason is not None:
        done.append(self._action(ticket, joined(parts[delta.sample])))
    if all(p and p[-1].finish_reason is not None for p in parts):
      del self._open[ticket], self._draws[ticket]
    return done

  def _action(self, ticket: Ticket, drawn: Completion) -> Completion:
    """Returns a drawn completion with the id and version of its action."""
    stamps = drawn.versions
    if stamps is not None and self._version is not None:
      stamps = np.full_like(stamps, self._version)
    number = self._draws[ticket][drawn.number].id
    return dataclasses.replace(drawn, number=number, versions=stamps)


class EngineStream(EngineClient):
  """Draws in an engine of its own; see `Stream`.

  Args:
    engine: the engine, which ends with this object.
    model: its model, which no other code changes.
    config: choice of the tokens.
  """

  def __init__(self, engine: Engine, model: nnx.Module, config: RolloutConfig):
    super().__init__(engine, config, None)
    self._model = model

  def load(self, weights: Weights) -> None:
    placement.put(self._model, weights.arrays)
    self._engine.update_weights(version=weights.version.step, mode="keep")

  def cancel(self) -> None:
    self._engine.close()


class BatchClient:
  """Draws all submitted actions in one call of a rollout engine.

  Args:
    rollout: the engine.
    config: choice of the tokens.
    key: see `EngineClient`.
    limit: most tokens of a prompt.
  """

  def __init__(
    self, rollout: BaseRollout, config: RolloutConfig, key: jax.Array, limit: int
  ):
    self.vocab_size: int | None = None
    self._rollout, self._config = rollout, config
    self._key, self._limit = key, limit
    self._waiting: list[Draw] = []

  @property
  def open(self) -> int:
    return len(self._waiting)

  def submit(self, draws: Sequence[Draw]) -> None:
    self._waiting += draws

  def cancel(self) -> None:
    self._waiting.clear()

  def poll(self) -> list[Completion]:
    draws, self._waiting = self._waiting, []
    out: list[Completion] = []
    kinds: dict[Any, list[Draw]] = {}
    for draw in draws:
      kinds.setdefault((draw.turn, draw.stops, draw.stop_ids), []).append(draw)
    for (turn, stops, stop_ids), alike in kinds.items():
      out += self._call(alike, turn, stops, stop_ids)
    return out

  def _call(
    self,
    draws: list[Draw],
    turn: int,
    stops: tuple[str, ...],
    stop_ids: tuple[int, ...],
  ) -> list[Completion]:
    c, groups = self._config, groups_of(draws)
    size = len(groups[0])
    is_plain = turn == 0 and all(len(group) == size for group in groups)
    is_plain = is_plain and draws[-1].episode - draws[0].episode == len(draws) - 1
    is_plain = is_plain and draws[0].episode % size == 0
    key = keyed(self._key, turn)
    if is_plain:
      prompts, first = [group[0].prompt for group in groups], draws[0].episode // size
    else:
      # Rows of one call have consecutive numbers; the open episodes may not. So rows
      # start at 0, and the number of the first episode keeps the keys of calls apart.
      prompts, size, first = [draw.prompt for draw in draws], 1, 0
      key = jax.random.fold_in(key, draws[0].episode)
    ends = c.eos_tokens
    if stop_ids:
      ends = [*(ends or [self._rollout.eos_id()]), *stop_ids]
    # The list also covers prompts without images (None), so that the sampler forbids
    # the soft token in every row.
    rows = [group[0] for group in groups] if is_plain else draws
    has_images = draws[0].forbidden or any(x.images is not None for x in rows)
    reads = {"images": [x.images for x in rows]} if has_images else {}
    out = self._rollout.generate(
      prompts,
      dataclasses.replace(
        c,
        max_prompt_length=self._limit,
        max_tokens_to_generate=max(draw.max_tokens for draw in draws),
        kv_cache_size=None,
        eos_tokens=ends,
        stop_strings=(*c.stops, *stops),
      ),
      num_generations=size,
      seed=key,
      first_prompt=first,
      **reads,
    )
    return [
      dataclasses.replace(_cut(row, draw.max_tokens), number=draw.episode)
      for draw, row in zip(draws, out.completions(), strict=True)
    ]


def _cut(row: Completion, most: int) -> Completion:
  """Returns an action that is cut to at most `most` tokens."""
  if len(row.ids) <= most:
    return row
  return dataclasses.replace(row.cut(most), finish_reason="length")
