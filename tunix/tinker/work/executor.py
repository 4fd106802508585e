"""Execution of the requests of runs, one at a time, in the thread of the service."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from tunix.tinker.errors import TinkerError
from tunix.tinker.learning import data
from tunix.tinker.learning.learner import AdamParams, AdapterSpec, AdapterState, Learner
from tunix.tinker.protocol.results import Result
from tunix.tinker.state import checkpoints
from tunix.tinker.state.checkpoints import Checkpoints, Place
from tunix.tinker.state.runs import Op, Run
from tunix.utils import attributes

_LOG = logging.getLogger(__name__)

# Kinds of requests without an effect on the adapter. If their result is known, a
# restart does not repeat them.
_PURE = ("forward", "save_weights", "save_weights_for_sampler", "refused")


class Executor:
  """Computes requests.

  Args:
    learner: the computations.
    store: the checkpoints.
    keep_samplers: see `TinkerSettings`.
    on_sampler: called with the new path and the adapter of each checkpoint for
      sampling.
  """

  def __init__(
    self,
    learner: Learner,
    store: Checkpoints,
    keep_samplers: int,
    on_sampler: Callable[[Place, dict[str, Any]], None],
  ):
    self._learner, self._store = learner, store
    self._keep_samplers, self._on_sampler = keep_samplers, on_sampler

  def execute(self, run: Run, op: Op, earlier: Result | None) -> tuple[Result, bool]:
    """Computes a request.

    Args:
      run: its run; the adapter changes.
      op: the request.
      earlier: its result, if it was computed before a restart.

    Returns:
      The result; False if the run's adapter is lost, so that the run must be read from
      disk again.
    """
    if earlier is not None and (earlier.error is not None or op.kind in _PURE):
      if op.kind == "optim_step" and earlier.category == "user":
        with contextlib.suppress(TinkerError):  # there is no model
          self._state(run).gradient = None  # a refused update ends its gradient too
      return earlier, True
    try:
      if run.is_unloaded:
        raise TinkerError(
          f"the model {run.id} was unloaded; expected a loaded one. Create a model "
          "from one of its checkpoints"
        )
      result = _KINDS[op.kind](self, run, op)
      kind = {} if result.error is not None or result.arrays else {"type": op.kind}
      return dataclasses.replace(result, values={**result.values, **kind}), True
    except TinkerError as error:
      return Result(error=error.message), True
    except Exception as error:  # of the device or the disk: it must reach the client
      _LOG.exception("%s of %s failed", op.kind, run.id)
      text = f"the service failed: {type(error).__name__}: {error}"
      return Result(error=text, category="server"), op.kind in _PURE

  def _create(self, run: Run, op: Op) -> Result:
    run.state = self._learner.init(run.spec, run.info["seed"])
    return Result(values={"model_id": run.id})

  def _load(self, run: Run, op: Op) -> Result:
    place = checkpoints.parse(op.args["path"])
    meta = self._store.meta(place)
    spec = attributes.of(run.spec, ("rank", "train_attn", "train_mlp"))
    if meta["spec"] != spec:
      raise TinkerError(
        f"the checkpoint {place} has the adapter {meta['spec']}; expected {spec}, that "
        "of the model. Create a new model from the checkpoint"
      )
    with_optimizer = op.args["optimizer"]
    if with_optimizer and place.kind != "weights":
      raise TinkerError(
        f"the checkpoint {place} has no optimizer state; expected one of save_state. "
        "Load it without the optimizer"
      )
    arrays = self._store.arrays(place)
    run.state = self._learner.from_arrays(run.spec, arrays, optimizer=with_optimizer)
    return Result(values={"path": str(place), "model_id": run.id})

  def _forward(self, run: Run, op: Op) -> Result:
    backward = op.kind == "forward_backward"
    outputs = self._learner.forward_backward(
      run.spec,
      self._state(run),
      data.from_arrays(op.arrays),
      op.args["loss_fn"],
      op.args["config"],
      backward=backward,
    )
    losses = np.concatenate([x.losses.ravel() for x in outputs])
    arrays = {x: op.arrays[x] for x in ("lengths", "widths") if x in op.arrays}
    arrays["logprobs"] = np.concatenate([x.logps.ravel() for x in outputs])
    if op.args["loss_fn"] == "cross_entropy":
      arrays["elementwise_loss"] = losses
    total = float(np.sum(losses, dtype=np.float64))
    return Result(values={"metrics": {"loss:sum": total}}, arrays=arrays)

  def _update(self, run: Run, op: Op) -> Result:
    metrics = self._learner.update(self._state(run), AdamParams(**op.args))
    run.steps += 1
    return Result(values={"metrics": metrics})

  def _save(self, run: Run, op: Op) -> Result:
    kind = "weights" if op.kind == "save_weights" else "sampler_weights"
    place = Place(run.id, kind, op.args["name"])
    state = self._state(run)
    if state.gradient is not None and kind == "weights":
      raise TinkerError(
        "save_weights came between forward_backward and optim_step; expected no open "
        "gradient, which a checkpoint does not have. Send optim_step first"
      )
    arrays = self._learner.to_arrays(state)
    if kind != "weights":
      arrays = {k: v for k, v in arrays.items() if k.startswith("params.")}
    is_ephemeral = bool(op.args.get("is_ephemeral"))
    meta = {"user_metadata": op.args.get("user_metadata")}
    meta["expires_at"] = checkpoints.expiry(op.args.get("ttl_seconds"))
    meta |= {"spec": run.info["spec"], "is_ephemeral": is_ephemeral}
    # A request that is repeated after a restart replaces its own checkpoint.
    meta["request"] = f"{run.id}:{run.done + 1}"
    self._store.save(
      place,
      arrays,
      None if is_ephemeral else self._learner.adapted(run.spec, state.params),
      meta,
      overwrite=op.args.get("overwrite", False),
    )
    if is_ephemeral:
      self._store.prune(run.id, self._keep_samplers)
    if kind != "weights":
      self._on_sampler(place, self._learner.adapters(run.spec, _params(arrays)))
    session = op.args.get("sampling_session_id")
    return Result(values={"path": str(place), "sampling_session_id": session})

  def _unload(self, run: Run, op: Op) -> Result:
    run.state, run.is_unloaded = None, True
    return Result(values={"model_id": run.id})

  def _refused(self, run: Run, op: Op) -> Result:
    return Result(error=op.args["error"])

  def _state(self, run: Run) -> AdapterState:
    """Returns the adapter of a run, read from disk if necessary."""
    if run.state is None:
      arrays = run.stored_state()
      if not arrays:
        raise TinkerError(
          f"the model {run.id} was not made, because its first request failed; "
          "expected a model. Create another one"
        )
      run.state = self._learner.from_arrays(run.spec, arrays)
    return run.state

  def arrays_of(self, run: Run) -> dict[str, np.ndarray]:
    """Returns the arrays to write for a run; none for an unloaded one."""
    return {} if run.state is None else self._learner.to_arrays(run.state)


def _params(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  return {name.removeprefix("params."): x for name, x in arrays.items()}


def adapters_of(learner: Learner, store: Checkpoints, place: Place) -> dict[str, Any]:
  """Returns the adapter of each module of a checkpoint, for the engine.

  Raises:
    NotFoundError: there is no such checkpoint.
  """
  spec = AdapterSpec(**store.meta(place)["spec"])
  arrays = store.arrays(place)
  params = {k: v for k, v in arrays.items() if k.startswith("params.")}
  return learner.adapters(spec, _params(params))


_KINDS: dict[str, Callable[[Executor, Run, Op], Result]] = {
  "create_model": Executor._create,
  "load_weights": Executor._load,
  "forward": Executor._forward,
  "forward_backward": Executor._forward,
  "optim_step": Executor._update,
  "save_weights": Executor._save,
  "save_weights_for_sampler": Executor._save,
  "unload_model": Executor._unload,
  "refused": Executor._refused,
}
