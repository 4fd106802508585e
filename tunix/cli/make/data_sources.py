"""Opens the sources that `data.train` and `data.eval` name.

data.jsonl                        JSON lines; also gs://bucket/data.jsonl
data.json, data.csv, data.parquet a JSON array, CSV, parquet
data.array_record                 ArrayRecord of JSON objects; also a-*.array_record
hf:ORG/NAME                       data set of the Hugging Face hub, its split "train"
hf:ORG/NAME('main', split='test') further arguments of `datasets.load_dataset`
tfds:NAME(split='test')           arguments of `tensorflow_datasets.data_source`
reasoning_gym:NAME(size=100)      tasks, see `tunix.rl.env.adapters.reasoning_gym`
pkg.mod:fn, file.py:fn(name='x')  result of a function: any object with a length and
                                  items; without a name the function is `create_dataset`
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix.cli.make import objects
from tunix.cli.utils import call_strings, data
from tunix.data.reading import files
from tunix.data.reading.mixture import Mixture
from tunix.data.reading.stored import HeldRecords, Records, Renamed
from tunix.data.records import Kind
from tunix.rl.env.adapters import reasoning_gym
from tunix.utils import optional

# Prefix -> (package, function, what to install).
_LIBRARIES = {
  "hf": ("datasets", "load_dataset", "tunix[data]"),
  "tfds": ("tensorflow_datasets", "data_source", "tunix[data]"),
  reasoning_gym.PREFIX: ("reasoning_gym", "Tasks", "tunix[reasoning-gym]"),
}
LIBRARY = re.compile(rf"({'|'.join(_LIBRARIES)}):([^()]+)(\(.*\))?")
_FUNCTION = re.compile(r"([\w.]+|.+\.py):\w+(\(.*\))?", re.DOTALL)


def open_records(
  names: str | Sequence[str],
  kind: Kind,
  weights: Sequence[float] = (),
  columns: Mapping[str, str] | None = None,
  later: Mapping[int, Sequence[float]] | None = None,
) -> Records:
  """Opens one source, or several as a `Mixture`.

  Args:
    names: names of sources, see the top of this file.
    kind: kind of their records.
    weights: weights of the sources, see `Mixture`; () visits every record once a pass.
    later: number of a draw -> weights from that draw on, see `Mixture`.
    columns: name that the kind expects -> name of the column in the sources.

  Raises:
    FileNotFoundError, ImportError: a file, package or module is missing.
    ValueError: a source has no records, or the weights do not fit.
    TypeError, RuntimeError: a function returns no records, or raises.
  """
  sources = (names,) if isinstance(names, str) else names
  if not sources:
    raise ValueError("the list of files is empty; name at least one")
  parts = [_open(name, kind) for name in sources]
  if columns:
    parts = [Renamed(part, columns) for part in parts]
  if len(parts) == 1 and not weights:
    return parts[0]
  return Mixture(parts, weights or None, later=later)


def is_call(name: str) -> bool:
  """Returns whether a name is that of a function, not of a file."""
  if is_address(name) or objects.is_name(name):
    return False
  if name.endswith(".py"):
    return True
  return _FUNCTION.fullmatch(name) is not None and not pathlib.Path(name).exists()


def is_address(name: str) -> bool:
  """Returns whether a name is that of a file in a bucket or of a library's data set."""
  return "://" in name or LIBRARY.fullmatch(name) is not None


def with_absolute_paths(names: str | Sequence[str]) -> str | tuple[str, ...]:
  """Returns the names with absolute paths of files.

  So a run can be resumed from any folder. Names of missing files do not change.
  """
  if not isinstance(names, str):
    return tuple(str(with_absolute_paths(name)) for name in names)
  path = pathlib.Path(names).expanduser()
  if (
    is_call(names) and not path.exists()
  ):  # a .py file without a function is a path, see below
    return call_strings.with_absolute_path(names)
  is_pattern = "*" in names and "://" not in names
  return str(path.absolute()) if path.exists() or is_pattern else names


def _open(name: str, kind: Kind) -> Records:
  files.check_address("the name of a data source", name)
  if objects.is_name(name):
    items = objects.get(name)
    return items if isinstance(items, Records) else HeldRecords(items, kind, name=name)
  if library := LIBRARY.fullmatch(name):
    return HeldRecords(from_library(*library.groups()), kind, name=name)
  if is_call(name):
    return HeldRecords(data.call_dataset(name), kind, name=name)
  path = str(local_copy(name)) if "://" in name else name
  return files.open_file(path, kind, name=name)


def from_library(prefix: str, name: str, call: str | None, **options: object) -> Any:
  """Calls the function of a library that opens a data set.

  Args:
    prefix, name, call: groups of `LIBRARY`.
    **options: arguments that replace those of the call.

  Raises:
    ImportError: the library is missing.
    FileNotFoundError, ValueError: the data set cannot be read.
  """
  package, function, install = _LIBRARIES[prefix]
  module = optional.require(package, f"reading {prefix}:{name}", install)
  args, kwargs = data.parse_call_string(call or "()")
  if prefix == reasoning_gym.PREFIX:
    module = reasoning_gym
  else:
    kwargs = {"split": "train"} | kwargs | options
  with _named(f"{prefix}:{name}"):
    return getattr(module, function)(name, *args, **kwargs)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
  """Adds the name of the source to the error of a library.

  An error of the operating system becomes FileNotFoundError, any other ValueError.
  """
  try:
    yield
  except (ImportError, OSError, ValueError, TypeError, KeyError) as error:
    kind = FileNotFoundError if isinstance(error, OSError) else ValueError
    first = f"{type(error).__name__}: {error}".split("\n")[0]
    raise kind(f"{name} cannot be read ({first})") from error


def local_copy(address: str) -> pathlib.Path:
  """Returns a local copy of a file in a bucket, in `~/.cache/tunix/data`.

  The file is copied again only if it changed in the bucket.

  Args:
    address: URL that `fsspec` reads, such as gs://bucket/file.

  Raises:
    ImportError: the package for this kind of bucket is missing.
    FileNotFoundError: the file is missing or may not be read.
  """
  import filelock

  fsspec = optional.require("fsspec", f"reading {address}", "tunix[data]")
  folder = pathlib.Path.home() / ".cache/tunix/data"
  folder.mkdir(parents=True, exist_ok=True)
  keep = {"cache_storage": str(folder), "check_files": True}
  try:
    with filelock.FileLock(folder / "lock"):  # one process of a machine copies
      return pathlib.Path(fsspec.open_local(f"filecache::{address}", filecache=keep))
  except ImportError as error:  # its message names the package
    raise ImportError(f"reading {address}: {error}; pip install tunix[data]") from error
  except (OSError, ValueError) as error:
    raise FileNotFoundError(
      f"data file {address!r} cannot be read ({type(error).__name__}: {error}); check "
      "the address and your credentials"
    ) from error
