"""The notebooks' sources run at tiny size, and the notebooks are made of them."""

import functools
import json
import re

import jax
import numpy as np
import pytest

from tests.examples import loading
from tests.models.gguf import ggufs, tokenizer_test
from tunix.examples import sums

make = loading.example("notebooks.make")
FOLDER = loading.EXAMPLES / "notebooks"
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.fixture(scope="module")
def shared_bases():
  """Notebooks whose base models have equal answers share them."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sums.Sums, "base", functools.cache(sums.Sums.base))
    yield


@pytest.fixture
def run(shared_bases):
  """Runs the cells of a notebook in a few steps; gives the names they leave behind."""
  from matplotlib import pyplot

  pyplot.switch_backend("agg")

  def run(name, steps=None, model=None):
    left = {"__name__": "__main__"}
    for cell in make.cells(name):
      if cell.kind == "code":
        # The test world has chosen its devices.
        text = re.sub(r"^jax\.config\.update.*$", "", cell.text, flags=re.M)
        if model is not None:
          text = text.replace("MODEL = download()", f"MODEL = HOME / {str(model)!r}")
        if steps is not None:
          text = re.sub(r"^STEPS = \d+", f"STEPS = {steps}", text, flags=re.M)
          text = re.sub(r"base_model\(\d+\)", f"base_model({steps})", text)
          text = re.sub(r"base\(steps=\d+", f"base(steps={steps}", text)
          text = re.sub(
            r"^settings = Settings\(\)", "settings = TINY", text, flags=re.M
          )
        exec(compile(text, f"<{name}>", "exec"), left)
    return left

  # Cells set a mesh. An empty one must not stay set either: a program that was compiled
  # without any in another thread would be compiled again.
  with jax.set_mesh(jax.sharding.get_mesh()):
    yield run
  pyplot.close("all")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix, and `with mesh:`
@pytest.mark.parametrize("name", [name for name in make.NAMES if name != "laptop"])
def test_every_cell_runs(name, run):
  assert run(name, steps=4)


@pytest.mark.long  # CI has reasoning-gym after the quick tests
def test_every_cell_for_a_file_runs(run, tmp_path, monkeypatch):
  pytest.importorskip("reasoning_gym")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  made = tokenizer_test.trained("llama-bpe")
  rows = made.get_vocab_size()
  keys = tokenizer_test.keys_of(made, rows=rows, chat_template=TEMPLATE)
  sizes = {"vocab_size": rows, "max_position_embeddings": 1024}
  hf, tensors = ggufs.source("llama3p1", **sizes)
  for name in {"model.embed_tokens.weight", "lm_head.weight"} & {*tensors}:
    shape = rows, tensors[name].shape[1]
    tensors[name] = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  file = ggufs.write(tmp_path / "tiny.gguf", hf, tensors, **keys)
  left = run("laptop", steps=4, model=file)
  steps, rewards = left["trained"].history["train/rewards/score/mean"]
  assert len(steps) == len(rewards) == 4
  assert len(left["answers"](left["HOME"] / "gguf", left["test"][:2], tokens=2)) == 2


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


def test_no_notebook_has_a_placeholder():
  """The project has no public address: no badge, and no address to install from."""
  for path in (loading.EXAMPLES.parent / "pyproject.toml", *FOLDER.iterdir()):
    if path.is_file():
      found = re.findall(r"OWNER|git\+http|colab-badge|\{\{\w+\}\}", path.read_text())
      assert not found, path.name


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
