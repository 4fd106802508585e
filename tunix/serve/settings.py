"""Settings of the HTTP server."""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
import typing
import urllib.parse

from tunix.generate.answers.formats import FORMATS
from tunix.utils import checks, text_files
from tunix.utils.setting import Secret, setting

TOOL_FORMATS = ("auto", *sorted({*FORMATS} - {"none"}), "none")
# The command reads the choices off the type; a type checker has no names of a table.
if typing.TYPE_CHECKING:
  ToolFormat = str
else:
  ToolFormat = typing.Literal[TOOL_FORMATS]

# Variable of the environment with the API key.
KEY = "TUNIX_API_KEY"


def read_key(file: str) -> str:
  """Returns the API key in a file.

  Raises:
    OSError: the file cannot be read.
  """
  return text_files.read(file).strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpSettings:
  """Address, access and limits of an HTTP server.

  Attributes:
    host: address to listen on. Any address but a loopback one needs an API key.
    port: TCP port; 0: the system chooses a free one, which is printed.
    api_key: text that clients send as `Authorization: Bearer KEY`; None: no key.
    max_body_bytes: largest body of a request.
    max_concurrent: requests that run at the same time.
    max_queue: further requests that wait; beyond them the answer is 429.
    queue_timeout: longest wait in that queue, in seconds; then the answer is 429.
    retry_after: seconds in the header Retry-After of an answer 429 or 503.
    max_address_requests: open requests of one address (of IPv6: of one network /64);
      None: `max_concurrent` and `max_queue` together.
    proxies: addresses or networks without this bound, such as "10.0.0.2": those of
      proxies and of `tunix route`, whose requests are those of many clients.
    header_timeout: longest time in which a client sends the header of a request, in
      seconds.
    client_timeout: longest time in which a client sends a body, or takes a part of an
      answer, in seconds.
    request_timeout: longest time of one request, in seconds.
    drain_timeout: time that running requests get to finish after SIGTERM, in seconds.
      `tunix serve` ends at most 10 s later.

  Raises:
    TypeError: a value has another type.
    ValueError: a number is out of range; or the address is no loopback address and
      there is no API key.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  api_key: str | None = setting(
    None, option="api_key_file", secret=Secret(read_key, KEY)
  )
  max_body_bytes: int = 16 * 2**20
  max_concurrent: int = 64
  max_queue: int = 256
  queue_timeout: float = 60.0
  retry_after: int = 1
  max_address_requests: int | None = None
  proxies: tuple[str, ...] = setting((), option="proxy", repeats=True)
  header_timeout: float = 10.0
  client_timeout: float = 30.0
  request_timeout: float = 3600.0
  drain_timeout: float = 30.0

  def __post_init__(self):
    checks.fields(
      self,
      port=checks.Range(0, 65535),
      max_body_bytes=checks.BYTES,
      max_concurrent=checks.COUNT,
      max_queue=checks.NOT_NEGATIVE,
      queue_timeout=checks.POSITIVE,
      retry_after=checks.COUNT,
      max_address_requests=checks.COUNT,
      header_timeout=checks.POSITIVE,
      client_timeout=checks.POSITIVE,
      request_timeout=checks.POSITIVE,
      drain_timeout=checks.NOT_NEGATIVE,
    )
    _check_key("api_key", self.api_key)
    if self.api_key is None and not self.is_local:
      raise ValueError(
        f"host is {self.host!r}, which other machines can reach, and api_key is None: "
        "set an API key, or listen on 127.0.0.1"
      )
    for name in self.proxies:
      _check_network(name)

  @property
  def is_local(self) -> bool:
    """True if only this machine can reach the address."""
    if self.host == "localhost":
      return True
    try:
      return ipaddress.ip_address(self.host.strip("[]")).is_loopback
    except ValueError:  # a host name, which may stand for any address
      return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings(HttpSettings):
  """Address, access and limits of the server of a model.

  Attributes:
    model_name: name of the model in requests and answers.
    checkpoint_root: folder below which `/update_weights` and `/v1/load_lora_adapter`
      may read; None: both routes are refused.
    tool_format: how the model writes tool calls. "auto": read off the chat template.
    split_reasoning: return the text between <think> and </think> in a field of its own.
    max_prompt_tokens: longest prompt; None: the limit of the engine.
    max_image_pixels: largest number of pixels of all images of a request together.
    max_choices: largest number of completions of one request: prompts times `n`.
    max_concurrent: requests that the engine works on at the same time.
    admin_timeout: longest time of a pause, a change of adapters or of weights, in
      seconds.

  Raises:
    TypeError, ValueError: see `HttpSettings`.
  """

  model_name: str = setting("default", option="name")
  checkpoint_root: pathlib.Path | None = None
  tool_format: ToolFormat = "auto"
  split_reasoning: bool = True
  max_prompt_tokens: int | None = None
  max_image_pixels: int = 2**25
  max_choices: int = 128
  admin_timeout: float = 600.0

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self,
      max_prompt_tokens=checks.COUNT,
      max_image_pixels=checks.COUNT,
      max_choices=checks.COUNT,
      admin_timeout=checks.POSITIVE,
    )
    if self.tool_format not in TOOL_FORMATS:
      raise ValueError(
        f"tool_format is {self.tool_format!r}, expected one of {TOOL_FORMATS}"
      )
    if not self.model_name:
      raise ValueError("model_name is empty: give the name that clients send")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteSettings:
  """The servers behind a router.

  Attributes:
    urls: addresses of running servers, such as "http://10.0.0.2:8000".
    host_key: API key that the router sends to them; None: none.
    check_interval: seconds between two checks of a host.
    check_timeout: seconds in which a host accepts a connection and answers a check.
    max_failed_checks: failed checks in a row after which the requests that a host works
      on are ended, or sent to another host if no byte of the answer has arrived.
    max_lead: requests that the host with the prefix may work on beyond those of the
      host with the fewest.

  Raises:
    TypeError: a value has another type.
    ValueError: a number is out of range, an address is malformed or given twice, or
      the key is empty.
  """

  urls: tuple[str, ...] = setting(option="url", positional=True)
  host_key: str | None = setting(None, option="host_key_file", secret=Secret(read_key))
  check_interval: float = 2.0
  check_timeout: float = 2.0
  max_failed_checks: int = 3
  max_lead: int = 8

  def __post_init__(self):
    checks.fields(
      self,
      check_interval=checks.POSITIVE,
      check_timeout=checks.POSITIVE,
      max_failed_checks=checks.COUNT,
      max_lead=checks.NOT_NEGATIVE,
    )
    if not self.urls:
      raise ValueError("urls is empty, expected the address of at least one server")
    for url in self.urls:
      _check_url(url)
    if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
      raise ValueError(f"urls is {self.urls}: give each address once")
    _check_key("host_key", self.host_key)


def _check_key(name: str, key: str | None) -> None:
  if key is not None and (not key.strip() or not key.isascii()):
    raise ValueError(
      f"{name} is empty or has characters beyond ASCII, which no header can carry: "
      "give another key, or None for none"
    )


def _check_network(name: str) -> None:
  try:
    ipaddress.ip_network(name)
  except ValueError as error:
    raise ValueError(
      f"proxies has {name!r}, expected an IP address or a network such as "
      f"10.0.0.0/24: {error}"
    ) from error


def _check_url(url: str) -> None:
  try:
    parts = urllib.parse.urlsplit(url)
    is_host = parts.scheme in ("http", "https") and bool(parts.hostname)
    is_host &= parts.port is None or parts.port > 0
  except ValueError:  # a port that is no number, or half of an IPv6 address
    is_host = False
  else:
    rest = parts.path.strip("/") + parts.query + parts.fragment
    is_host &= not rest and parts.username is None
  if not is_host:
    raise ValueError(
      f"urls has {url!r}, expected http://HOST:PORT or https://HOST:PORT with no path"
    )
