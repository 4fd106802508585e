"""What the site's pages say exists: pages, names, keys of the command, messages.

The site itself is built by `make docs`, which takes what the tests do not install.
"""

import ast
import importlib.util
import json
import pathlib
import re
import tomllib

import pytest

from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import keys
from tunix.ops.preference import PAIR_LOSSES

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"


def load_pages():
  """Returns docs/pages.py, which makes the pages that are not checked in."""
  spec = importlib.util.spec_from_file_location("pages", DOCS / "pages.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


MAKER = load_pages()
MADE = {DOCS / f"{page}.md": path for path, page in MAKER.made_from().items()}
PAGES = sorted(
  page
  for page in DOCS.rglob("*.md")
  if page not in MADE and page.relative_to(DOCS).parts[0] not in MAKER.FOLDERS
)


def navigation():
  """The pages that conf.py lists."""
  tree = ast.parse((DOCS / "conf.py").read_text())
  (value,) = [
    node.value
    for node in tree.body
    if isinstance(node, ast.Assign)
    and getattr(node.targets[0], "id", "") == "NAVIGATION"
  ]
  texts = {n.value for n in ast.walk(value) if isinstance(n, ast.Constant)}
  return {text for text in texts if re.fullmatch(r"[a-z_/]+", text)}


def test_every_page_is_in_the_navigation():
  pages = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES}
  # The pages below tutorials/index and examples/index are listed by these two.
  made = {"tutorials/index", "examples/index", "reference/keys"}
  assert navigation() == pages - {"index"} | made


def test_the_reference_of_keys_has_every_key():
  text = MAKER.keys()
  known = {key for job in JOBS.values() for key, _, _ in keys.walk(job.settings)}
  listed = set(re.findall(r"^`([\w.]+)`\{#", text, re.M))
  listed |= set(re.findall(r"^## `(\w+)`", text, re.M))
  # A mapping below a section is one key, and the name of a choice is a key of files.
  assert {key for key in known if key.count(".") < 2} <= listed
  assert len(listed) > 150 and "*free on resume*" in text


def test_a_tutorial_shows_the_outputs_of_its_notebook():
  notebooks = [path for path in MADE.values() if path.suffix == ".ipynb"]
  assert len(notebooks) >= 10
  for number, path in enumerate(notebooks, 1):
    text = MAKER.notebook(path, number)
    cells = json.loads(path.read_text())["cells"]
    outputs = [o for cell in cells for o in cell.get("outputs", ())]
    plots = sum("image/png" in output.get("data", {}) for output in outputs)
    assert re.match(rf"# {number}\. \D", text)
    assert text.count("](data:image/png;base64,") == plots
    for cell in cells[1:]:  # the first one has the title
      assert "".join(cell["source"]).rstrip() in text


def test_every_script_and_recipe_has_a_page():
  made = set(MADE.values())
  examples = ROOT / "examples"
  assert {*examples.glob("*.py"), *examples.glob("recipes/*.yaml")} <= made


def test_a_block_with_fences_keeps_its_own():
  assert MAKER.fenced("```python\nx\n```", "text").splitlines()[0] == "````text"


def test_every_job_has_a_page_of_its_trainer():
  pages = {page.stem for page in (DOCS / "trainers").glob("*.md")}
  assert pages == {*JOBS, "on_policy_distill"}
  parts = ("Data", "Command", "Python", "Settings that matter", "Metrics to watch")
  for page in (DOCS / "trainers").glob("*.md"):
    for part in (*parts, "What goes wrong"):
      assert f"\n## {part}\n" in page.read_text(), (page.name, part)


def test_install_names_every_extra():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  table = (DOCS / "install.md").read_text().partition("## Extras")[2]
  named = {
    x for row in re.findall(r"^\| (`.*?) \|", table, re.M) for x in row.split(", ")
  }
  assert named == {f"`{extra}`" for extra in project["optional-dependencies"]}


def test_keys_of_the_trainers_pages_exist():
  known = {key for job in JOBS.values() for key, _, _ in keys.walk(job.settings)}
  sections = {key for key in known if "." not in key}
  for page in [*(DOCS / "trainers").glob("*.md"), DOCS / "faq.md", DOCS / "choose.md"]:
    text = page.read_text()
    named = re.findall(r"(?:`|--)(\w+\.\w+)(?:`|=)", text)
    wrong = {k for k in named if k.partition(".")[0] in sections} - known
    assert not wrong - {"algorithm.name", "mesh.fsdp"}, (page.name, wrong)


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


def test_metrics_of_the_trainers_pages_exist():
  words = set(re.findall(r"`[^`\n]+`", (DOCS / "metrics.md").read_text()))
  for page in [*(DOCS / "trainers").glob("*.md"), DOCS / "logs.md"]:
    text = page.read_text()
    part = text if page.name == "logs.md" else text.partition("## Metrics to watch")[2]
    named = set(
      re.findall(r"`((?:actor|critic|rewards|completions|groups)/\w[\w/]*)`", part)
    )
    named |= set(re.findall(r"`((?:distill|log_probs|perf)/\w+)`", part))
    # Updates of both roles are listed once, without the role.
    either = {name: re.sub(r"^(actor|critic)/", "", name) for name in named}
    missing = {n for n in named if not {f"`{n}`", f"`{either[n]}`"} & words}
    assert not missing, (page.name, missing)


def test_every_pair_loss_is_on_the_page_of_dpo():
  table = (DOCS / "trainers/dpo.md").read_text().partition("## Losses")[2]
  table = table.partition("A loss is the mean")[0]
  rows = "".join(line for line in table.splitlines() if line.startswith("| `"))
  assert set(re.findall(r"`(\w+)`", rows)) == set(PAIR_LOSSES)
