"""Routes of administration: pause, resume, adapters, weights."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

from tunix.serve.http.bodies import Answer, Call
from tunix.serve.http.errors import ApiError, bad
from tunix.serve.http.fields import Fields, missing, shown
from tunix.serve.openai.context import Context
from tunix.serve.openai.running import check_alive

_MODES = ("abort", "wait", "keep")
_UPDATES = ("keep", "recompute", "drain")
_NAME = re.compile(r"[\w.:/\-]{1,128}", re.ASCII)
_NOTHING: frozenset[str] = frozenset()


async def pause(call: Call, context: Context) -> Answer:
  """Pauses the engine; `mode` says how running requests end.

  "abort" ends them, "wait" lets them finish, "keep" stops them until `/resume`.
  """
  check_alive(context.driver)
  fields = Fields({**call.query, **call.body})
  mode = fields.text("mode", "abort")
  # In vLLM it drops kept prefixes. Here a prefix belongs to one version of the weights,
  # so it is never stale.
  fields.raw("clear_cache")
  fields.end(_NOTHING)
  if mode not in _MODES:
    raise bad("mode", f"mode is {shown(mode)}, expected one of {_MODES}")
  await _alone(context, lambda: context.driver.pause(mode), "the pause")
  return Answer(content={"status": "paused", "mode": mode})


async def resume(call: Call, context: Context) -> Answer:
  """Ends a pause."""
  check_alive(context.driver)
  Fields({**call.query, **call.body}).end(_NOTHING)
  # Not `_alone`: it must be able to end a pause that waits for requests.
  await _bounded(context, context.driver.resume, "the resumption")
  return Answer(content={"status": "resumed"})


async def is_paused(call: Call, context: Context) -> Answer:
  """Returns the engine's state."""
  return Answer(content={"is_paused": bool(context.driver.is_paused)})


async def load_adapter(call: Call, context: Context) -> Answer:
  """Loads a LoRA adapter from a folder below `checkpoint_root`."""
  fields = Fields(call.body)
  name, path = fields.text("lora_name"), fields.text("lora_path")
  fields.end(_NOTHING)
  if name is None or path is None:
    raise missing("lora_name" if name is None else "lora_path")
  if not _NAME.fullmatch(name):
    raise bad(
      "lora_name",
      f"lora_name is {shown(name)}, expected up to 128 letters, digits and . _ - : /",
    )
  if name == context.settings.model_name or name in context.engine.adapters:
    raise bad("lora_name", f"lora_name is {name!r}, which is taken: unload it first")
  folder = inside(context.settings.checkpoint_root, path, "lora_path")
  await _on_engine(context, lambda e: e.load_adapter(name, folder), "the load", folder)
  return Answer(content={"status": "loaded", "lora_name": name})


async def unload_adapter(call: Call, context: Context) -> Answer:
  """Unloads a LoRA adapter."""
  fields = Fields(call.body)
  name = fields.text("lora_name")
  fields.neutral(lora_int_id=(None,))
  fields.end(_NOTHING)
  if name is None:
    raise missing("lora_name")
  if name not in context.engine.adapters:
    raise ApiError(
      404,
      f"lora_name is {shown(name)}, expected one of {list(context.engine.adapters)}",
      param="lora_name",
      code="model_not_found",
    )
  await _on_engine(context, lambda e: e.unload_adapter(name), "the unload")
  return Answer(content={"status": "unloaded", "lora_name": name})


async def update_weights(call: Call, context: Context) -> Answer:
  """Loads weights from a checkpoint folder below `checkpoint_root`."""
  fields = Fields(call.body)
  path, mode = fields.text("path"), fields.text("mode", "recompute")
  version = fields.whole("version")
  fields.end(_NOTHING)
  if path is None:
    raise missing("path")
  if mode not in _UPDATES:
    raise bad("mode", f"mode is {shown(mode)}, expected one of {_UPDATES}")
  folder = inside(context.settings.checkpoint_root, path, "path")
  load = context.load_model
  if load is None:
    raise ApiError(403, "this server was started without a loader of checkpoints")
  check_alive(context.driver)
  timeout = context.settings.admin_timeout

  def update() -> None:
    model = load(folder)  # while the engine goes on
    # One number for all replicas, also for one that missed an earlier update.
    number = context.engine.version + 1 if version is None else version
    context.driver.call(
      lambda engine: engine.update_weights(model=model, version=number, mode=mode),
      timeout,
    )

  with _named(folder):
    await _alone(context, update, "the update")
  return Answer(content={"status": "updated", "version": context.engine.version})


def inside(root: pathlib.Path | None, path: str, name: str) -> pathlib.Path:
  """Returns a folder below a root.

  Args:
    root: the root; None: no folder is allowed.
    path: path relative to the root, or an absolute one inside it.
    name: name of the field, for messages.

  Raises:
    ApiError: 403 if the path leads out of the root, by ".." or by a link; the message
      does not tell whether it exists. 404 if there is no folder.
  """
  if root is None:
    raise ApiError(
      403,
      "this server reads no checkpoints: start it with checkpoint_root",
      param=name,
      code="forbidden_path",
    )
  try:
    base = root.resolve()
    folder = (base / path).resolve()
    is_inside = folder.is_relative_to(base)
    is_folder = is_inside and folder.is_dir()
  except (OSError, RuntimeError, ValueError):  # loops of links, NUL, long names
    is_inside = is_folder = False
  if not is_inside:
    raise ApiError(
      403,
      f"{name} is {shown(path)}, which is outside the folder that this server reads",
      param=name,
      code="forbidden_path",
    )
  if not is_folder:
    raise ApiError(404, f"{name} is {shown(path)}, which is no folder", param=name)
  return folder


async def _on_engine(
  context: Context,
  function: Callable[[Any], Any],
  what: str,
  folder: pathlib.Path | None = None,
) -> None:
  """Runs a function between two launches of the engine."""
  check_alive(context.driver)
  timeout = context.settings.admin_timeout
  with _named(folder):
    await _alone(context, lambda: context.driver.call(function, timeout), what)


@contextlib.contextmanager
def _named(folder: pathlib.Path | None) -> Any:
  """Turns errors of a load into errors of the API, without the server's paths."""
  try:
    yield
  except (OSError, TypeError, ValueError, KeyError) as error:
    if isinstance(error, TimeoutError):
      raise
    text = str(error)
    for path in () if folder is None else (folder, folder.parent):
      text = text.replace(str(path), path.name)
    raise bad(None, f"it cannot be loaded: {text}", "load_failed") from error


async def _alone(context: Context, function: Callable[[], Any], what: str) -> None:
  if context.admin.locked():
    raise ApiError(
      409, "another call of administration runs: wait for its answer", code="busy"
    )
  async with context.admin:
    await _bounded(context, function, what)


async def _bounded(context: Context, function: Callable[[], Any], what: str) -> None:
  """Runs a function in a thread of its own, for `admin_timeout` seconds.

  The thread cannot be stopped. It is a daemon, so that a server that exits does not
  wait for it.
  """
  loop, done = asyncio.get_running_loop(), asyncio.Event()
  outcome: list[BaseException | None] = []

  def work() -> None:
    try:
      function()
      outcome.append(None)
    except BaseException as error:  # it is raised again where the call waits
      outcome.append(error)
    with contextlib.suppress(RuntimeError):  # the loop is closed
      loop.call_soon_threadsafe(done.set)

  threading.Thread(target=work, name=f"serve: {what}", daemon=True).start()
  seconds = context.settings.admin_timeout
  try:
    async with asyncio.timeout(seconds):
      await done.wait()
  except TimeoutError as error:
    raise ApiError(
      504, f"{what} took more than {seconds:g} s and may still happen", code="timeout"
    ) from error
  if outcome[0] is not None:
    raise outcome[0]
