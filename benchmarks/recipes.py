"""Plans the recipes of examples/recipes, and writes docs/recipes.md.

    python benchmarks/recipes.py [NAME ...]

plans the named recipes, or all of them, with the command in their first lines. A plan
takes one or two minutes and needs the package libtpu, but no TPU. docs/recipes.json
keeps the figures with their date and versions.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RECIPES = ROOT / "examples" / "recipes"
FIGURES = ROOT / "docs" / "recipes.json"
PAGE = ROOT / "docs" / "recipes.md"
_COMMAND = re.compile(r"#   tunix plan (\S+) --topology (\S+)\n")
_VERSIONS = ("jax", "libtpu")
_GIB = 2.0**30

_HEAD = """\
# Recipes

A recipe is a configuration file of `tunix train` for one model and certain chips. Start
from the recipe that is nearest to your run, and override its keys:

```console
tunix train examples/recipes/llama3p1_8b_sft_lora.yaml \\
  --data.train=mine.jsonl --output_dir=mine
```

Before you have the chips, `--dry-run` checks data, settings and reward functions, and
`tunix plan` compiles the run for the chips ([planning](guides/planning.md)). `--tiny`
runs two steps on this machine, with the smallest model of the family, saved and loaded
as a checkpoint, short rows and eight simulated devices. All other settings stay.

```console
tunix train examples/recipes/llama3p1_8b_sft_lora.yaml --tiny --data.train=mine.jsonl
```

The figures are planned, not measured. The peak is the TPU compiler's memory plan of one
device, and the time is a lower bound for these chips
([planning](guides/planning.md#what-the-figures-mean) describes what counts).
*tokens/s* are those of one device, padding included; in RL prompts and completions
together. `python benchmarks/recipes.py` made the table. No recipe has run on the chips
that it names. The tests run each with `--tiny`.

"""
_TABLE = """\
| recipe | chips | peak of a device | step at least | tokens/s at most | MFU at most |
| --- | --- | --- | --- | --- | --- |
"""


def main(names: list[str]) -> None:
  """Plans recipes, stores the figures, and writes the page."""
  figures = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
  files = {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}
  for name in names or files:
    figures[name] = plan(files[name])
    print(f"{name}: {figures[name]}", flush=True)
    kept = {key: figures[key] for key in files if key in figures}
    FIGURES.write_text(json.dumps(kept, indent=2) + "\n")
  PAGE.write_text(page(files, figures))


def plan(file: pathlib.Path) -> dict[str, Any]:
  """Returns the figures of `tunix plan` for a recipe."""
  command = [sys.executable, "-m", "tunix.cli.main", "plan", str(file)]
  command += ["--topology", topology(file), "--json"]
  done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
  if not done.stdout.startswith("{"):
    raise RuntimeError(
      f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()}"
    )
  estimate = json.loads(done.stdout)
  names = ("memory_bytes", "peak_bytes", "fits", "step_seconds", "tokens_per_second")
  return {
    **{name: estimate[name] for name in (*names, "mfu", "devices")},
    "programs": {p["name"]: p["peak_bytes"] for p in estimate["programs"]},
    "date": datetime.date.today().isoformat(),
    **{name: importlib.metadata.version(name) for name in _VERSIONS},
  }


def topology(file: pathlib.Path) -> str:
  """Returns the topology that a recipe is for."""
  command = _COMMAND.search(file.read_text())
  if command is None:
    raise ValueError(f"{file}: expected a line '#   tunix plan FILE --topology NAME'")
  return command[2]


def page(files: dict[str, pathlib.Path], figures: dict[str, Any]) -> str:
  """Returns the text of docs/recipes.md."""
  lines, notes = [], []
  for name, file in files.items():
    link = f"[{name}]({_link(file)})"
    lines.append(f"| {link} | {topology(file)} | {_row(figures.get(name))} |")
    about = re.sub(r"\n?# ", " ", file.read_text().partition("\n#\n")[0]).strip()
    notes.append(f"- `{name}`: {about}")
  made = sorted({_made(of) for of in figures.values()})
  parts = ["\n".join(lines), "\n".join(notes), "; ".join(made)]
  return f"{_HEAD}{_TABLE}" + "\n\n".join(parts) + ".\n"


def _link(file: pathlib.Path) -> str:
  return f"../{file.relative_to(ROOT)}"


def _row(of: dict[str, Any] | None) -> str:
  if of is None:
    return "not planned | | | "
  largest = max(of["programs"], key=of["programs"].__getitem__)
  peak = f"{of['peak_bytes'] / _GIB:.2f} of {of['memory_bytes'] / _GIB:.2f} GiB"
  cells = [
    f"{peak} ({largest}){'' if of['fits'] else ', does not fit'}",
    _or_unknown(of["step_seconds"], "{:.2f} s"),
    _or_unknown(of["tokens_per_second"], "{:,.0f}"),
    _or_unknown(of["mfu"], "{:.0%}"),
  ]
  return " | ".join(cells)


def _or_unknown(value: float | None, form: str) -> str:
  return "?" if value is None else form.format(value)


def _made(of: dict[str, Any]) -> str:
  return ", ".join([of["date"], *(f"{name} {of[name]}" for name in _VERSIONS)])


if __name__ == "__main__":
  main(sys.argv[1:])
