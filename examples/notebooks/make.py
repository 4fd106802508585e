"""Makes the notebooks from their sources: python examples/notebooks/make.py [name ...]

A source is a script with cells, `# %%` and `# %% [markdown]`. The cell of install.py
replaces `# %% include install`. The definitions of `story` and `texts` in
examples/minigpt_text.py replace `# %% quote minigpt_text: story texts`. Each notebook
runs in a separate process and is written with its outputs. This needs
`pip install 'tunix[notebooks]'`; the tests run the cells without it.
"""

import ast
import os
import pathlib
import re
import sys
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
NAMES = (
  *("lora", "qlora", "dpo", "distill", "grpo", "ppo", "sharding"),
  *("minigpt", "tensor_parallel", "data_parallel", "images", "laptop"),
)
MAX_BYTES = 300_000
_BAR = re.compile(r"(.*?): +\d+(?:%\||step )")  # with a known end, or without
_NOISE = re.compile(r"TqdmWarning|from \.autonotebook|WARNING")


class Cell(NamedTuple):
  kind: str  # "code" or "markdown"
  text: str


def cells(name: str) -> list[Cell]:
  """Returns the cells of a source, with the cells that it includes.

  Raises:
    FileNotFoundError: the source, or a source that it includes, does not exist.
  """
  out = []
  text = (HERE / f"{name}.py").read_text()
  # Text before the first cell is a note.
  for part in re.split(r"^# %%", text, flags=re.M)[1:]:
    head, _, body = part.partition("\n")
    if head.startswith(" include "):
      out += cells(head.removeprefix(" include ").strip())
    elif head.startswith(" quote "):
      script, _, names = head.removeprefix(" quote ").partition(":")
      out.append(Cell("code", quoted(script, names.split())))
    elif head.strip() == "[markdown]":
      lines = [line.removeprefix("#").removeprefix(" ") for line in body.splitlines()]
      out.append(Cell("markdown", "\n".join(lines).strip()))
    else:
      out.append(Cell("code", body.strip()))
  return out


def quoted(script: str, names: list[str]) -> str:
  """Returns definitions of an example, in order, with the comments directly above.

  Raises:
    KeyError: the script does not define a name.
  """
  text = (HERE.parent / f"{script}.py").read_text()
  lines, pieces = text.splitlines(), {}
  for node in ast.parse(text).body:
    targets = [node, *getattr(node, "targets", ())]
    first = min(x.lineno for x in (node, *getattr(node, "decorator_list", ())))
    while re.match(r"#(?! %%)", lines[first - 2]):
      first -= 1
    piece = "\n".join(lines[first - 1 : node.end_lineno])
    for target in targets:
      pieces[getattr(target, "name", getattr(target, "id", None))] = piece
  return "\n\n\n".join(pieces[name] for name in names)


def notebook(name: str):
  """Returns the notebook of a source, without outputs."""
  from nbformat import v4

  made = v4.new_notebook()
  made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
  for number, cell in enumerate(cells(name)):
    new = v4.new_code_cell if cell.kind == "code" else v4.new_markdown_cell
    # A number instead of a random id, so that a new version differs only in its
    # outputs.
    made.cells.append(new(cell.text, id=f"cell-{number}"))
  return made


def execute(made) -> None:
  """Runs all cells and keeps their outputs in a readable form.

  Raises:
    CellExecutionError: a cell failed.
  """
  from nbclient import NotebookClient

  # The notebooks set the number of their devices.
  os.environ.pop("XLA_FLAGS", None)
  NotebookClient(made, timeout=1200, kernel_name="python3").execute()
  for cell in made.cells:
    cell.metadata.pop("execution", None)  # times of day
    if cell.cell_type == "code":
      cell.outputs = tidy(cell.outputs)


def tidy(outputs: list) -> list:
  """Joins streams, keeps the last state of progress bars, drops foreign warnings."""
  out: list = []
  for output in outputs:
    if output.output_type == "stream" and out and out[-1].get("name") == output.name:
      out[-1].text += output.text
    else:
      out.append(output)
  for output in out:
    if output.output_type == "stream":
      output.text = last_states(output.text)
  return [x for x in out if x.output_type != "stream" or x.text.strip()]


def last_states(text: str) -> str:
  """Returns the lines of a stream, with only the last line of each progress bar."""
  lines, bars = list[str](), dict[str, int]()
  for line in re.split(r"[\r\n]+", text.replace("\x1b[A", "")):  # A: a line up
    if not line.strip() or _NOISE.search(line):
      continue
    if (bar := _BAR.match(line)) is None:
      lines.append(line)
    elif (place := bars.setdefault(bar[1], len(lines))) < len(lines):
      lines[place] = line
    else:
      lines.append(line)
  return "".join(f"{line}\n" for line in lines)


def write(name: str) -> pathlib.Path:
  """Makes, runs and writes one notebook.

  Raises:
    ValueError: the notebook has more than MAX_BYTES bytes.
  """
  import nbformat

  made = notebook(name)
  execute(made)
  text = nbformat.writes(made)
  if len(text) > MAX_BYTES:
    raise ValueError(
      f"{name}.ipynb has {len(text):,} bytes; expected at most {MAX_BYTES:,}. Print "
      "less, or make the plots smaller"
    )
  path = HERE / f"{name}.ipynb"
  path.write_text(text + "\n")
  return path


if __name__ == "__main__":
  for each in sys.argv[1:] or NAMES:
    print(write(each), flush=True)
