"""Pages in a browser: light, dark and on a phone, nothing is wider than the window."""

import pytest

from tests.browser import CHROMIUM, Browser
from tests.report.page_test import write_run
from tunix.report import page
from tunix.report.page import Run


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_page_fits_windows_and_phones(tmp_path):
  names = ("loss", "rewards/score/mean", "rewards/score/min", "rewards/score/max")
  metrics = {name: lambda step: float(step % 7) for name in names}
  folder = write_run(tmp_path / "run", steps=50, metrics=metrics, sample="long " * 90)
  settings = {"data.train": "/a/very/long/path" * 20, "key" * 30: list(range(200))}
  text = page.render([Run(name="run", folder=folder, settings=settings)])
  (tmp_path / "report.html").write_text(text)
  browser = Browser(tmp_path)
  for width in (360, 1200):
    assert browser.width("report.html", width) == width
  light = browser.picture("report.html", tmp_path / "light.png")
  assert light != browser.picture("report.html", tmp_path / "dark.png", dark=True)
