"""Compiled programs in a folder: written where a run is planned, loaded where it runs.

A program is known by its text as it is lowered, which holds all that a run decides:
shapes, layouts, the optimizer's constants. The run lowers what it is about to call
(which takes no compiler), and where the folder has a program of that text and was made
for the devices at hand, its executable is loaded and not compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from tunix.perf import programs
from tunix.perf.programs import Noted
from tunix.utils import io

NAME = "shipped.json"
_FORMAT = 1
# Flags that change no program.
_IDLE_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump")


def write(
  folder: str | os.PathLike[str], mesh: Mesh, noted: Mapping[str, Noted]
) -> list[dict[str, Any]]:
  """Writes the executables of programs, and the list of them.

  Args:
    folder: made where there is none; a list that it has is replaced.
    mesh: that the programs are for.
    noted: {name: program}, compiled inside `compiled_afresh`.

  Returns: the entries of the list: name, text, file, sha256, bytes.

  Raises:
    OSError: the folder cannot be written.
  """
  root = pathlib.Path(folder)
  root.mkdir(parents=True, exist_ok=True)
  entries: dict[str, dict[str, Any]] = {}
  for name, first in noted.items():
    for one in (first, *first.others):
      text = _digest(one.lowered)
      data, _, _ = serialize_executable.serialize(one.compiled)
      file = f"{name.replace(' ', '_')}-{text[:16]}.program"
      io.write_atomic(root / file, data)
      entries[text] = {
        **{"name": name, "text": text, "file": file, "bytes": len(data)},
        "sha256": hashlib.sha256(data).hexdigest(),
      }
  listed = list(entries.values())
  # Last, so that what it lists is there.
  io.write_json(root / NAME, {"format": _FORMAT, **_made_for(mesh), "programs": listed})
  return listed


@contextlib.contextmanager
def compiled_afresh() -> Iterator[None]:
  """Inside, nothing comes from JAX's cache of compiled programs: what XLA has loaded
  from there for a CPU it writes without the functions it calls."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()  # it remembers whether it is used
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def is_in(folder: str | os.PathLike[str]) -> bool:
  """Whether programs were shipped to a folder."""
  return (pathlib.Path(folder) / NAME).is_file()


@contextlib.contextmanager
def loaded(
  folder: str | os.PathLike[str], mesh: Mesh | None, say: Callable[[str], None]
) -> Iterator[None]:
  """Inside, programs that the folder has are loaded instead of compiled.

  Args:
    folder: of `write`.
    mesh: of the run.
    say: is told what was loaded, and why something was not.
  """
  root = pathlib.Path(folder)
  try:
    made: Any = json.loads((root / NAME).read_text())
  except (OSError, ValueError) as error:
    made = f"unreadable: {error}"
  if (reason := _differs(made, mesh)) is not None:
    say(f"programs shipped to {root} are not used, all is compiled here: {reason}")
    yield
    return
  with programs.replaced(_Shipped(root, made["programs"], mesh, say).call):
    yield


class _Shipped:
  """The programs of a folder, each loaded when it is first called."""

  def __init__(
    self,
    root: pathlib.Path,
    entries: Iterable[dict[str, Any]],
    mesh: Mesh | None,
    say: Callable[[str], None],
  ):
    self._root, self._say, self._mesh = root, say, mesh
    self._entries = {entry["text"]: entry for entry in entries}
    # {(function, form of its arguments): what runs it}
    self._known: dict[Any, Callable[..., Any]] = {}

  def call(self, name: str, jitted: Any, args: tuple[Any, ...]) -> Any:
    """`jitted(*args)`, by the executable of the folder where it has one."""
    key = jitted, programs.form(args)
    if (run := self._known.get(key)) is None:
      run = self._known[key] = self._ready(name, jitted, args)
    return run(*args)

  def _ready(self, name: str, jitted: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    lowered = jitted.lower(*args)
    entry = self._entries.get(_digest(lowered))
    if entry is None:
      self._say(
        f"{name}: not among the programs shipped to {self._root}, compiled here (it "
        "was shipped by other settings, or for other shapes of data)"
      )
      return jitted
    try:
      compiled = self._load(entry, lowered)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
      self._say(f"{name}: {entry['file']} cannot be loaded, compiled here: {error}")
      return jitted
    self._say(f"{entry['name']}: loaded from {self._root / entry['file']}")
    places = _dynamic(lowered, args)
    return lambda *args: compiled(*(args[i] for i in places))

  def _load(
    self, entry: dict[str, Any], lowered: jax.stages.Lowered
  ) -> jax.stages.Compiled:
    data = (self._root / entry["file"]).read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != entry["sha256"]:
      raise ValueError(
        f"damaged: it has {len(data)} bytes with SHA-256 {found[:16]}, and was written "
        f"with {entry['bytes']} and {entry['sha256'][:16]}; ship it again"
      )
    devices = _devices(self._mesh)
    return serialize_executable.deserialize_and_load(
      data,
      lowered.in_tree,
      lowered.out_tree,
      backend=devices[0].client,
      execution_devices=devices,
    )


def _digest(lowered: jax.stages.Lowered) -> str:
  return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def _dynamic(lowered: jax.stages.Lowered, args: tuple[Any, ...]) -> list[int]:
  """Places of the arguments that are not static: those an executable takes."""
  wanted = list(lowered.in_tree.children()[0].children())
  places: list[int] = []
  for place, arg in enumerate(args):
    left = wanted[len(places) :]
    if left and jax.tree.structure(arg) == left[0]:
      places.append(place)
  if len(places) != len(wanted):
    raise TypeError(
      f"{len(args)} arguments, and the program takes {len(wanted)} others"
    )
  return places


def _devices(mesh: Mesh | None) -> list[Any]:
  return jax.devices()[:1] if mesh is None else list(mesh.devices.flat)


def _made_for(mesh: Mesh | None) -> dict[str, Any]:
  """What executables depend on besides their text."""
  devices = _devices(mesh)
  client, packages = devices[0].client, ["tunix", "jax", "jaxlib"]
  if client.platform == "tpu":
    packages.append("libtpu")
  versions = {name: importlib.metadata.version(name) for name in packages}
  if client.platform == "gpu":
    versions["CUDA"] = client.platform_version
  return {
    "platform": client.platform,
    "kind": devices[0].device_kind,
    # Where each position of the mesh lies: the executable's assignment of devices.
    "devices": [[one.id, *getattr(one, "coords", ())] for one in devices],
    "mesh": {} if mesh is None else dict(mesh.shape),
    "versions": versions,
    "flags": sorted(
      flag
      for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
      for flag in os.environ.get(variable, "").split()
      if not flag.startswith(_IDLE_FLAGS)
    ),
  }


def _differs(made: Any, mesh: Mesh | None) -> str | None:
  """Why what was made elsewhere cannot be used here."""
  form = made.get("format") if isinstance(made, dict) else made
  if form != _FORMAT:
    return f"{NAME} is of format {form!r}, this version reads {_FORMAT}"
  here = _made_for(mesh)
  for what in ("platform", "kind", "versions", "flags", "mesh"):
    if made.get(what) != here[what]:
      return f"{what} {made.get(what)} when they were made, {here[what]} here"
  if made.get("devices") != here["devices"]:
    return "the devices of the mesh have other numbers or places than those planned for"
  return None
