"""CheckpointManager: reads and writes checkpoints with orbax.

A checkpoint is a RunState: `model_params`, `model_rest`, `optimizer_state` (arrays),
`progress` and `custom_metadata` (JSON). Fields that are None are not written. The item
`checksums` (JSON) covers all others; older checkpoints lack it and are read unchecked.
Saving is collective: all processes of a run must call it.
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

from tunix.sft.checkpoints import checksums, errors, forms, orbax_options
from tunix.sft.steps import run_state
from tunix.sft.steps.run_state import ARRAYS, RunState
from tunix.utils import checks, coordination, env, tree
from tunix.utils.setting import known_values

_log = logging.getLogger(__name__)

_JSON = ("progress", "custom_metadata")
_CHECKSUMS = "checksums"

# The open orbax managers of this process, by folder. A notebook cell that is run again
# makes a second manager of a folder while the first one may still be writing; the
# second one waits for it. `close` removes a manager from this table.
_OPEN: dict[str, Any] = {}


class CheckpointManager:
  """Saves and restores runs in one folder.

  Args:
    root_directory: the folder, or a gs:// address if the packages for it are installed;
      None: nothing is saved and nothing is found.
    options: cadence and number of checkpoints, as CheckpointOptions or orbax's
      CheckpointManagerOptions.
    kept: function that returns the step of a checkpoint that is kept in addition to the
      newest ones, or None.

  Raises:
    TypeError: The options are of another kind.
    ValueError: A setting of orbax's options has no counterpart here.
  """

  def __init__(
    self,
    root_directory: str | pathlib.Path | None = None,
    options: object = None,
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

    # Pathways cannot write the formats OCDBT and Zarr 3.
    newer = not env.pathways_available()
    handlers: dict[str, Any] = {
      name: ocp.PyTreeCheckpointHandler(use_ocdbt=newer, use_zarr3=newer)
      for name in ARRAYS
    }
    return handlers | {
      name: ocp.JsonCheckpointHandler() for name in (*_JSON, _CHECKSUMS)
    }

  @property
  def timeout_secs(self) -> int:
    """Most seconds that a process waits for the others when saving."""
    return self._options.timeout_secs

  def should_save(self, step: int) -> bool:
    """Returns True if the cadence requires a checkpoint at this step."""
    return self._manager is not None and self._manager.should_save(step)

  def save_state(self, step: int, state: RunState, *, force: bool = False) -> bool:
    """Saves a run.

    Args:
      step: number of the checkpoint.
      state: the run.
      force: save even if the cadence does not require it.

    Returns: True if the checkpoint was written, or is being written.

    Raises:
      OSError: The disk is full or not writable. Asynchronous saving may raise this
        error in a later call, or in `close`. Earlier checkpoints are unchanged.
      TypeError: The metadata, or the state of a data iterator, is no JSON.
      coordination.AbsentError: Another process did not take part.
    """
    self.check_open()
    if self._manager is None or (not force and not self.should_save(step)):
      return False
    arrays, values = state.arrays(), _json_values(state)
    for name, value in values.items():
      _check_json(name, value)
    everywhere = coordination.gather(
      f"writing checkpoint {step}",
      checksums.of(arrays, values),
      self.timeout_secs,
      topic="writing checkpoints",
    )
    import orbax.checkpoint as ocp

    items: dict[str, Any] = {
      name: ocp.args.PyTreeSave(part) for name, part in arrays.items()
    }
    values[_CHECKSUMS] = checksums.joined(everywhere)
    items |= {name: ocp.args.JsonSave(value) for name, value in values.items()}
    # A save in the background may report the failure of an earlier one.
    with errors.named_failure(self._root, None if self._options.asynchronous else step):
      return self._manager.save(step, args=ocp.args.Composite(**items), force=force)

  def restore_state(
    self, like: RunState, *, step: int | None = None, partial: bool = False
  ) -> tuple[int, RunState] | None:
    """Restores the newest readable checkpoint onto the shardings of `like`.

    Damaged checkpoints are skipped. If an older checkpoint can be read, the damaged
    ones are renamed to `<step>.damaged`, with a warning. The call first waits until a
    save in the background is complete.

    Args:
      like: the arrays to restore, with their shapes, dtypes and shardings. A field that
        is None is not restored; an empty field must be empty in the checkpoint too.
      step: step of the checkpoint; None: the newest readable one.
      partial: the checkpoint may have more arrays than `like`.

    Returns: (step, state), or None if there is no checkpoint.

    Raises:
      ValueError: The checkpoint belongs to another model or optimizer. The message
        names arrays that are missing, unexpected or of another shape.
      FileNotFoundError: There is no checkpoint of `step`.
      RuntimeError: There are checkpoints, and none can be read. They are not changed.
      MemoryError, OSError: This machine cannot read files, for reasons other than
        damage.
    """
    self.check_open()
    if self._manager is None:
      return None
    self.wait()
    steps = sorted(self._manager.all_steps(), reverse=True)
    if step is not None:
      if step not in steps:
        raise FileNotFoundError(
          f"no checkpoint of step {step} in {self._root}; expected one of "
          f"{sorted(steps)}"
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
        f"newest: {damaged[0][1]}). Restore the folder from a copy, or start again "
        "with another folder; this one was not changed."
      )
    return None

  def _try(
    self, step: int, like: RunState, partial: bool
  ) -> tuple[RunState | None, str | None]:
    """Returns (state, None), or (None, the damage), the same on every process."""
    state, problem, failure = None, None, None
    try:
      state = self._read(step, like, partial)
    except Exception as error:  # a damaged file can raise any error in the readers
      if isinstance(error, errors.MismatchError) or not errors.means_damage(error):
        failure = error
      problem = f"{type(error).__name__}: {str(error)[:200]}".splitlines()[0]
    # All processes must decide alike: if one of them tried an older checkpoint alone,
    # the others would wait for it in the next collective read.
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
    for name, part in known_values(like, ARRAYS).items():
      target = jax.tree.map(forms.abstract, part)
      saved = forms.of_metadata(metadata[name]) if name in written else {}
      subject = f"the checkpoint of step {step} in {self._root} does not fit ({name})"
      forms.check(subject, saved, tree.flatten(target), partial)
      if part:
        items[name] = ocp.args.PyTreeRestore(
          item=target,
          restore_args=ocp.checkpoint_utils.construct_restore_args(target),
          partial_restore=partial,
        )
    for name in (*_JSON, _CHECKSUMS):
      if name in written:
        items[name] = ocp.args.JsonRestore()
    restored = self._manager.restore(step, args=ocp.args.Composite(**items))
    state = RunState(**{name: restored[name] for name in items if name != _CHECKSUMS})
    if _CHECKSUMS in items:
      checksums.check(restored[_CHECKSUMS], state.arrays(), _json_values(state))
    return state

  def _written_items(self, step: int) -> set[str]:
    """Returns the names of the saved items.

    Raises:
      FileNotFoundError: An item is missing on disk.
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
      "checkpoint %d in %s cannot be read (%s): it is renamed to %d.damaged, and "
      "an older one is used",
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
    optimizer: object = None,
    *,
    save_only_lora_params: bool = False,
    force: bool = False,
    custom_metadata: dict[str, Any] | None = None,
  ) -> bool:
    """Saves a module and, if it is given, an optimizer's state.

    Args:
      step: number of the checkpoint.
      model: the module, with its parameters and other variables.
      optimizer: an nnx.Optimizer, or the state of an optax transformation.
      save_only_lora_params: save only the LoRA parameters of the module.
      force: save even if the cadence does not require it.
      custom_metadata: JSON values, which `maybe_restore` returns.

    Returns: True if the checkpoint was saved. False without a root directory.
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
    optimizer: nnx.Optimizer | None = None,
    *,
    step: int | None = None,
    restore_only_lora_params: bool = False,
  ) -> tuple[int, dict[str, Any]]:
    """Restores a checkpoint of `save` into a module and an nnx.Optimizer, in place.

    Args:
      model: the module.
      optimizer: an nnx.Optimizer; None: its state is not restored.
      step: step of the checkpoint; None: the newest one.
      restore_only_lora_params: restore only the LoRA parameters; the checkpoint may
        have all parameters.

    Returns: (step, custom metadata); (0, {}) if there is no checkpoint.

    Raises:
      TypeError: `optimizer` cannot be changed in place.
      Others: See `restore_state`.
    """
    if optimizer is not None and not isinstance(optimizer, nnx.Optimizer):
      raise TypeError(
        f"optimizer is {checks.type_of(optimizer)}, which cannot be restored in "
        "place; expected an nnx.Optimizer. Give a step number as step=."
      )
    like = run_state.of_module(model, optimizer, restore_only_lora_params)
    saved = self.restore_state(like, step=step, partial=restore_only_lora_params)
    if saved is None:
      return 0, {}
    at, state = saved
    run_state.load_into(model, optimizer, state, restore_only_lora_params)
    return at, state.custom_metadata or {}

  def restore(
    self, model: nnx.Module, optimizer: nnx.Optimizer | None = None, **options: Any
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
    """Returns the step of the newest complete checkpoint; None if there is none."""
    return None if self._manager is None else self._manager.latest_step()

  def wait(self) -> None:
    """Waits until a save in the background is complete.

    Raises:
      OSError: The checkpoint could not be written.
    """
    if self._manager is not None:
      with errors.named_failure(self._root, None):
        self._manager.wait_until_finished()

  def prune(self) -> None:
    """Deletes checkpoints beyond `max_to_keep`.

    A save deletes them too, but a run that was killed during the deletion, and has
    nothing left to save after it resumed, would keep them.
    """
    if self._manager is None:
      return
    steps = sorted(self._manager.all_steps())
    keep = orbax_options.kept(steps, self._options.max_to_keep, self._kept())
    for step, is_kept in zip(steps, keep):
      if not is_kept:
        self._manager.delete(step)

  def close(self) -> None:
    """Waits for the last save, and closes; raises the errors of `wait`."""
    if self._manager is not None:
      manager, self._manager, self._closed = self._manager, None, True
      if _OPEN.get(str(self._root)) is manager:
        del _OPEN[str(self._root)]
      with errors.named_failure(self._root, None):
        manager.close()

  def check_open(self) -> None:
    """Raises RuntimeError if the manager is closed."""
    if self._closed:
      raise RuntimeError(
        f"the checkpoint manager of {self._root} is closed. Make a new one, or a new "
        "trainer, to save again."
      )


def _json_values(state: RunState) -> dict[str, Any]:
  return known_values(state, _JSON)


def _check_json(name: str, value: object) -> None:
  # A background thread writes the JSON: its error would come late and without a name.
  try:
    json.dumps(value)
  except TypeError as error:
    raise TypeError(
      f"{name} of a checkpoint cannot be written ({error}); expected values that JSON "
      "can hold. Convert arrays in metadata and in the state of data iterators."
    ) from error
