"""The folder of a GGUF file: the small files of a Hugging Face folder, made from it.

The folder holds config.json, generation_config.json, the tokenizer's files, and a link
to the GGUF file. It lies in the user's cache, and every part of tunix that reads a
model folder reads it. It may be deleted at any time, and is made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

from tunix.models import hub
from tunix.models.gguf import tokenizer
from tunix.utils import env, io

# Holds the reason why the folder has no tokenizer. The weights can still be read, and
# another tokenizer be named.
_REFUSED = "tokenizer.refused"

_HUB_FILE = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)/([\w-][\w./-]*\.gguf)")


def resolve(
  name: str | os.PathLike[str], revision: str | None = None
) -> pathlib.Path | None:
  """Returns the folder of a GGUF file; None if the name means something else.

  Args:
    name: a GGUF file, a folder with one GGUF file and without config.json, or a file at
      the hub, "owner/name/FILE.gguf", which is downloaded once.
    revision: a commit, tag or branch at the hub; None for the newest commit.

  Raises:
    FileNotFoundError: the download failed.
    ImportError: the package `gguf` is missing.
    ValueError: a file on this machine was given a revision, the folder has several GGUF
      files, or as for `folder_of`.
  """
  path = pathlib.Path(name).expanduser()
  place = _HUB_FILE.fullmatch(str(name))
  if place and not path.exists() and hub.is_id(place[1]):
    file = hub.download(place[1], [place[2]], revision) / place[2]
    if not file.exists():
      raise FileNotFoundError(f"the model {place[1]!r} at the hub has no {place[2]!r}")
    return folder_of(file)
  if path.is_dir() and not (path / "config.json").exists():
    # A vision tower has a file of its own.
    files = sorted(x for x in path.glob("*.gguf") if not x.name.startswith("mmproj"))
    if len(files) > 1:
      raise ValueError(
        f"{path} has {len(files)} GGUF files and no config.json; expected one. Name "
        f"one of them, for example {files[0]}"
      )
    path = files[0] if files else path
  if not path.is_file() or not _is_gguf(path):
    return None
  if revision is not None:
    raise ValueError(
      f"revision is {revision!r} and {path} is a file, which has none: leave it out"
    )
  return folder_of(path)


def with_tokenizer(
  name: str | os.PathLike[str], revision: str | None = None
) -> pathlib.Path | None:
  """Returns the same folder as `resolve`, if its tokenizer could be made.

  Raises:
    FileNotFoundError, ImportError: see `resolve`.
    ValueError: see `resolve`, or the tokenizer is missing, unknown or damaged.
  """
  folder = resolve(name, revision)
  if folder is not None and (folder / _REFUSED).exists():
    raise ValueError(f"{name}: {(folder / _REFUSED).read_text()}")
  return folder


def folder_of(file: pathlib.Path) -> pathlib.Path:
  """Returns the folder of a GGUF file, and makes it if it does not exist.

  If the cache cannot be written, the folder is a temporary one of this process.

  Raises:
    FileNotFoundError: the file does not exist.
    ImportError: the package `gguf` is missing.
    ValueError: the file is damaged, or its architecture is unknown.
    OSError: neither the cache nor the folder for temporary files can be written.
  """
  file = file.absolute()
  stat = file.stat()
  key = (_code(), str(file), stat.st_size, stat.st_mtime_ns)
  name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
  cache = _cache()
  if cache is None:
    return _in_temporary(name, file)
  if (cache / name).is_dir():
    return cache / name
  try:
    return _make(cache / name, file)
  except OSError:  # read-only, or full
    return _in_temporary(name, file)


def _make(folder: pathlib.Path, file: pathlib.Path) -> pathlib.Path:
  """Makes the folder under a temporary name, and renames it."""
  # Imported here: both load JAX, which a tokenizer does not need.
  from tunix.models.gguf import header as headers, tensors

  folder.parent.mkdir(parents=True, exist_ok=True)
  io.sweep(folder.parent)
  staging = folder.parent / io.unfinished(folder.name)
  staging.mkdir()
  try:
    header = headers.read(file)
    config = tensors.config_json(header)
    for name, text in _files(config, header.metadata).items():
      io.write_atomic(staging / name, text.encode())
    (staging / tensors.NAME).symlink_to(file)
    os.replace(staging, folder)
  except OSError:
    if not folder.is_dir():  # else another process has made it
      raise
  finally:
    shutil.rmtree(staging, ignore_errors=True)
  return folder


def _files(config: dict[str, Any], metadata: Mapping[str, Any]) -> dict[str, str]:
  """Returns the small files: text by name. `config` lacks the ids of tokens."""
  ids: dict[str, Any] = {}
  try:
    ids = tokenizer.generation_config(metadata)
    files = tokenizer.files_of(metadata)
  except ValueError as error:
    files = {_REFUSED: str(error)}
  files["config.json"] = json.dumps(config | ids, indent=2)
  files["generation_config.json"] = json.dumps(ids, indent=2)
  return files


@functools.cache
def _code() -> str:
  """Returns a digest of the code that makes folders: another version makes new ones."""
  sources = sorted(pathlib.Path(__file__).parent.glob("*.py"))
  return hashlib.sha256(b"".join(map(pathlib.Path.read_bytes, sources))).hexdigest()


def _cache() -> pathlib.Path | None:
  """Returns the folder of all folders; None if the user has no home."""
  try:
    home = env.value("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  except RuntimeError:
    return None
  return pathlib.Path(home) / "tunix" / "gguf"


# Returns a folder that is removed when the process ends.
_temporary = functools.cache(lambda: tempfile.TemporaryDirectory(prefix="tunix-gguf-"))


@functools.cache
def _in_temporary(name: str, file: pathlib.Path) -> pathlib.Path:
  return _make(pathlib.Path(_temporary().name) / name, file)


def _is_gguf(file: pathlib.Path) -> bool:
  if file.suffix.lower() == ".gguf":
    return True
  with file.open("rb") as stream:  # files of Ollama have other names
    return stream.read(4) == b"GGUF"
