"""The other end of `tunix chat --url`: any server with OpenAI's routes."""

from __future__ import annotations

import base64
import mimetypes
import pathlib
from collections.abc import Generator
from typing import Any, NamedTuple

from tunix.generate.external.http import Client, Refused
from tunix.generate.external.rows import EngineError
from tunix.utils import env

Messages = list[dict[str, Any]]

# Seconds without a part of a reply; a full server lets requests wait.
_REPLY = 600.0
_LIST = 30.0  # seconds for the list of models
# Our names of the options of sampling that OpenAI's API calls otherwise.
_FIELDS = {"stop_strings": "stop", "max_new_tokens": "max_tokens"}


class Unanswered(Exception):
  """A turn that gets no reply; the conversation can go on without it."""


class Part(NamedTuple):
  """A part of a reply.

  Attributes:
    text: the text.
    is_content: False for reasoning, which later turns do not see.
  """

  text: str
  is_content: bool = True


def image_part(file: str) -> dict[str, Any]:
  """Returns an image as a part of a message, which holds the bytes of its file.

  Raises:
    OSError: the file cannot be read.
  """
  data = base64.b64encode(pathlib.Path(file).expanduser().read_bytes()).decode()
  kind = mimetypes.guess_type(file)[0] or "image/png"
  return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


class ChatServer:
  """A model behind a server.

  Attributes:
    model: name of the model in requests.
  """

  def __init__(
    self, url: str, model: str | None, api_key: str | None, options: dict[str, Any]
  ):
    """Reads the name of the model from the server, unless it is given.

    Args:
      url: address of the server, with or without "/v1".
      model: name of the model; None: the first one that the server lists.
      api_key: the key; None: none is sent.
      options: options of sampling that are set, by the names of the command.

    Raises:
      ValueError: the address has another form, or the server refuses the key.
      EngineError: the server gives no answer, or lists no model.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    self._client = Client(base, _REPLY, headers)
    self._options = {_FIELDS.get(name, name): x for name, x in options.items()}
    self.model = model or _first_model(Client(base, _LIST, headers))

  def stream(self, messages: Messages) -> Generator[Part, None, None]:
    """Yields the parts of a reply.

    Raises:
      Unanswered: the server refuses the conversation, or is full.
      ValueError: the server refuses the key or does not know the model.
      EngineError: the server gives no answer, or not all of it.
    """
    body = {"model": self.model, "messages": messages, "stream": True, **self._options}
    is_reasoning = False
    try:
      for event in self._client.events("/v1/chat/completions", body):
        content, reasoning = _texts(event)
        if reasoning:
          # A model without a server writes its reasoning between these marks.
          yield Part(reasoning if is_reasoning else f"<think>{reasoning}", False)
          is_reasoning = True
        if content:
          if is_reasoning:
            yield Part("</think>\n", False)
            is_reasoning = False
          yield Part(content)
    except Refused as error:
      if error.status in (401, 403, 404):
        raise ValueError(_with_remedy(error)) from error
      raise Unanswered(str(error)) from error


def key_of(name: str | None) -> str | None:
  """Returns the API key in a variable of the environment; None without a name.

  Raises:
    ValueError: the variable is not set, or no header can carry its value. The message
      does not show the value.
  """
  if name is None:
    return None
  key = (env.value(name) or "").strip()
  if not key or not key.isascii() or not key.isprintable():
    problem = "has characters that no header can carry" if key else "is not set"
    raise ValueError(
      f"--api_key_env is {name!r}, but this variable of the environment {problem}: "
      "write the API key into it"
    )
  return key


def _first_model(client: Client) -> str:
  try:
    answer = client.ask("GET", "/v1/models")
  except Refused as error:
    raise ValueError(_with_remedy(error)) from error
  try:
    return str(answer["data"][0]["id"])
  except (TypeError, KeyError, IndexError) as error:
    raise EngineError(
      f"{client.url}/v1/models lists no model: give its name with --model, or check "
      "that the server has OpenAI's routes"
    ) from error


def _with_remedy(error: Refused) -> str:
  if error.status != 401:
    return str(error)
  return f"{error}. Name the variable that has the key with --api_key_env"


def _texts(event: Any) -> tuple[str | None, str | None]:
  """Returns the content and the reasoning of an event."""
  try:
    choices = event["choices"]  # none in the event that has the usage
    delta = choices[0].get("delta") or {} if choices else {}
    return delta.get("content"), delta.get("reasoning_content") or delta.get(
      "reasoning"
    )
  except (AttributeError, TypeError, KeyError, IndexError) as error:
    raise EngineError(
      f"the server sent {str(event)[:200]!r}, expected an event of a chat completion"
    ) from error
