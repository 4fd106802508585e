"""Pages of the site that are made from other files of the repository at each build.

| page | made from |
|---|---|
| reference/keys | the settings of the jobs |
| tutorials/* | the notebooks, with their stored outputs |
| examples/* | examples/README.md, the scripts and the recipes |

git ignores these pages, so that nothing is stored twice. Other pages link to the files
from which they are made, which works on GitHub; the site links to the pages instead.
"""

import importlib.util
import json
import pathlib
import re
from collections.abc import Iterator

from tunix.cli import reference
from tunix.cli.settings import yaml_text

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
NOTEBOOKS = ROOT / "examples/notebooks"
FOLDERS = ("tutorials", "examples")  # folders of docs with made pages only
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MARKUP = re.compile(r"([\\*_<>|{}$~\[\]])")


def made_from() -> dict[pathlib.Path, str]:
  """Returns the page of each file that has one, in the order of the navigation."""
  pages = {ROOT / "tunix/cli/base_config.yaml": "reference/keys"}
  pages[NOTEBOOKS] = "tutorials/index"
  for number, path in _numbered().items():
    pages[path] = f"tutorials/{number:02}_{path.stem}"
  pages[ROOT / "examples/README.md"] = "examples/index"
  for script in sorted((ROOT / "examples").glob("*.py")):
    pages[script] = f"examples/{script.stem}"
  for recipe in sorted((ROOT / "examples/recipes").glob("*.yaml")):
    pages[recipe] = f"examples/recipes/{recipe.stem}"
  return pages


def write() -> None:
  """Writes the pages into docs and deletes the pages of files that are gone.

  An unchanged page keeps its time stamp, so that Sphinx does not read it again.
  """
  pages = made_from()
  texts = {}
  for path, page in pages.items():
    if path.suffix == ".ipynb":
      texts[page] = notebook(path, int(page.rpartition("/")[2][:2]))
    elif page == "reference/keys":
      texts[page] = keys()
    elif page == "tutorials/index":
      texts[page] = tutorials([p for p in pages if p.suffix == ".ipynb"])
    elif page == "examples/index":
      texts[page] = gallery(path, [p for p in pages if p.suffix == ".py"])
    else:
      texts[page] = source(path)
  for folder in FOLDERS:
    for old in (DOCS / folder).rglob("*.md"):
      if old.relative_to(DOCS).with_suffix("").as_posix() not in texts:
        old.unlink()
  for page, text in texts.items():
    path = DOCS / f"{page}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
      path.write_text(text)


def _numbered() -> dict[int, pathlib.Path]:
  """Returns the notebooks by number, ascending.

  The title of a notebook may begin with its number. The others get the free numbers.
  """
  paths = [NOTEBOOKS / f"{name}.ipynb" for name in _notebook_names()]
  given = {number: path for path in paths if (number := heading(path)[0])}
  free = iter(n for n in range(1, len(paths) + 1) if n not in given)
  rest = {next(free): path for path in paths if path not in given.values()}
  return dict(sorted((given | rest).items()))


def _notebook_names() -> tuple[str, ...]:
  spec = importlib.util.spec_from_file_location("make", NOTEBOOKS / "make.py")
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.NAMES


# The keys of the command.

_KEYS = """\
# Configuration keys

This page lists the keys of `tunix train`. A key is an argument
(`--training.max_steps=500`), a line of a file, or a keyword of the functions in Python
(`tunix.sft(..., max_steps=500)`):

```yaml
training:
  max_steps: 500
```

Each key has its type and its default. `null` means "not set". If only some jobs (or
algorithms) have a key, the text begins with their names. A key that is marked *free on
resume* may change when a run continues in its folder. Every other key must keep its
value. `tunix train --help --job=dpo` prints the keys of one job, and
[the command](../../docs/guides/command.md) explains files, arguments and their order.
"""


def keys() -> str:
  """Returns the page of the configuration keys."""
  lines, free = [_KEYS, "## General keys", ""], False
  for line in reference.listing():
    dotted = ".".join(line.path)
    if line.is_section:
      free = line.may_change
      lines += [f"## `{dotted}`", "", escaped(line.meaning), ""]
      continue
    free = free and len(line.path) > 1
    facts = [f"`{line.type}`", f"default `{yaml_text.inline(line.value)}`"]
    facts += ["*free on resume*"] * (free or line.may_change)
    # The meaning of a key with fixed values repeats them, for YAML; the type has them.
    meaning = line.meaning.removesuffix(f" ({line.type.replace('|', ', ')})")
    lines += [
      f"`{dotted}`{{#{dotted.replace('.', '-')}}}",
      f": {', '.join(facts)}",
      "",
      f"  {escaped(meaning)}",
      "",
    ]
  return "\n".join(lines)


def escaped(text: str) -> str:
  """Returns plain text as Markdown that shows the same characters."""
  return _MARKUP.sub(r"\\\1", text)


# Notebooks.


def tutorials(notebooks: list[pathlib.Path]) -> str:
  """Returns the list of the tutorials: number, title and aims of each."""
  lines = [
    "# Tutorials",
    "",
    "Each tutorial is a notebook with the outputs of its last run. The notebooks run",
    "on a laptop's CPU and need `pip install '.[notebooks]'`. No notebook needs the",
    "results of another one.",
    "",
  ]
  for number, path in enumerate(notebooks, 1):
    _, title, text = heading(path)
    first, _, rest = text.partition("\n\n")
    aims = rest.partition("\n\n")[0] if rest.startswith("- ") else ""
    lines += [f"## {number}. [{title}](notebooks/{path.name})", "", first, "", aims, ""]
  return "\n".join(lines)


def heading(path: pathlib.Path) -> tuple[int | None, str, str]:
  """Returns the number and the title of a notebook, and the text below the title."""
  first = json.loads(path.read_text())["cells"][0]["source"]
  line, _, text = "".join(first).partition("\n")
  found = re.fullmatch(r"# (?:(\d+)\. )?(.*)", line)
  assert found is not None, f"{path} begins with {line!r}; expected a title"
  return int(found[1]) if found[1] else None, found[2], text.strip()


def notebook(path: pathlib.Path, number: int) -> str:
  """Returns a notebook as Markdown, with the outputs that are stored in it."""
  _, title, _ = heading(path)
  lines = []
  for cell in json.loads(path.read_text())["cells"]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
      lines += [text, ""]
    elif text.strip():
      lines += [fenced(text, "python"), ""]
      for output in cell["outputs"]:
        lines += [*shown(output), ""]
  page = f"# {number}. {title}\n" + "\n".join(lines).partition("\n")[2]
  return f"{page}\n---\n\nDownload the notebook: {download(path)}.\n"


def download(path: pathlib.Path) -> str:
  """Returns a link that downloads a file of the repository."""
  name = path.relative_to(ROOT)
  return f"{{download}}`{name} </../{name}>`"


def shown(output: dict) -> Iterator[str]:
  """Yields the Markdown of one output: a picture, a table or text."""
  data = output.get("data", {})
  if "image/png" in data:
    picture = "".join(data["image/png"]).replace("\n", "")
    yield f"![The plot of the cell above](data:image/png;base64,{picture})"
  elif "text/html" in data:
    html = "".join(data["text/html"])
    yield fenced(html, "{raw} html")
  else:
    kept = output.get("text") or data.get("text/plain") or output.get("traceback") or ""
    text = _ANSI.sub("", "".join(kept)).rstrip()
    if text:
      yield f":::{{container}} output\n{fenced(text, 'text')}\n:::"


def fenced(text: str, kind: str) -> str:
  """Returns a code block whose fence is longer than every fence inside the text."""
  longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
  fence = "`" * (longest + 1)
  return f"{fence}{kind}\n{text.rstrip()}\n{fence}"


# Examples and recipes.


def gallery(readme: pathlib.Path, scripts: list[pathlib.Path]) -> str:
  """Returns examples/README.md with links to the pages of the scripts."""
  names = {script.name for script in scripts}
  # Names in backticks become links; a link that the README has stays.
  return re.sub(
    r"(?<!\[)`(\w+\.py)`(?!\])",
    lambda m: f"[`{m[1]}`]({m[1]})" if m[1] in names else m[0],
    readme.read_text(),
  )


def source(path: pathlib.Path) -> str:
  """Returns the page of a script or a recipe."""
  kind = "python" if path.suffix == ".py" else "yaml"
  return (
    f"# {path.stem if kind == 'yaml' else path.name}\n\n"
    f"Download: {download(path)}.\n\n{fenced(path.read_text(), kind)}\n"
  )
