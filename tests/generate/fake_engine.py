"""A server for tests: answers with what a function says, and remembers what it was
asked. Run as a program it stands for an interpreter that has vLLM."""

import http.server
import json
import sys
import threading
import time


class FakeEngine:
  """`answers[path]` is the JSON of that path, or a function of the request's body that
  gives it; an int in its place is the status of an error."""

  def __init__(self, answers, port=0):
    self.asked = []
    self.answers = answers
    handler = type("Handler", (_Handler,), {"engine": self})
    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def bodies(self, path):
    return [body for asked, body in self.asked if asked == path]

  def close(self):
    self._server.shutdown()
    self._server.server_close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()


class _Handler(http.server.BaseHTTPRequestHandler):
  engine: FakeEngine

  def do_GET(self):
    self._answer(None)

  def do_POST(self):
    text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    self._answer(json.loads(text) if text else None)

  def _answer(self, body):
    self.engine.asked.append((self.path, body))
    answer = self.engine.answers.get(self.path, 404)
    answer = answer(body) if callable(answer) else answer
    status = answer if isinstance(answer, int) else 200
    if status != 200:
      answer = {"error": {"message": f"no such thing as {self.path}"}}
    text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    self.send_response(status)
    self.end_headers()
    self.wfile.write(text)

  def log_message(self, *_):
    pass


if __name__ == "__main__":
  asked = dict(zip(sys.argv[1:], sys.argv[2:]))
  print("arguments:", sys.argv[1:], flush=True)
  if asked["--model"] == "broken":
    sys.exit("no such model")
  if asked["--model"] != "slow":
    FakeEngine({"/health": {}}, int(asked["--port"]))
  time.sleep(3600)
