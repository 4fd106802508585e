"""Named checkpoints: `tinker://RUN/weights/NAME` and `tinker://RUN/sampler_weights/NAME`.

A checkpoint is a folder: `state` has the exact arrays, `adapter/` the same adapter in
PEFT's form, and `meta.json` the rest. The folder gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import datetime
import io as bytes_io
import json
import logging
import os
import pathlib
import re
import shutil
import tarfile
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tunix.models import lora
from tunix.models.transformer.model import Transformer
from tunix.tinker.errors import NotFoundError, TinkerError
from tunix.tinker.protocol import fields
from tunix.tinker.state import state_file
from tunix.utils import io, record_file
from tunix.utils.record_file import RecordError

_LOG = logging.getLogger(__name__)
KINDS = {"weights": "training", "sampler_weights": "sampler"}
# No leading dot: unfinished folders have one.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,127}")
_SCHEME = "tinker://"
_LONGEST = 10 * 366 * 86400  # seconds of a life


class Place(NamedTuple):
  """The parts of a checkpoint's path.

  Attributes:
    run: id of the run.
    kind: "weights" (with the optimizer) or "sampler_weights".
    name: its name.
  """

  run: str
  kind: str
  name: str

  def __str__(self) -> str:
    return f"{_SCHEME}{self.run}/{self.kind}/{self.name}"

  @property
  def id(self) -> str:
    """The id inside the run, such as "weights/NAME"."""
    return f"{self.kind}/{self.name}"


def parse(path: str) -> Place:
  """Returns the parts of a path.

  Raises:
    TinkerError: the path has another form.
  """
  parts = path.removeprefix(_SCHEME).split("/")
  is_whole = path.startswith(_SCHEME) and len(parts) == 3
  if not is_whole or parts[1] not in KINDS or not _is_name(parts[2]):
    raise TinkerError(
      f"path is {path[:200]!r}; expected tinker://RUN/weights/NAME or "
      "tinker://RUN/sampler_weights/NAME. Use a path that a save returned"
    )
  return Place(*parts)


def _is_name(name: str) -> bool:
  return bool(_NAME.fullmatch(name))


def check_name(name: object) -> str:
  """Returns a name of a checkpoint.

  Raises:
    TinkerError: the name has other characters, or none.
  """
  if not isinstance(name, str) or not _is_name(name):
    raise TinkerError(
      f"the checkpoint's name is {str(name)[:200]!r}; expected 1 to 128 letters, "
      "digits and signs _.=+-, of which only _ may be first. Choose another name"
    )
  return name


class Checkpoints:
  """The checkpoints of a service.

  Args:
    folder: folder of all checkpoints.
    base: name of the base model, for PEFT's files.
  """

  def __init__(self, folder: pathlib.Path, base: str):
    self._folder, self._base = folder, base
    folder.mkdir(parents=True, exist_ok=True)
    io.sweep(folder)
    for old in folder.glob("*/*/.*.old"):
      _settle(old)

  def save(
    self,
    place: Place,
    arrays: Mapping[str, np.ndarray],
    adapted: Transformer | None,
    meta: Mapping[str, Any],
    *,
    overwrite: bool = False,
  ) -> None:
    """Writes a checkpoint.

    Args:
      place: its path.
      arrays: the exact arrays.
      adapted: the base with the adapter; None writes no PEFT folder.
      meta: JSON values; `time` and `size_bytes` are added. A checkpoint with the same
        `request` is replaced.
      overwrite: replace a checkpoint of this name.

    Raises:
      TinkerError: the name is in use.
    """
    final = self._at(place)
    if final.exists() and not overwrite and not self._is_of(place, meta["request"]):
      raise TinkerError(
        f"the checkpoint {place} exists; expected a new name. Choose another one, or "
        "pass overwrite=True"
      )
    final.parent.mkdir(parents=True, exist_ok=True)
    # A start after a kill knows it by its name, which no checkpoint can have.
    old = final.with_name(f".{final.name}.old")
    staging = final.parent / io.unfinished(final.name)
    staging.mkdir()
    try:
      if adapted is not None:
        lora.save_adapter(adapted, staging / "adapter", base=self._base)
      state_file.write(staging / "state", {}, arrays)
      size = sum(x.stat().st_size for x in staging.rglob("*") if x.is_file())
      now = datetime.datetime.now(datetime.UTC).isoformat()
      io.write_json(staging / "meta.json", {**meta, "time": now, "size_bytes": size})
      if final.exists():
        os.replace(final, old)
      os.replace(staging, final)
    except BaseException:
      shutil.rmtree(staging, ignore_errors=True)
      raise
    finally:
      _settle(old)

  def meta(self, place: Place) -> dict[str, Any]:
    """Returns the JSON values of a checkpoint.

    Raises:
      NotFoundError: there is no such checkpoint, or it has expired.
      RecordError: the values are damaged.
    """
    file = self._at(place) / "meta.json"
    with contextlib.suppress(FileNotFoundError), record_file.checked(file):
      meta = json.loads(file.read_text("utf-8"))
      _ = meta["time"], meta["is_ephemeral"], meta["spec"]  # what others read
      expires = meta.get("expires_at")
      if not expires or datetime.datetime.fromisoformat(expires) >= _now():
        return meta
      self.delete(place)
    raise NotFoundError(
      f"there is no checkpoint {place}; expected one of the run's own. List them"
    )

  def arrays(self, place: Place) -> dict[str, np.ndarray]:
    """Returns the exact arrays of a checkpoint.

    Raises:
      NotFoundError: see `meta`.
      RecordError: the arrays are damaged.
    """
    self.meta(place)
    return state_file.read(self._at(place) / "state")[1]

  def set_expiry(self, place: Place, ttl_seconds: int | None) -> None:
    """Sets the time after which a checkpoint is removed; None: never."""
    meta = {**self.meta(place), "expires_at": expiry(ttl_seconds)}
    io.write_json(self._at(place) / "meta.json", meta)

  def delete(self, place: Place) -> None:
    """Removes a checkpoint.

    Raises:
      NotFoundError: there is no such checkpoint.
    """
    folder = self._at(place)
    if not folder.exists():
      self.meta(place)
    gone = folder.parent / io.unfinished(folder.name)
    os.replace(folder, gone)
    shutil.rmtree(gone)

  def of_run(self, run: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields the checkpoints of a run without damaged ones, the oldest first."""
    checkpoints = []
    for kind in KINDS:
      folder = self._at(Place(run, kind, "x")).parent
      names = sorted(x.name for x in folder.iterdir()) if folder.exists() else []
      for name in filter(_is_name, names):
        place = Place(run, kind, name)
        try:
          checkpoints.append((place, self.meta(place)))
        except NotFoundError:  # it has expired
          continue
        except RecordError as error:
          _LOG.warning("the checkpoint %s is left out: %s", place, error)
    yield from sorted(checkpoints, key=lambda x: x[1]["time"])

  def named(self, runs: Iterable[str]) -> list[tuple[Place, dict[str, Any]]]:
    """Returns the checkpoints of runs, without those of a single sampling client."""
    checkpoints = [x for run in runs for x in self.of_run(run)]
    return [(place, meta) for place, meta in checkpoints if not meta["is_ephemeral"]]

  def prune(self, run: str, keep: int) -> None:
    """Removes the oldest checkpoints of single sampling clients of a run."""
    places = [place for place, meta in self.of_run(run) if meta["is_ephemeral"]]
    for place in places[: max(0, len(places) - keep)]:
      self.delete(place)

  def archive(self, place: Place) -> bytes:
    """Returns the PEFT folder of a checkpoint as a gzipped tar file.

    Raises:
      NotFoundError: see `meta`.
      TinkerError: the checkpoint was made for one sampling client and has no such
        folder.
    """
    if self.meta(place)["is_ephemeral"]:
      raise TinkerError(
        f"the checkpoint {place} has no PEFT folder; expected a checkpoint with a name "
        "of its own. Call save_weights_for_sampler"
      )
    out = bytes_io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
      for file in sorted((self._at(place) / "adapter").iterdir()):
        tar.add(file, arcname=file.name)
    return out.getvalue()

  def _is_of(self, place: Place, request: str) -> bool:
    try:
      return self.meta(place)["request"] == request
    except NotFoundError:  # it has expired
      return True

  def _at(self, place: Place) -> pathlib.Path:
    run = urllib.parse.quote(place.run, safe="")
    return self._folder / run / place.kind / place.name


def _settle(old: pathlib.Path) -> None:
  """Removes a checkpoint that was replaced, or gives its name back if it was not."""
  final = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
  if final.exists():
    shutil.rmtree(old, ignore_errors=True)
  elif old.exists():
    os.replace(old, final)


def check_ttl(ttl_seconds: int | None) -> int | None:
  """Returns the seconds of a life; None: it has no end.

  Raises:
    TinkerError: the life is too short or too long, or no integer.
  """
  body = {"ttl_seconds": ttl_seconds}
  return fields.whole(body, "ttl_seconds", None, least=1, most=_LONGEST)


def expiry(ttl_seconds: int | None) -> str | None:
  """Returns the time of the end of a life, in ISO form; see `check_ttl`."""
  life = check_ttl(ttl_seconds)
  if life is None:
    return None
  return (_now() + datetime.timedelta(seconds=life)).isoformat()


def _now() -> datetime.datetime:
  return datetime.datetime.now(datetime.UTC)
