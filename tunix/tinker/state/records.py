"""Sessions and sampling sessions: small records, one JSON file each."""

from __future__ import annotations

import datetime
import json
import pathlib
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Set
from typing import Any

from tunix.tinker.errors import NotFoundError
from tunix.utils import io, record_file


class Records:
  """The sessions of all tenants.

  Args:
    root: folder of the service; the records are in `sessions` and `samplers`.
    most: most sessions of a tenant, and most sampling sessions. A new one replaces the
      oldest.

  Attributes:
    in_use: returns the ids of sampling sessions with open requests, which stay.
  """

  def __init__(self, root: pathlib.Path, most: int):
    self.in_use: Callable[[], Set[str]] = frozenset
    self._root, self._most = root, most
    self._lock = threading.Lock()
    self._sessions = self._read("sessions")
    self._samplers = self._read("samplers")

  def create_session(self, tenant: str, metadata: Mapping[str, Any]) -> str:
    """Returns the id of a new session."""
    id = f"s{secrets.token_hex(12)}"
    record = {"id": id, "owner": tenant, "metadata": dict(metadata), "time": now()}
    self._add("sessions", self._sessions, record)
    return id

  def session(self, tenant: str, id: str) -> dict[str, Any]:
    """Returns a session.

    Raises:
      NotFoundError: the tenant has no such session.
    """
    return self._owned(self._sessions, "session", tenant, id)

  def sessions(self, tenant: str) -> list[str]:
    """Returns the ids of a tenant's sessions."""
    with self._lock:
      return [id for id, x in self._sessions.items() if x["owner"] == tenant]

  def create_sampler(
    self, tenant: str, session: str, number: int, path: str | None, base: str
  ) -> str:
    """Returns the id of a sampling session; a repeated call returns the same one.

    Args:
      tenant: name of the tenant.
      session: id of its session.
      number: number of the sampling session in it.
      path: path of a checkpoint; None: the base model.
      base: name of the base model.

    Raises:
      NotFoundError: the tenant has no such session.
    """
    self.session(tenant, session)
    id = f"{session}:sample:{int(number)}"
    record = {"id": id, "owner": tenant, "path": path, "base_model": base}
    with self._lock:
      is_known = self._samplers.get(id) == record
    if not is_known:
      self._add("samplers", self._samplers, record)
    return id

  def sampler(self, tenant: str, id: str) -> dict[str, Any]:
    """Returns a sampling session.

    Raises:
      NotFoundError: the tenant has no such session.
    """
    return self._owned(self._samplers, "sampling session", tenant, id)

  def sampling_tenant(self, id: str) -> str:
    """Returns the tenant of a sampling request; empty if its session is gone."""
    with self._lock:
      return self._samplers.get(id.rpartition(":")[0], {"owner": ""})["owner"]

  def samplers_of(self, session: str) -> list[str]:
    """Returns the ids of the sampling sessions of a session."""
    with self._lock:
      return [x for x in self._samplers if x.startswith(f"{session}:")]

  def _owned(
    self, records: Mapping[str, dict[str, Any]], what: str, tenant: str, id: str
  ) -> dict[str, Any]:
    with self._lock:
      record = records.get(id)
    if record is None or record["owner"] != tenant:
      raise missing(what, id)
    return record

  def _add(
    self, kind: str, records: dict[str, dict[str, Any]], record: dict[str, Any]
  ) -> None:
    def file(id):
      return self._root / kind / f"{urllib.parse.quote(id, safe='')}.json"

    io.write_json(file(record["id"]), record)
    stay = {record["id"], *self.in_use()}
    with self._lock:
      records[record["id"]] = record
      mine = [id for id, x in records.items() if x["owner"] == record["owner"]]
      idle = [id for id in mine if id not in stay]
      for old in idle[: max(0, len(mine) - self._most)]:
        del records[old]
        file(old).unlink(missing_ok=True)

  def _read(self, kind: str) -> dict[str, dict[str, Any]]:
    folder = self._root / kind
    folder.mkdir(parents=True, exist_ok=True)
    io.sweep(folder)
    records = {}
    for file in sorted(folder.glob("*.json"), key=lambda x: x.stat().st_mtime_ns):
      with record_file.checked(file):
        record = json.loads(file.read_text("utf-8"))
        records[record["id"]] = record
    return records


def missing(what: str, id: str) -> NotFoundError:
  """Returns the error for an object that is not there, or is another tenant's."""
  return NotFoundError(
    f"there is no {what} {id[:200]!r}; expected one of the tenant's own. Check the id "
    "and the API key"
  )


def now() -> str:
  """Returns the time in ISO form."""
  return datetime.datetime.now(datetime.UTC).isoformat()
