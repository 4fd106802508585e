"""Checkpoints of a run on disk, through orbax.

A checkpoint is a RunState: `model_params`, `model_rest`, `optimizer_state` (arrays),
`progress` and `custom_metadata` (JSON); parts that are absent are not written. Saving
is collective: with several processes each of them calls it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from tunix.sft import (
  checkpoint_errors as errors,
  checkpoint_forms as forms,
  orbax_options,
  run_state,
)
from tunix.sft.run_state import ARRAYS, RunState
from tunix.utils import coordination, env, tree

_log = logging.getLogger(__name__)

_JSON = ("progress", "custom_metadata")

# Orbax's managers that this process has open, by folder: a notebook cell run again
# makes a second one while the first may still be writing, and nothing but the process
# itself knows of both. The one table of its kind; `close` takes managers out of it.
_OPEN: dict[str, Any] = {}


class CheckpointManager:
  """Saves and restores runs under one folder.

  Args:
    root_directory: the folder (or a gs:// address, where the extra packages for it are
      installed); None: nothing is saved and nothing is found.
    options: cadence and number of checkpoints; orbax's CheckpointManagerOptions are
      translated.
    kept: gives the step of a checkpoint that stays besides the newest; None: none does.

  Raises:
    TypeError: options of another kind.
    ValueError: orbax's options with a setting that has no counterpart here.
  """

  def __init__(
    self,
    root_directory: str | pathlib.Path | None = None,
    options: Any = None,
    kept: Callable[[], int | None] = lambda: None,
  ):
    self._options = orbax_options.from_any(options)
    self._kept = kept
    self._root = None if root_directory is None else str(root_directory)
    if self._root is not None and "://" not in self._root:
      self._root = str(pathlib.Path(self._root).absolute())
    self._manager = None if self._root is None else self._open(self._root)
    self._closed = False

  def _open(self, root: str) -> Any:
    import orbax.checkpoint as ocp

    if (before := _OPEN.get(root)) is not None:
      with errors.named_failure(root, None):
        before.wait_until_finished()
    options = orbax_options.for_orbax(self._options, self._kept)
    handlers = self._handlers()
    _OPEN[root] = ocp.CheckpointManager(root, options=options, item_handlers=handlers)
    return _OPEN[root]

  def _handlers(self) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    # Pathways cannot write the newer formats.
    modern = not env.pathways_available()
    handlers: dict[str, Any] = {
      name: ocp.PyTreeCheckpointHandler(use_ocdbt=modern, use_zarr3=modern)
      for name in ARRAYS
    }
    return handlers | {name: ocp.JsonCheckpointHandler() for name in _JSON}

  @property
  def timeout_secs(self) -> int:
    """How long processes wait for each other when saving."""
    return self._options.timeout_secs

  def should_save(self, step: int) -> bool:
    """Whether the cadence asks for a checkpoint at this step."""
    return self._manager is not None and self._manager.should_save(step)

  def save_state(self, step: int, state: RunState, *, force: bool = False) -> bool:
    """Saves a run; returns whether it was written (or is being written).

    Raises:
      OSError: the disk is full or not writable. With asynchronous saving it may come
        out of a later call, or of `close`; checkpoints written before are untouched.
      TypeError: metadata, or the state of a data iterator, that is no JSON.
      coordination.AbsentError: another process does not save.
    """
    self.check_open()
    if self._manager is None or (not force and not self.should_save(step)):
      return False
    coordination.gather(f"writing checkpoint {step}", None, self.timeout_secs)
    import orbax.checkpoint as ocp

    items: dict[str, Any] = {
      name: ocp.args.PyTreeSave(part) for name, part in state.arrays().items()
    }
    for name in _JSON:
      if (value := getattr(state, name)) is not None:
        _check_json(name, value)
        items[name] = ocp.args.JsonSave(value)
    with errors.named_failure(self._root, step):
      return self._manager.save(step, args=ocp.args.Composite(**items), force=force)

  def restore_state(
    self, like: RunState, *, step: int | None = None, partial: bool = False
  ) -> tuple[int, RunState] | None:
    """Restores the newest readable run, onto the shardings of `like`.

    A checkpoint that turns out damaged is passed over; when one before it can be read,
    the damaged ones are renamed to `<step>.damaged`, with a warning. What is being
    written is waited for.

    Args:
      like: which arrays to restore, with their shapes, dtypes and shardings. A part
        that is None is left in the checkpoint; one without arrays must have none there.
      step: this checkpoint and no other.
      partial: parts of the checkpoint may hold more arrays than asked for.

    Returns: (step, state), or None when there is no checkpoint.

    Raises:
      ValueError: the checkpoint belongs to another model or optimizer: the arrays that
        are missing, unexpected or of another shape are named.
      FileNotFoundError: `step` was asked for and is not there.
      RuntimeError: there are checkpoints, and none of them can be read; they stay.
      MemoryError, OSError: this machine could not read, whatever the files are like.
    """
    self.check_open()
    if self._manager is None:
      return None
    self.wait()
    steps = sorted(self._manager.all_steps(), reverse=True)
    if step is not None:
      if step not in steps:
        raise FileNotFoundError(
          f"no checkpoint of step {step} in {self._root}: there are {sorted(steps)}"
        )
      return step, self._read(step, like, partial)
    damaged: list[tuple[int, str]] = []
    for candidate in steps:
      state, problem = self._try(candidate, like, partial)
      if problem is None:
        for number, what in damaged:
          self._set_aside(number, what)
        assert state is not None
        return candidate, state
      damaged.append((candidate, problem))
    if damaged:
      raise RuntimeError(
        f"none of the checkpoints {sorted(steps)} in {self._root} can be read (the "
        f"newest: {damaged[0][1]}): restore the folder from a copy, or start again "
        "with another one; nothing in it was changed"
      )
    return None

  def _try(
    self, step: int, like: RunState, partial: bool
  ) -> tuple[RunState | None, str | None]:
    """(the state, None), or (None, what is damaged) on every process alike."""
    state, problem, failure = None, None, None
    try:
      state = self._read(step, like, partial)
    except Exception as error:  # whatever a damaged file makes the readers raise
      if isinstance(error, errors.MismatchError) or not errors.means_damage(error):
        failure = error
      problem = f"{type(error).__name__}: {str(error)[:200]}".splitlines()[0]
    # A process that gave up alone would leave the others waiting in the next restore.
    everywhere = coordination.gather(
      f"reading checkpoint {step}", {"problem": problem, "fatal": failure is not None}
    )
    if failure is not None:
      raise failure
    if any(each["fatal"] for each in everywhere):
      raise RuntimeError(f"another process could not read checkpoint {step}")
    problems = [each["problem"] for each in everywhere if each["problem"]]
    return (None, problems[0]) if problems else (state, None)

  def _read(self, step: int, like: RunState, partial: bool) -> RunState:
    import orbax.checkpoint as ocp

    assert self._manager is not None
    written = self._written_items(step)
    metadata = self._manager.item_metadata(step)
    items: dict[str, Any] = {}
    for name in ARRAYS:
      if (part := getattr(like, name)) is None:
        continue
      target = jax.tree.map(forms.abstract, part)
      saved = forms.of_metadata(metadata[name]) if name in written else {}
      where = f"the checkpoint of step {step} in {self._root} does not fit ({name})"
      forms.check(where, saved, tree.flatten(target), partial)
      if part:
        items[name] = ocp.args.PyTreeRestore(
          item=target,
          restore_args=ocp.checkpoint_utils.construct_restore_args(target),
          partial_restore=partial,
        )
    for name in _JSON:
      if name in written:
        items[name] = ocp.args.JsonRestore()
    restored = self._manager.restore(step, args=ocp.args.Composite(**items))
    return RunState(**{name: restored[name] for name in items})

  def _written_items(self, step: int) -> set[str]:
    """Names of the items that were saved.

    Raises:
      FileNotFoundError: one of them is not there any more.
    """
    assert self._manager is not None
    written: set[str] = set(self._manager.metadata(step).item_handlers or {})
    if not written:
      raise FileNotFoundError("the list of its items is missing")
    folder = self._manager.directory / str(step)
    if lost := sorted(written - {p.name for p in folder.iterdir()}):
      raise FileNotFoundError(f"item {lost[0]} is missing")
    return written

  def _set_aside(self, step: int, problem: str) -> None:
    assert self._manager is not None
    _log.warning(
      "checkpoint %d in %s cannot be read (%s): it is renamed to %d.damaged and "
      "the one before it is used",
      step,
      self._root,
      problem,
      step,
    )
    if jax.process_index() == 0:
      folder = self._manager.directory / str(step)
      target = folder.parent / f"{step}.damaged"
      number = 1
      while target.exists():
        target, number = folder.parent / f"{step}.damaged.{number}", number + 1
      folder.rename(target)
    coordination.gather(f"setting checkpoint {step} aside", None)
    self._manager.reload()

  def save(
    self,
    step: int,
    model: nnx.Module,
    optimizer: Any = None,
    *,
    save_only_lora_params: bool = False,
    force: bool = False,
    custom_metadata: dict[str, Any] | None = None,
  ) -> bool:
    """Saves a module, and an optimizer's state if it is given.

    Args:
      step: number of the checkpoint.
      model: its parameters and other variables are saved.
      optimizer: an nnx.Optimizer, or the state of an optax transformation.
      save_only_lora_params: only the LoRA parameters.
      force: save although the cadence does not ask for it.
      custom_metadata: JSON, returned by `maybe_restore`.

    Returns: whether it was saved (False also without a root directory).
    """
    self.check_open()
    if self._manager is None:
      return False
    state = run_state.of_module(model, optimizer, save_only_lora_params)
    state = dataclasses.replace(state, custom_metadata=custom_metadata or {})
    return self.save_state(step, state, force=force)

  def maybe_restore(
    self,
    model: nnx.Module,
    optimizer: Any = None,
    *,
    step: int | None = None,
    restore_only_lora_params: bool = False,
  ) -> tuple[int, dict[str, Any]]:
    """Restores into `model` (and an nnx.Optimizer) what `save` wrote.

    Args:
      model, optimizer: changed in place.
      step: this checkpoint; None: the newest.
      restore_only_lora_params: only the LoRA parameters, also of a checkpoint that
        holds all parameters.

    Returns: (step, custom metadata); (0, {}) when there is no checkpoint.

    Raises:
      TypeError: `optimizer` cannot be changed in place.
      Others: as `restore_state`.
    """
    if optimizer is not None and not isinstance(optimizer, nnx.Optimizer):
      raise TypeError(
        f"optimizer is a {type(optimizer).__name__}, which cannot be restored in "
        "place: expected an nnx.Optimizer; give a step number as step="
      )
    like = run_state.of_module(model, optimizer, restore_only_lora_params)
    saved = self.restore_state(like, step=step, partial=restore_only_lora_params)
    if saved is None:
      return 0, {}
    at, state = saved
    run_state.load_into(model, optimizer, state, restore_only_lora_params)
    return at, state.custom_metadata or {}

  def restore(
    self, model: nnx.Module, optimizer: Any = None, **options: Any
  ) -> tuple[int, dict[str, Any]]:
    """`maybe_restore`, but having nothing to restore is an error.

    Raises:
      FileNotFoundError: there is no checkpoint.
    """
    if self.latest_step() is None:
      where = self._root or "it: the manager was made without a root directory"
      raise FileNotFoundError(f"no checkpoint in {where}")
    return self.maybe_restore(model, optimizer, **options)

  def latest_step(self) -> int | None:
    """The newest complete checkpoint; None if there is none."""
    return None if self._manager is None else self._manager.latest_step()

  def wait(self) -> None:
    """Waits until what is being written is on disk.

    Raises:
      OSError: it could not be written.
    """
    if self._manager is not None:
      with errors.named_failure(self._root, None):
        self._manager.wait_until_finished()

  def prune(self) -> None:
    """Deletes the checkpoints beyond `max_to_keep`. A save does so itself; what was
    killed before it had, and then has nothing more to save, leaves them."""
    if self._manager is None:
      return
    steps = sorted(self._manager.all_steps())
    stay = orbax_options.kept(steps, self._options.max_to_keep, self._kept())
    for step, stays in zip(steps, stay):
      if not stays:
        self._manager.delete(step)

  def close(self) -> None:
    """Waits for the last save and closes; raises as `wait` does."""
    if self._manager is not None:
      manager, self._manager, self._closed = self._manager, None, True
      if _OPEN.get(str(self._root)) is manager:
        del _OPEN[str(self._root)]
      with errors.named_failure(self._root, None):
        manager.close()

  def check_open(self) -> None:
    """Raises RuntimeError once it is closed."""
    if self._closed:
      raise RuntimeError(
        f"the checkpoint manager of {self._root} is closed: make a new one (or a new "
        "trainer) to go on saving"
      )


def _check_json(name: str, value: Any) -> None:
  # A background thread writes it: its error would come late, and name nothing.
  try:
    json.dumps(value)
  except TypeError as error:
    raise TypeError(
      f"{name} of a checkpoint cannot be written ({error}): metadata and the states of "
      "data iterators hold strings, numbers, lists and dicts; convert arrays"
    ) from error
