"""Chromium without a window: what a page looks like, and how wide it is."""

import pathlib
import re
import shutil
import subprocess

CHROMIUM = shutil.which("chromium")
_QUIET = (
  *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
  *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
  *("--allow-file-access-from-files", "--hide-scrollbars"),
)
# A window is 500 pixels wide at the least, a frame is as narrow as a phone.
_PROBE = """<!doctype html><body style="margin:0"><iframe id="f" src="{page}"
 width="{width}" height="2000" style="border:0"></iframe><script>
onload = () => {{ document.title = "wide " +
  document.getElementById("f").contentDocument.documentElement.scrollWidth; }}
</script>"""


class Browser:
  """Looks at pages below a folder.

  Args:
    folder: of the pages; what the browser writes goes there too.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder

  def width(self, page: str, width: int) -> int:
    """Pixels that a page takes in a frame that is so wide."""
    probe = self.folder / "probe.html"
    probe.write_text(_PROBE.format(page=page, width=width))
    found = re.search(r"<title>wide (\d+)", self._browse("--dump-dom", probe.as_uri()))
    assert found is not None, page
    return int(found[1])

  def picture(self, page: str, to: pathlib.Path, *, dark: bool = False, width=1200):
    """A picture of the page; its bytes."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    size = f"--window-size={width},1600"
    uri = (self.folder / page).as_uri()
    self._browse(scheme, f"--screenshot={to}", size, uri)
    return to.read_bytes()

  def _browse(self, *words: str) -> str:
    assert CHROMIUM is not None
    profile = f"--user-data-dir={self.folder / 'profile'}"
    command = [CHROMIUM, *_QUIET, profile, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
