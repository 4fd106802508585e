"""A tab of Chromium without a window, driven over a pipe by DevTools' protocol."""

import base64
import fcntl
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from typing import Any

from tests.browser import CHROMIUM

# Chromium reads requests from descriptor 3 and writes answers to descriptor 4.
_LAUNCH = (
  "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
  "os.execv(sys.argv[3], sys.argv[3:])"
)
_WORDS = (
  *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
  *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
  *("--hide-scrollbars", "--remote-debugging-pipe"),
)
_ANSWER = 60  # seconds in which Chromium answers a request


class Tab:
  """One tab; a context manager that ends the browser.

  Args:
    folder: the browser writes its profile there.
  """

  def __init__(self, folder: pathlib.Path):
    assert CHROMIUM is not None
    requests, self._out = os.pipe()
    self._in, answers = os.pipe()
    # Above 4, so that `_LAUNCH` overwrites neither of them.
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (requests, answers)]
    profile = f"--user-data-dir={folder / 'profile'}"
    launch = [sys.executable, "-c", _LAUNCH, *map(str, ends)]
    with (folder / "chromium.log").open("w") as log:
      self._process = subprocess.Popen(
        [*launch, CHROMIUM, *_WORDS, profile], pass_fds=ends, stdout=log, stderr=log
      )
    for fd in (requests, answers, *ends):
      os.close(fd)
    self._number, self._rest, self._session = 0, b"", None
    target = self.command("Target.createTarget", url="about:blank")["targetId"]
    attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
    self._session = attached["sessionId"]
    self.command("Page.enable")

  def __enter__(self) -> "Tab":
    return self

  def __exit__(self, *_: Any) -> None:
    self._process.kill()
    self._process.wait(_ANSWER)
    os.close(self._out)
    os.close(self._in)

  def command(self, method: str, **parameters: Any) -> dict[str, Any]:
    """Sends a request and returns its result."""
    self._number += 1
    request = {"id": self._number, "method": method, "params": parameters}
    if self._session is not None:
      request["sessionId"] = self._session
    os.write(self._out, json.dumps(request).encode() + b"\0")
    until = time.monotonic() + _ANSWER
    while True:
      answer = self._message(until, method)
      if answer.get("id") == self._number:
        assert "error" not in answer, answer["error"]
        return answer["result"]

  def _message(self, until: float, method: str) -> dict[str, Any]:
    while b"\0" not in self._rest:
      left = max(0.0, until - time.monotonic())
      assert select.select([self._in], [], [], left)[0], f"no answer to {method}"
      part = os.read(self._in, 1 << 20)
      assert part, f"chromium ended during {method}"
      self._rest += part
    message, _, self._rest = self._rest.partition(b"\0")
    return json.loads(message)

  def open(self, url: str) -> None:
    """Opens a page; returns when its document is parsed."""
    self.command("Page.navigate", url=url)
    self.wait(f"location.href.startsWith({url!r}) && document.readyState !== 'loading'")

  def run(self, script: str) -> Any:
    """Returns the value of an expression of JavaScript."""
    answer = self.command(
      "Runtime.evaluate", expression=script, returnByValue=True, userGesture=True
    )
    assert "exceptionDetails" not in answer, answer["exceptionDetails"]
    return answer["result"].get("value")

  def wait(self, script: str, seconds: float = 30.0) -> None:
    """Waits until an expression is true."""
    until = time.monotonic() + seconds
    while not self.run(script):
      assert time.monotonic() < until, f"{script} did not become true"
      time.sleep(0.02)

  def type(self, field: str, text: str) -> None:
    """Replaces the text of a field, as a person would."""
    self.run(f"document.getElementById({field!r}).focus()")
    self.run(f"document.getElementById({field!r}).select()")
    if text:
      self.command("Input.insertText", text=text)
    else:
      self.press("Delete", 46)

  def press(self, key: str, code: int, text: str = "", shift: bool = False) -> None:
    """Presses a key on the focused field."""
    details = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
    down = {"text": text} if text else {}
    self.command("Input.dispatchKeyEvent", type="keyDown", **details, **down)
    self.command("Input.dispatchKeyEvent", type="keyUp", **details)

  def click(self, element: str) -> None:
    """Clicks the middle of an element, which must be visible."""
    place = self.run(
      f"(() => {{ const box = document.getElementById({element!r})"
      ".getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2,"
      " box.width]; })()"
    )
    assert place[2] > 0, f"{element} is hidden"
    at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):
      self.command("Input.dispatchMouseEvent", type=kind, **at)

  def resize(self, width: int, height: int, dark: bool = False) -> None:
    """Sets the size of the window and the color scheme that the user prefers."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1}
    self.command("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    self.command("Emulation.setEmulatedMedia", features=[scheme])

  def picture(self) -> bytes:
    """Returns a picture of the window, as PNG."""
    return base64.b64decode(self.command("Page.captureScreenshot")["data"])

  def controls(self) -> list[tuple[str, str]]:
    """Returns (role, accessible name) of everything that can be focused."""
    nodes = self.command("Accessibility.getFullAXTree")["nodes"]
    found = []
    for node in nodes:
      facts = {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
      if facts.get("focusable") and node["role"]["value"] != "RootWebArea":
        found.append((node["role"]["value"], node.get("name", {}).get("value", "")))
    return found
