"""Settings of the training service."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from tunix.utils import checks, text_files
from tunix.utils.setting import Secret, setting

_PREFIX = "tml-"  # the client refuses API keys without it


def read_keys(file: str | os.PathLike[str]) -> dict[str, str]:
  """Reads tenants from a file with a line `NAME KEY` for each.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line has another form, or a name is there twice.
  """
  keys: dict[str, str] = {}
  for number, line in enumerate(text_files.lines(text_files.read(file)), 1):
    parts = line.split()
    if not parts or line.startswith("#"):
      continue
    if len(parts) != 2 or parts[0] in keys:
      raise ValueError(
        f"{file}, line {number}: expected NAME KEY, with each name once. Correct the "
        "line"
      )
    keys[parts[0]] = parts[1]
  return keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinkerSettings:
  """Files, tenants and limits of the training service.

  Attributes:
    root: folder of the service's files. None keeps everything in memory, and nothing
      survives the process.
    keys: API key of each tenant, by the tenant's name; in a file, a line `NAME KEY` for
      each. Empty: every client that passes the server's own access check is the tenant
      "local".
    lora_alpha: alpha of all adapters, whose outputs are scaled by alpha / rank. The
      protocol has no field for it.
    max_rank: largest rank of an adapter.
    max_models: largest number of loaded models of one tenant.
    max_bytes: most device memory of the loaded models of one tenant: adapters, both
      moments of AdamW, and gradients.
    max_tokens: most tokens of one datum.
    batch_tokens: most tokens of a forward-backward micro-batch, padding included. A
      request with more is computed in several micro-batches, whose gradients are added.
    max_rows: most rows of a forward-backward request.
    max_request_tokens: most tokens of a request: of its rows, or `num_samples` times
      `max_tokens` times the alternatives of a token.
    max_pending: most requests of one tenant that wait or run.
    max_pending_bytes: most bytes of the rows of a tenant's waiting requests.
    max_sessions: most sessions of one tenant, and most of its sampling sessions. A new
      one replaces the oldest without open requests.
    max_runs: most models of one tenant, the unloaded ones included.
    max_starts: most starts of a request. If the process ends within each of them, for
      example because the machine has too little memory, the request fails. A stop by
      SIGTERM is not counted.
    max_checkpoints: most checkpoints of one tenant.
    keep_samplers: number of checkpoints per model that stay after
      `save_weights_and_get_sampling_client`; older clients of this kind can no longer
      sample. Checkpoints with names are not counted.
    snapshot_steps: optimizer steps after which the state of a model is written whole. A
      restart repeats the requests since then.
    keep_results: number of results per model that stay after they were retrieved.
    max_result_bytes: most bytes of a model's results. The oldest are dropped, whether
      they were retrieved or not.
    wait_seconds: longest time in which `retrieve_future` waits before it answers
      `try_again`.

  Raises:
    TypeError: a value has another type.
    ValueError: a number is out of range, or two tenants have one key.
  """

  root: pathlib.Path | None = setting(None, in_command=pathlib.Path("tinker"))
  keys: Mapping[str, str] = setting(default_factory=dict, secret=Secret(read_keys))
  lora_alpha: float = 32.0
  max_rank: int = 128
  max_models: int = 16
  max_bytes: int = 8 * 2**30
  max_tokens: int = 32768
  batch_tokens: int = 16384
  max_rows: int = 1024
  max_request_tokens: int = 2**20
  max_pending: int = 256
  max_pending_bytes: int = 2**30
  max_sessions: int = 10_000
  max_runs: int = 10_000
  max_starts: int = 3
  max_checkpoints: int = 1000
  keep_samplers: int = 8
  snapshot_steps: int = 16
  keep_results: int = 64
  max_result_bytes: int = 128 * 2**20
  wait_seconds: float = 20.0

  def __post_init__(self):
    checks.fields(
      self,
      lora_alpha=checks.POSITIVE,
      max_rank=checks.COUNT,
      max_models=checks.COUNT,
      max_bytes=checks.BYTES,
      max_tokens=checks.COUNT,
      batch_tokens=checks.COUNT,
      max_rows=checks.COUNT,
      max_request_tokens=checks.COUNT,
      max_pending=checks.COUNT,
      max_pending_bytes=checks.BYTES,
      max_sessions=checks.COUNT,
      max_runs=checks.COUNT,
      max_starts=checks.COUNT,
      max_checkpoints=checks.COUNT,
      keep_samplers=checks.COUNT,
      snapshot_steps=checks.COUNT,
      keep_results=checks.NOT_NEGATIVE,
      max_result_bytes=checks.BYTES,
      wait_seconds=checks.NOT_NEGATIVE,
    )
    for name, key in self.keys.items():
      if not name or not key.startswith(_PREFIX) or not key.isascii():
        raise ValueError(
          f"the API key of tenant {name!r} has another form; expected ASCII text that "
          f"begins with {_PREFIX!r}, which the client demands. Change the key"
        )
    if len(set(self.keys.values())) < len(self.keys):
      raise ValueError("keys has one key twice; expected one key for each tenant")
