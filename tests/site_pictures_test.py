"""The docs as a site, built as `make docs` does, in a browser: light, dark, phone."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.browser import CHROMIUM, Browser

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ("index.html", "guides/command.html", "recipes.html", "api/training.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """The folder of the built site; `TUNIX_TEST_PICTURES` keeps it, with its pictures."""
  kept = os.environ.get("TUNIX_TEST_PICTURES")
  folder = pathlib.Path(kept) if kept else tmp_path_factory.mktemp("site")
  build = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going"]
  done = subprocess.run(
    [*build, str(ROOT / "docs"), str(folder)],
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return folder


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.skipif(
  importlib.util.find_spec("sphinx") is None, reason="the extra docs is not installed"
)
def test_pages_fit_windows_and_phones(site):
  browser = Browser(site)
  for page in PAGES:
    for width in (360, 1200):
      assert browser.width(page, width) <= width, (page, width)
    name = page.replace("/", "_").removesuffix(".html")
    light = browser.picture(page, site / f"{name}.light.png")
    assert light != browser.picture(page, site / f"{name}.dark.png", dark=True)
    browser.picture(page, site / f"{name}.phone.png", width=500)
