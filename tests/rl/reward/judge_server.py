"""A judge for tests: a server of chat completions that answers by a rule."""

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Reply:
  """What the server does with a question.

  Args:
    text: the answer.
    status: HTTP status; at least 400 for an error.
    body: whole body of the response, in place of an answer.
    delay_s: seconds before the response.
    hangs_up: closes the connection without a response.
    finish_reason: of the answer.
  """

  def __init__(
    self,
    text: str | None = "",
    *,
    status: int = 200,
    body: bytes | None = None,
    delay_s: float = 0.0,
    hangs_up: bool = False,
    finish_reason: str = "stop",
  ):
    self.status, self.delay_s, self.hangs_up = status, delay_s, hangs_up
    choice = {"index": 0, "finish_reason": finish_reason}
    answer = {
      "choices": [choice | {"message": {"role": "assistant", "content": text}}],
      "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }
    error = {"error": {"message": text}}
    self.body = json.dumps(error if status >= 400 else answer).encode()
    self.body = self.body if body is None else body


class JudgeServer(http.server.ThreadingHTTPServer):
  """The server.

  Args:
    rule: returns the reply to a question; `seen` counts the question's requests before.

  Attributes:
    questions: every question, in the order of requests.
    requests: bodies of the requests.
    headers: headers of the requests.
    most: largest number of requests at the same time.
  """

  daemon_threads = True
  block_on_close = False

  def __init__(self, rule: Callable[[str, int], Reply | str]):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.rule = rule
    self.questions: list[str] = []
    self.requests: list[dict[str, Any]] = []
    self.headers: list[dict[str, str]] = []
    self.running = self.most = 0
    self.lock = threading.Lock()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(http.server.BaseHTTPRequestHandler):
  server: JudgeServer

  def do_POST(self):
    server = self.server
    request = json.loads(self.rfile.read(int(self.headers["content-length"])))
    question = request["messages"][0]["content"]
    with server.lock:
      seen = server.questions.count(question)
      server.questions.append(question)
      server.requests.append(request)
      server.headers.append({k.lower(): v for k, v in self.headers.items()})
      server.running += 1
      server.most = max(server.most, server.running)
    reply = server.rule(question, seen)
    reply = Reply(reply) if isinstance(reply, str) else reply
    time.sleep(reply.delay_s)
    with server.lock:
      server.running -= 1
    if reply.hangs_up:
      self.close_connection = True
      return
    self.send_response(reply.status)
    self.send_header("content-type", "application/json")
    self.send_header("content-length", str(len(reply.body)))
    self.send_header("retry-after-ms", "1")
    self.end_headers()
    self.wfile.write(reply.body)

  def log_message(self, *_):
    pass


@contextlib.contextmanager
def serving(rule: Callable[[str, int], Reply | str]) -> Iterator[JudgeServer]:
  """Runs a server in a thread."""
  server = JudgeServer(rule)
  thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
  thread.start()
  try:
    yield server
  finally:
    server.shutdown()
    server.server_close()


def material(question: str) -> list[str]:
  """The lines that were quoted, without their marks."""
  return [line[2:] for line in question.splitlines() if line.startswith("> ")]
