"""What the site's pages say exists: pages, names, keys of the command, messages.

The site itself is built by `make docs`, which takes what the tests do not install.
"""

import ast
import importlib
import pathlib
import re

import pytest

from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import keys

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def navigation():
  """The pages that conf.py lists."""
  tree = ast.parse((DOCS / "conf.py").read_text())
  (value,) = [
    node.value
    for node in tree.body
    if isinstance(node, ast.Assign) and node.targets[0].id == "NAVIGATION"
  ]
  texts = {n.value for n in ast.walk(value) if isinstance(n, ast.Constant)}
  return {text for text in texts if re.fullmatch(r"[a-z_/]+", text)}


def test_every_page_is_in_the_navigation():
  pages = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES}
  assert navigation() == pages - {"index"}


def resolved(name):
  """What a dotted name stands for; raises where there is nothing."""
  parts = name.split(".")
  for cut in range(len(parts), 0, -1):
    try:
      found = importlib.import_module(".".join(parts[:cut]))
    except ModuleNotFoundError:
      continue
    for part in parts[cut:]:
      found = getattr(found, part)
    return found
  raise ModuleNotFoundError(name)


NAMES = sorted(
  {
    name
    for page in PAGES
    for name in re.findall(r"`(tunix(?:\.\w+)+)(?:\([^`]*\))?`", page.read_text())
  }
)


@pytest.mark.parametrize("name", NAMES)
def test_names_in_backticks_exist(name):
  assert resolved(name) is not None


def test_modules_of_the_reference_exist():
  for page in (DOCS / "api").glob("*.md"):
    modules = re.findall(r"automodule:: (\S+)", page.read_text())
    assert modules, page
    for module in modules:
      assert importlib.import_module(module).__doc__, module


def test_keys_of_the_migration_page_exist():
  known = {key for job in JOBS.values() for key, _, _ in keys.walk(job.settings)}
  table = (DOCS / "migration/from_trl.md").read_text().partition("## Options")[2]
  table = table.partition("## What to expect")[0]
  cells = [
    line.split("|")[2] for line in table.splitlines() if line.startswith("| `--")
  ]
  named = {key for cell in cells for key in re.findall(r"`(\w+\.\w+)`", cell)}
  assert len(cells) > 15 and named <= known, named - known


def test_messages_are_those_of_the_code():
  code = "".join(path.read_text() for path in sorted((ROOT / "tunix").rglob("*.py")))
  # A message is written over several lines of source.
  code = re.sub(r'"\s*\n\s*f?"', "", code)
  rows = [
    line.split("|")[1]
    for line in (DOCS / "troubleshooting.md").read_text().splitlines()
    if line.startswith('| "')
  ]
  quoted = [text for row in rows for text in re.findall(r'"([^"]+)"', row)]
  assert len(quoted) > 10
  missing = [text for text in quoted if text not in code]
  assert not missing, missing
