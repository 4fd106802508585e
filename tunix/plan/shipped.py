"""Programs that a plan compiled, kept as entries of JAX's compilation cache.

`tunix plan --ship FOLDER` writes the entries and a manifest, `shipped.json`. A run with
`compilation_cache: FOLDER` leaves loading to JAX, whose keys hold the program, the
version of jaxlib, the compiler flags and the kind of device. The manifest adds what JAX
does not tell: why no entry can match this run, and whether a file is damaged.

JAX unpickles an entry and runs the program in it. Whoever may write an entry may run
code as the user, so `use_cache` refuses entries that other users may write. The digests
of the manifest find damage. With a key the manifest has an HMAC-SHA256, and so its
digests prove that the writer of the entries has the key.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from tunix.perf import programs
from tunix.utils import io
from tunix.utils.setting import named_values

NAME = "shipped.json"
_FORMAT = 2
_KEY_BYTES = 16  # fewer could be guessed
_ENTRIES = "*-cache"  # JAX's file names
# Flags that change no program.
_IDLE_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump")
_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"


def read_key(name: str, file: str | os.PathLike[str]) -> bytes:
  """Returns the key in a file, which signs or verifies a shipped folder.

  Args:
    name: setting that names the file, for messages.
    file: all its bytes are the key.

  Raises:
    ValueError: there is no such file, or it has fewer bytes than a key needs.
  """
  remedy = "`head -c 32 /dev/urandom > FILE` makes one"
  try:
    key = pathlib.Path(file).expanduser().read_bytes()
  except OSError as error:
    raise ValueError(
      f"{name} is {str(file)!r}, which cannot be read ({error.strerror}); expected a "
      f"file with a key. {remedy}"
    ) from error
  if len(key) < _KEY_BYTES:
    raise ValueError(
      f"{name} is {str(file)!r}, which has {len(key)} bytes; expected at least "
      f"{_KEY_BYTES}. {remedy}"
    )
  return key


def signing_key(file: str, folder: str | None) -> bytes:
  """Returns the key in the file of --ship-key, which must not be shipped itself.

  Raises:
    ValueError: the file is in the folder, or see `read_key`.
  """
  places = [pathlib.Path(x).expanduser().absolute() for x in (file, folder or "")]
  if places[0].is_relative_to(places[1]) and folder is not None:
    raise ValueError(
      f"--ship-key is {file!r}, which is in the folder of --ship; expected a file "
      "outside of it. Whoever has the key can sign"
    )
  return read_key("--ship-key", file)


def open_cache(folder: str | None, key_file: str | None) -> None:
  """Keeps programs as the settings of a command say.

  Args:
    folder: the setting compilation_cache; None: JAX decides.
    key_file: the setting compilation_cache_key; None: the folder is not signed.

  Raises:
    ValueError, OSError: see `read_key` and `use_cache`.
  """
  if folder is not None:
    name = "compilation_cache_key"
    use_cache(folder, None if key_file is None else read_key(name, key_file))


def use_cache(folder: str | os.PathLike[str], key: bytes | None = None) -> None:
  """Keeps JAX's compilation cache in a folder from now on.

  With a key nothing is added to the folder: the next run would refuse the entry, which
  the manifest does not list.

  Args:
    folder: made if missing, for this user alone; `~` is the home folder.
    key: key that `write` signed the folder with; None: the folder is not signed.

  Raises:
    ValueError: the folder is a file or in one; it or an entry in it belongs to another
      user, or others may write it; or the key and the folder do not belong together.
    OSError: the folder cannot be made or read.
  """
  root = pathlib.Path(folder).expanduser().absolute()
  try:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
  except (FileExistsError, NotADirectoryError) as error:
    raise ValueError(
      f"compilation_cache is {str(folder)!r}, which is a file or in one. Name a folder"
    ) from error
  _check_writers(root)
  if root.stat().st_mode & 0o011:  # else no other user reaches the entries
    for entry in root.iterdir():
      _check_writers(entry)
  settings = _cache_settings(root, is_portable=is_in(root))
  # Others cannot write here after these checks: what JAX loads later has passed them.
  if (problem := _distrust(root, key)) is not None:
    raise ValueError(f"compilation_cache is {str(folder)!r}, {problem}")
  if key is not None:
    settings["jax_persistent_cache_min_compile_time_secs"] = float("inf")
  _apply(settings)


def _check_writers(path: pathlib.Path) -> None:
  """Refuses a folder or an entry that another user than this one or root may write."""
  try:
    status = path.stat()
  except FileNotFoundError:
    return  # another process of the run has replaced it
  problem, remedy = None, f"Remove the right: `chmod go-w {path}`."
  if status.st_uid not in (0, os.getuid()):
    problem = f"belongs to the user {status.st_uid}"
    remedy = "Copy the files of somebody you trust into a folder of your own."
  elif status.st_mode & 0o002:
    problem = "can be written by every user"
  elif status.st_mode & 0o020 and status.st_gid not in (0, status.st_uid):
    # A group with the number of its user is the user's own group.
    problem = f"can be written by the group {status.st_gid}"
  if problem is not None:
    raise ValueError(
      f"compilation_cache has {path}, which {problem}; expected files that only this "
      f"user may write, because entries hold pickles, which run code. {remedy}"
    )


@contextlib.contextmanager
def cache_in(folder: str | os.PathLike[str]) -> Iterator[None]:
  """Keeps JAX's compilation cache in a folder whose entries are to be shipped."""
  with _jax_settings(_cache_settings(folder, is_portable=True)):
    # JAX writes no entry for a program that this process has compiled already.
    jax.clear_caches()
    yield


def _cache_settings(
  folder: str | os.PathLike[str], *, is_portable: bool
) -> dict[str, Any]:
  settings: dict[str, Any] = {
    "jax_enable_compilation_cache": True,
    "jax_compilation_cache_dir": str(folder),
    # JAX skips programs that compile within a second. A resumed run has many of them.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  if is_portable:
    # XLA's own caches put the folder's path into the compile options, and so into JAX's
    # keys: entries that were moved to another path would never be found.
    settings["jax_persistent_cache_enable_xla_caches"] = "none"
  return settings


def _apply(settings: dict[str, Any]) -> None:
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # JAX remembers the folder of its first program


@contextlib.contextmanager
def _jax_settings(settings: dict[str, Any]) -> Iterator[None]:
  before = named_values(jax.config, settings)
  _apply(settings)
  try:
    yield
  finally:
    _apply(before)


def write(
  folder: str | os.PathLike[str],
  entries: str | os.PathLike[str],
  mesh: Mesh,
  names: Sequence[str],
  key: bytes | None = None,
) -> int:
  """Copies cache entries into a folder, and writes their manifest.

  Args:
    folder: created if missing; replaces the manifest of an earlier call.
    entries: folder of `cache_in`, in which the programs were compiled.
    mesh: devices that the programs were compiled for.
    names: of the programs.
    key: signs the manifest. All other entries are then removed from the folder, because
      a run with the key refuses them. None: the folder is not signed.

  Returns: bytes written, without the manifest.

  Raises:
    OSError: the folder cannot be written.
  """
  root, digests, size = pathlib.Path(folder), {}, 0
  for file in sorted(pathlib.Path(entries).glob(_ENTRIES)):
    data = file.read_bytes()
    io.write_atomic(root / file.name, data)
    digests[file.name] = hashlib.sha256(data).hexdigest()
    size += len(data)
  # The manifest comes last, so that every file it lists exists.
  listed = {"programs": list(names), "files": digests}
  manifest = {"format": _FORMAT, **_origin(mesh), **listed}
  if key is not None:
    for entry in root.glob(_ENTRIES):
      if entry.name not in digests:
        entry.unlink()
    manifest["signature"] = _signature(manifest, key)
  io.write_json(root / NAME, manifest)
  return size


def _signature(manifest: dict[str, Any], key: bytes) -> str:
  """Returns the HMAC-SHA256 of a manifest, whose digests cover the entries."""
  signed = {name: value for name, value in manifest.items() if name != "signature"}
  return hmac.new(
    key, json.dumps(signed, sort_keys=True).encode(), "sha256"
  ).hexdigest()


def _distrust(root: pathlib.Path, key: bytes | None) -> str | None:
  """Returns the reason to refuse the folder with this key, or None."""
  manifest = _manifest(root)
  signed = manifest.get("signature") if isinstance(manifest, dict) else None
  if key is None:
    if signed is None:
      return None
    return "which is signed; expected its key. Set compilation_cache_key to the file"
  if not isinstance(signed, str):
    return (
      f"which has no signed {NAME}; expected one, because compilation_cache_key is "
      "set. Ship with `tunix plan --ship FOLDER --ship-key FILE`"
    )
  if not hmac.compare_digest(
    signed.encode(errors="replace"), _signature(manifest, key).encode()
  ):
    return (
      f"whose {NAME} was signed with another key, or changed; expected the key of "
      "compilation_cache_key. Ship again with this key"
    )
  if (reason := _malformed(manifest) or _damage(root, manifest["files"])) is not None:
    return f"which is not as it was signed: {reason}"
  names = {NAME, *manifest["files"]}
  for entry in sorted(root.iterdir()):
    if entry.name not in names:
      return f"which has {entry.name!r}; expected the files of {NAME} alone. Remove it"
  return None


def _manifest(root: pathlib.Path) -> Any:
  """Returns the manifest of a folder, or a text that says why there is none."""
  try:
    return json.loads((root / NAME).read_text())
  except (OSError, ValueError, RecursionError) as error:
    return f"unreadable: {error}"


def is_in(folder: str | os.PathLike[str]) -> bool:
  """Returns whether programs were shipped to a folder."""
  return (pathlib.Path(folder) / NAME).is_file()


@contextlib.contextmanager
def loaded(
  folder: str | os.PathLike[str], mesh: Mesh | None, say: Callable[[str], None]
) -> Iterator[None]:
  """Reports, inside the `with` block, which programs come from a shipped folder.

  If a shipped file is damaged, JAX's compilation cache is off inside the block.

  Args:
    folder: in use as JAX's compilation cache, with a manifest.
    mesh: mesh of the run; None: one device.
    say: receives one line for each program, or one line for a folder that is refused.
  """
  root = pathlib.Path(folder)
  manifest = _manifest(root)
  if (reason := _mismatch(manifest, mesh)) is not None:
    say(f"programs shipped to {root} are not used, all is compiled here: {reason}")
    yield
  elif (reason := _malformed(manifest) or _damage(root, manifest["files"])) is not None:
    say(f"programs shipped to {root} are not used, all is compiled here: {reason}")
    with _jax_settings({"jax_enable_compilation_cache": False}):
      yield
  else:
    with _reported(root, say):
      yield


@contextlib.contextmanager
def _reported(root: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
  """Says of each program, when JAX first needs it, whether the folder had it."""
  events: collections.Counter[str] = collections.Counter()

  def count(event: str, **_: object) -> None:
    events[event] += 1

  def call(name: str, jitted: Any, args: tuple[Any, ...]) -> Any:
    before = events.copy()
    out = jitted(*args)  # without an event JAX had the program in memory
    if requests := events[_REQUEST] - before[_REQUEST]:
      if events[_HIT] - before[_HIT] == requests:
        say(f"{name}: loaded from {root}")
      else:
        say(
          f"{name}: not among the programs shipped to {root}, compiled here (the plan "
          "had other settings, or other shapes of data)"
        )
    return out

  jax.monitoring.register_event_listener(count)
  try:
    with programs.intercepted(call):
      yield
  finally:
    jax.monitoring.unregister_event_listener(count)


def _origin(mesh: Mesh | None) -> dict[str, Any]:
  """Returns what programs depend on besides their text."""
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  packages = ["tunix", "jax", "jaxlib"]
  if device.platform == "tpu":
    packages.append("libtpu")
  versions = {name: importlib.metadata.version(name) for name in packages}
  if device.platform == "gpu":
    versions["CUDA"] = device.client.platform_version
  return {
    "platform": device.platform,
    "kind": device.device_kind,
    "mesh": {} if mesh is None else dict(mesh.shape),
    "versions": versions,
    "flags": sorted(
      flag
      for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
      for flag in os.environ.get(variable, "").split()
      if not flag.startswith(_IDLE_FLAGS)
    ),
  }


def _mismatch(manifest: Any, mesh: Mesh | None) -> str | None:
  """Returns why no program of a manifest can match this run; None: some may."""
  form = manifest.get("format") if isinstance(manifest, dict) else manifest
  if form != _FORMAT:
    return f"{NAME} is of format {form!r}, this version reads {_FORMAT}"
  for key, value in _origin(mesh).items():
    if manifest.get(key) != value:
      return f"{key} {manifest.get(key)} when they were made, {value} here"
  return None


def _malformed(manifest: dict[str, Any]) -> str | None:
  """Returns which key of a manifest has a wrong value; None: all are right."""
  names, files = manifest.get("programs"), manifest.get("files")
  if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
    return f"programs in {NAME} is {names!r:.60}; expected a list of names. Ship again."
  if not isinstance(files, dict):
    return f"files in {NAME} is {files!r:.60}; expected digests by name. Ship again."
  for name, digest in files.items():
    if not isinstance(digest, str) or name != pathlib.PurePath(name).name:
      return (
        f"files in {NAME} has {name!r:.60}: {digest!r:.60}; expected names of files in "
        "the folder with their SHA-256. Ship again."
      )
  return None


def _damage(root: pathlib.Path, digests: dict[str, str]) -> str | None:
  """Returns which shipped file is missing or changed; None: all are whole."""
  for name, digest in digests.items():
    try:
      data = (root / name).read_bytes()
    except OSError as error:
      return f"{name} cannot be read ({error}); ship it again"
    if (actual := hashlib.sha256(data).hexdigest()) != digest:
      return (
        f"{name} is damaged: it has {len(data)} bytes with SHA-256 {actual[:16]}, and "
        f"was written with {digest[:16]}; ship it again"
      )
  return None
