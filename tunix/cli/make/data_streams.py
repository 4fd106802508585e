"""Opens the sources of `data.train` as a stream, for `data.stream`."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence

from tunix.cli.make import data_sources, objects
from tunix.cli.utils import data
from tunix.data.reading import files, stored, stream
from tunix.data.reading.stream import Part, Streamed
from tunix.data.records import Kind

_REFUSED = (".json", ".csv", ".tsv", *files.ARRAY_RECORD)


def open_stream(
  names: str | Sequence[str],
  kind: Kind,
  columns: Mapping[str, str] | None = None,
  shuffle_buffer: int | None = None,
) -> Streamed:
  """Opens sources as one stream, which reads them one after the other.

  Args:
    names: names of sources, see `data_sources`.
    kind: kind of their records.
    columns: name that the kind expects -> name of the column in the sources.
    shuffle_buffer: records whose order is drawn together; None: 1024.

  Raises:
    FileNotFoundError, ImportError: a file, package or module is missing.
    ValueError: a source cannot be read as a stream.
    TypeError, RuntimeError: a function returns no records, or raises.
  """
  sources = (names,) if isinstance(names, str) else names
  return Streamed(
    [_part(name, kind) for name in sources],
    kind,
    columns=columns,
    shuffle_buffer=shuffle_buffer or stream.SHUFFLED,
  )


def _part(name: str, kind: Kind) -> Part:
  files.check_address("the name of a data source", name)
  if objects.is_name(name):
    return stream.of_iterable(objects.get(name), name=name)
  if library := data_sources.LIBRARY.fullmatch(name):
    if library[1] != "hf":
      raise _refused(name)
    dataset = data_sources.from_library(*library.groups(), streaming=True)
    return stream.of_iterable(dataset, name=name)
  if data_sources.is_call(name):
    return stream.of_iterable(functools.partial(data.call_dataset, name), name=name)
  path = str(data_sources.local_copy(name)) if "://" in name else name
  suffix = pathlib.Path(path).suffix.lower()
  if suffix == ".parquet":
    file = pathlib.Path(path).expanduser()
    stored.check_file(file, name, "parquet")
    options = {"data_files": str(file), "streaming": True}
    dataset = data_sources.from_library("hf", "parquet", None, **options)
    return stream.of_iterable(dataset, name=name)
  if suffix in _REFUSED:
    raise _refused(name)
  return stream.of_file(path, kind, name=name)


def _refused(name: str) -> ValueError:
  return ValueError(
    f"{name} cannot be read as a stream; expected JSON lines, .parquet, hf:ORG/NAME or "
    "a function that returns an iterable. Leave data.stream out, or convert the data"
  )
