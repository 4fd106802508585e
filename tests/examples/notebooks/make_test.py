"""The notebooks' sources run at tiny size, and the notebooks are made of them."""

import fnmatch
import glob
import importlib.util
import json
import re
import shutil
import subprocess
import types

import jax
import pytest

from tests.examples import loading

make = loading.example("notebooks.make")
FOLDER = loading.EXAMPLES / "notebooks"


@pytest.fixture
def run():
  """Runs the cells of a notebook in a few steps; gives the names they leave behind."""
  from matplotlib import pyplot

  pyplot.switch_backend("agg")
  mesh = jax.sharding.get_mesh()

  def run(name, steps=None):
    left = {"__name__": "__main__"}
    for cell in make.cells(name):
      if cell.kind == "code":
        # The test world has chosen its devices.
        text = re.sub(r"^jax\.config\.update.*$", "", cell.text, flags=re.M)
        if steps is not None:
          text = re.sub(r"^STEPS = \d+", f"STEPS = {steps}", text, flags=re.M)
          text = re.sub(r"base_model\(\d+\)", f"base_model({steps})", text)
          text = re.sub(r"base\(steps=\d+", f"base(steps={steps}", text)
          text = re.sub(
            r"^settings = Settings\(\)", "settings = TINY", text, flags=re.M
          )
        exec(compile(text, f"<{name}>", "exec"), left)
    return left

  yield run
  pyplot.close("all")
  jax.set_mesh(mesh)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix, and `with mesh:`
@pytest.mark.parametrize("name", make.NAMES)
def test_every_cell_runs(name, run):
  assert run(name, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_adapters_are_learnt(name, run):
  """Whether the others learn is seen in the notebooks."""
  assert run(name)["after"] > 0.8


def test_sources_are_cut_into_cells():
  kinds = [cell.kind for cell in make.cells("lora")]
  assert kinds[0] == "markdown" and "code" in kinds
  texts = [cell.text for cell in make.cells("lora")]
  assert any("TINY = True" in text.splitlines() for text in texts[:6])
  assert not any("# %%" in text for text in texts)


def test_badges_and_the_install_cell_name_the_repository(monkeypatch):
  monkeypatch.setattr(make, "repository", lambda: "https://github.com/me/mine")
  _, badges, install, *rest = [cell.text for cell in make.cells("lora")]
  file = "/blob/main/examples/notebooks/lora.ipynb)"
  assert "colab.research.google.com/github/me/mine" + file in badges
  assert "?src=https://github.com/me/mine" + file in badges
  assert 'REPOSITORY = "https://github.com/me/mine"' in install.splitlines()
  assert not any("{{" in text for text in (badges, install, *rest))


@pytest.mark.parametrize(
  ("programs", "files", "cuda", "extras"),
  [
    (["nvidia-smi"], [], "12.4", "notebooks,cuda12"),
    (["nvidia-smi"], [], "13.0", "notebooks,cuda"),
    ([], ["/dev/accel0"], "", "notebooks,tpu"),
    ([], ["/dev/vfio/0"], "", "notebooks,tpu"),
    ([], [], "", "notebooks"),
  ],
)
def test_the_install_cell_takes_the_machines_jax(
  monkeypatch, programs, files, cuda, extras
):
  [code] = [cell.text for cell in make.cells("install") if cell.kind == "code"]
  calls = []

  def run(command, **_):
    calls.append(command)
    return types.SimpleNamespace(stdout=f"| CUDA Version: {cuda} |")

  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  found = lambda name: name if name in programs else None
  monkeypatch.setattr(shutil, "which", found)
  monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(files, pattern))
  monkeypatch.setattr(subprocess, "run", run)
  exec(code, {})
  assert calls[-1][1:4] == ["-m", "pip", "install"]
  assert calls[-1][-1] == f"tunix[{extras}] @ git+{make.repository()}"
  monkeypatch.undo()
  assert exec(code, {"__name__": "again"}) is None  # tunix is there


def test_a_script_is_quoted_with_its_comments():
  text = make.quoted("minigpt", ["inside", "Settings"])
  assert text.startswith("def inside") and "\n\n\n@dataclasses.dataclass(" in text
  assert make.quoted("notebooks/start", ["TERMS"]).startswith("TERMS = ")


def test_progress_bars_are_kept_as_they_stood_last():
  text = "a:   0%|\ra:  50%|\n\x1b[Ab:   5%|\ra: 100%|\nTqdmWarning: none\nloss 1\n"
  assert make.last_states(text) == "a: 100%|\nb:   5%|\nloss 1\n"
  assert make.last_states("c: 1step [0]\rc: 2step [1]\n") == "c: 2step [1]\n"


@pytest.mark.parametrize("name", make.NAMES)
def test_a_notebook_is_its_source_executed(name):
  """Edited a source? python examples/notebooks/make.py NAME"""
  path = FOLDER / f"{name}.ipynb"
  assert path.stat().st_size < make.MAX_BYTES
  made = json.loads(path.read_text())
  cells = [
    make.Cell(cell["cell_type"], "".join(cell["source"])) for cell in made["cells"]
  ]
  assert cells == make.cells(name)
  outputs = [out for cell in made["cells"] for out in cell.get("outputs", [])]
  kinds = {out["output_type"] for out in outputs}
  assert "error" not in kinds and "stream" in kinds
  assert any("image/png" in out.get("data", {}) for out in outputs)
