"""Pages in a browser: light, dark and on a phone, nothing is wider than the window."""

import re
import shutil
import subprocess

import pytest

from tests.report.page_test import write_run
from tunix.report import page
from tunix.report.page import Run

CHROMIUM = shutil.which("chromium")
QUIET = (
  *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
  *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
  *("--allow-file-access-from-files", "--hide-scrollbars"),
)
# A window is 500 pixels wide at the least, a frame is as narrow as a phone.
PROBE = """<!doctype html><body style="margin:0"><iframe id="f" src="report.html"
 width="{width}" height="2000" style="border:0"></iframe><script>
onload = () => {{ document.title = "wide " +
  document.getElementById("f").contentDocument.documentElement.scrollWidth; }}
</script>"""


def browse(folder, *words):
  profile = f"--user-data-dir={folder / 'profile'}"
  command = [CHROMIUM, *QUIET, profile, *map(str, words)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_page_fits_windows_and_phones(tmp_path):
  names = ("loss", "rewards/score/mean", "rewards/score/min", "rewards/score/max")
  metrics = {name: lambda step: float(step % 7) for name in names}
  folder = write_run(tmp_path / "run", steps=50, metrics=metrics, sample="long " * 90)
  settings = {"data.train": "/a/very/long/path" * 20, "key" * 30: list(range(200))}
  text = page.render([Run(name="run", folder=folder, settings=settings)])
  (tmp_path / "report.html").write_text(text)
  for width in (360, 1200):
    (tmp_path / "probe.html").write_text(PROBE.format(width=width))
    dom = browse(tmp_path, "--dump-dom", (tmp_path / "probe.html").as_uri())
    assert re.search(r"<title>wide (\d+)", dom)[1] == str(width)
  pictures = []
  for scheme in (1, 0):  # light, dark
    picture = tmp_path / f"{scheme}.png"
    how = f"--blink-settings=preferredColorScheme={scheme}"
    uri = (tmp_path / "report.html").as_uri()
    browse(tmp_path, how, f"--screenshot={picture}", "--window-size=1200,1600", uri)
    pictures.append(picture.read_bytes())
  assert pictures[0] != pictures[1]
