"""Plans the recipes of examples/recipes, and writes docs/recipes.md.

    python benchmarks/recipes.py [--gpus] [NAME ...]

plans the named recipes, or all of them, with the command in their first lines. A plan
takes one or two minutes and needs the package libtpu, but no TPU. With --gpus it plans
`ON_GPUS`, or those that are named, for H100s; this needs tunix[plan-gpu], but no GPU.
docs/recipes.json keeps the figures with their date and versions.
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
_VERSIONS = ("jax", "libtpu", "jax-cuda13-plugin")
ON_GPUS = (
  "gemma3_1b_ppo",
  "gemma3_4b_dpo",
  "granite4_micro_sft_full",
  "llama3p1_8b_sft_lora",
  "llama3p2_1b_distill",
  "qwen2p5_0p5b_grpo",
  "qwen3_4b_reward_lora",
  "smollm3_3b_dpo_lora",
)
GPUS = ("h100:1", "h100:8")
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


# Of `python -m benchmarks.image_plans`, which takes half an hour.
_IMAGES = """\
## With images

Two recipes with their vision towers and with images in every row. Rows with images are
not packed. The FLOPs behind the times are those of the text model.
`python -m benchmarks.image_plans` planned them (2026-11-29, jax 0.10.2, libtpu
0.0.42.1):

| recipe | chips | image tokens of a row | peak of a device | step at least |
| --- | --- | --- | --- | --- |
| gemma4_e4b_sft_lora | v5e:2x4 | 560 (two) | 7.52 of 15.75 GiB | 1.57 s |
| qwen3p5_27b_sft_lora | v5e:4x4 | 1,024 (one) | 12.70 of 15.75 GiB | 3.95 s |"""
_GPU_HEAD = """\
## On NVIDIA GPUs

Some recipes on one H100 and on eight of one host (`tunix plan RECIPE --topology h100:8
--mesh fsdp=8`), with their own batches. JAX takes three quarters of the 79.11 GiB of a
GPU. No GPU took part: see what such a plan
[can tell](guides/planning.md#plans-for-gpus). `python benchmarks/recipes.py --gpus`
made the table.

"""


def main(words: list[str]) -> None:
  """Plans recipes, stores the figures, and writes the page."""
  figures = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
  files = {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}
  names = [word for word in words if word != "--gpus"]
  on_gpus = len(names) < len(words)
  for name in names or (ON_GPUS if on_gpus else files):
    kept = figures.setdefault(name, {})
    for where in GPUS if on_gpus else (topology(files[name]),):
      made = plan(files[name], where, ["--mesh=fsdp=-1"] if on_gpus else [])
      if on_gpus:
        kept.setdefault("gpus", {})[where] = made
      else:
        kept |= made
      print(f"{name} on {where}: {made}", flush=True)
      ordered = {key: figures[key] for key in files if key in figures}
      FIGURES.write_text(json.dumps(ordered, indent=2) + "\n")
  PAGE.write_text(page(files, figures))


def plan(file: pathlib.Path, where: str, words: list[str]) -> dict[str, Any]:
  """Returns the figures of `tunix plan` for a recipe on a topology."""
  command = [sys.executable, "-m", "tunix.cli.main", "plan", str(file), *words]
  command += ["--topology", where, "--json"]
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
    **_versions(),
  }


def _versions() -> dict[str, str]:
  """Returns the versions of the packages that plan, as far as they are installed."""
  installed = {one.metadata["Name"]: one for one in importlib.metadata.distributions()}
  return {name: installed[name].version for name in _VERSIONS if name in installed}


def topology(file: pathlib.Path) -> str:
  """Returns the topology that a recipe is for."""
  command = _COMMAND.search(file.read_text())
  if command is None:
    raise ValueError(f"{file}: expected a line '#   tunix plan FILE --topology NAME'")
  return command[2]


def page(files: dict[str, pathlib.Path], figures: dict[str, Any]) -> str:
  """Returns the text of docs/recipes.md."""
  lines, notes, gpus = [], [], []
  made = {_made(of) for of in figures.values()}
  for name, file in files.items():
    link = f"[{name}]({_link(file)})"
    lines.append(f"| {link} | {topology(file)} | {_row(figures.get(name))} |")
    for where, of in (figures.get(name) or {}).get("gpus", {}).items():
      gpus.append(f"| {link} | {where} | {_row(of)} |")
      made.add(_made(of))
    about = re.sub(r"\n?# ", " ", file.read_text().partition("\n#\n")[0]).strip()
    notes.append(f"- `{name}`: {about}")
  on_gpus = f"{_GPU_HEAD}{_TABLE}" + "\n".join(gpus)
  parts = ["\n".join(lines), "\n".join(notes), _IMAGES, on_gpus]
  parts.append("; ".join(sorted(made)))
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
  versions = (f"{name} {of[name]}" for name in _VERSIONS if name in of)
  return ", ".join([of["date"], *versions])


if __name__ == "__main__":
  main(sys.argv[1:])
