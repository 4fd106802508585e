"""What `data.train` and `data.eval` name, as records.

data.jsonl                        JSON lines; also gs://bucket/data.jsonl
data.json, data.csv, data.parquet a JSON array, CSV, parquet
data.array_record                 ArrayRecord of JSON objects; also a-*.array_record
hf:ORG/NAME                       a data set of the Hugging Face hub, its split "train"
hf:ORG/NAME('main', split='test') further arguments of `datasets.load_dataset`
tfds:NAME(split='test')           of `tensorflow_datasets.data_source`
pkg.mod:fn, file.py:fn(name='x')  what a function returns: anything with a length and
                                  items; without a name the function is `create_dataset`
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix.cli.utils import call_strings, data
from tunix.data import files
from tunix.data.mixture import Mixture
from tunix.data.records import Kind
from tunix.data.stored import HeldRecords, Records, Renamed
from tunix.utils import optional

# Package and function behind a prefix, and what to install.
_LIBRARIES = {
  "hf": ("datasets", "load_dataset", "tunix[data]"),
  "tfds": ("tensorflow_datasets", "data_source", "tunix[data]"),
}
_LIBRARY = re.compile(rf"({'|'.join(_LIBRARIES)}):([^()]+)(\(.*\))?")
_FUNCTION = re.compile(r"([\w.]+|.+\.py):\w+(\(.*\))?", re.DOTALL)


def open_records(
  names: str | Sequence[str],
  kind: Kind,
  weights: Sequence[float] = (),
  columns: Mapping[str, str] | None = None,
) -> Records:
  """The records of one source, or of several as a `Mixture`.

  Args:
    names: as at the top of this file.
    kind: what their records are.
    weights: of the sources, see `Mixture`; (): every record once a pass.
    columns: our names of columns -> those of the sources.

  Raises:
    FileNotFoundError, ImportError: a file, package or module that is not there.
    ValueError: no records, or weights that do not fit.
    TypeError, RuntimeError: a function that returns no records, or raises.
  """
  several = (names,) if isinstance(names, str) else names
  if not several:
    raise ValueError("an empty list of files: name at least one")
  parts = [_open(name, kind) for name in several]
  if columns:
    parts = [Renamed(part, columns) for part in parts]
  if len(parts) == 1 and not weights:
    return parts[0]
  return Mixture(parts, weights or None)


def is_call(name: str) -> bool:
  """Whether a source is a function, and no file."""
  if is_address(name):
    return False
  if name.endswith(".py"):
    return True
  return _FUNCTION.fullmatch(name) is not None and not pathlib.Path(name).exists()


def is_address(name: str) -> bool:
  """Whether a source is a file of a bucket, or what a library gives."""
  return "://" in name or _LIBRARY.fullmatch(name) is not None


def with_absolute_paths(names: str | Sequence[str]) -> str | tuple[str, ...]:
  """The sources with the places of files written out, so that a run can be resumed from
  anywhere. What does not exist stays as it is."""
  if not isinstance(names, str):
    return tuple(str(with_absolute_paths(name)) for name in names)
  path = pathlib.Path(names).expanduser()
  if is_call(names) and not path.exists():  # a file alone is one of the paths below
    return call_strings.with_absolute_path(names)
  is_pattern = "*" in names and "://" not in names
  return str(path.absolute()) if path.exists() or is_pattern else names


def _open(name: str, kind: Kind) -> Records:
  if library := _LIBRARY.fullmatch(name):
    return HeldRecords(_from_library(*library.groups()), kind, name=name)
  if is_call(name):
    return HeldRecords(data.call_dataset(name), kind, name=name)
  path = str(local_copy(name)) if "://" in name else name
  return files.open_file(path, kind, name=name)


def _from_library(prefix: str, name: str, call: str | None) -> Any:
  package, function, install = _LIBRARIES[prefix]
  module = optional.require(package, f"reading {prefix}:{name}", install)
  args, kwargs = data.parse_call_string(call or "()")
  with _named(f"{prefix}:{name}"):
    return getattr(module, function)(name, *args, **{"split": "train"} | kwargs)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
  """Says which source a library could not read, and keeps the kind of what it raised
  where that is one that a user can act on."""
  try:
    yield
  except (ImportError, OSError, ValueError, TypeError, KeyError) as error:
    kind = FileNotFoundError if isinstance(error, OSError) else ValueError
    first = f"{type(error).__name__}: {error}".split("\n")[0]
    raise kind(f"{name} cannot be read ({first})") from error


def local_copy(address: str) -> pathlib.Path:
  """A file of a bucket, copied once as long as it does not change there.

  Copies lie in `~/.cache/tunix/data`.

  Args:
    address: such as gs://bucket/file; what `fsspec` reads.

  Raises:
    ImportError: the package of that kind of bucket is missing.
    FileNotFoundError: there is no such file, or nobody may read it.
  """
  import filelock

  fsspec = optional.require("fsspec", f"reading {address}", "tunix[data]")
  folder = pathlib.Path.home() / ".cache/tunix/data"
  folder.mkdir(parents=True, exist_ok=True)
  keep = {"cache_storage": str(folder), "check_files": True}
  try:
    with filelock.FileLock(folder / "lock"):  # processes of one machine copy once
      return pathlib.Path(fsspec.open_local(f"filecache::{address}", filecache=keep))
  except ImportError as error:  # fsspec says which package
    raise ImportError(f"reading {address}: {error}; pip install tunix[data]") from error
  except (OSError, ValueError) as error:
    raise FileNotFoundError(
      f"data file {address!r} cannot be read ({type(error).__name__}: {error}): check "
      "the address and your credentials"
    ) from error
