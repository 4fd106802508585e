"""examples/recipes: they load, say how they are planned, and run at a small size."""

import json
import re

import pytest

from tests.cli import runs
from tunix.cli import config as config_lib, main as cli
from tunix.cli.make import loading
from tunix.cli.run import tiny
from tunix.cli.settings import mesh as mesh_axes
from tunix.data import render
from tunix.data.records import SFT
from tunix.models import families, tiny as tiny_models

RECIPES = sorted((runs.ROOT / "examples" / "recipes").glob("*.yaml"))
# Of every kind of job one, and what differs most from it; the others are slow.
IN_CI = (
  "gemma2_2b_qlora",
  "gemma3_4b_dpo",
  "llama3p2_1b_distill",
  "qwen3_30b_a3b_grpo",
  "qwen3p5_35b_a3b_sft_lora",
)
_COMMAND = re.compile(r"#   tunix plan (\S+) --topology (\S+)\n#   tunix train (\S+)\n")
_RECORD = {
  "messages": [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
  ]
}
_FILES = {
  "train.jsonl": _RECORD,
  "pairs.jsonl": {"prompt": "What is 2 + 3?", "chosen": "5", "rejected": "six"},
  "prompts.jsonl": {"prompt": "What is 2 + 3?", "answer": "5"},
}


def devices_of(topology):
  """How many "v5e:4x4" has."""
  total = 1
  for size in topology.partition(":")[2].split("x"):
    total *= int(size)
  return total


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_each_says_how_it_is_planned(file):
  command = _COMMAND.search(file.read_text())
  assert command is not None
  name = str(file.relative_to(runs.ROOT))
  assert command[1] == command[3] == name
  config = config_lib.load([str(file)])
  assert config.output_dir == file.stem
  assert config.training.max_steps is not None
  chips = devices_of(command[2])
  sizes = 1
  for size in config.mesh.values():
    sizes *= size
  assert sizes == chips
  mesh_axes.check(config.mesh, config.training.batch_rows)
  assert loading.ModelLoader(config).sizes().num_layers > 2  # a preset is like it


def test_the_page_has_every_recipe():
  page = (runs.ROOT / "docs" / "recipes.md").read_text()
  for file in RECIPES:
    assert f"[{file.stem}]" in page


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
  ("name", "topology", "programs"),
  [
    ("gemma2_2b_qlora", "cpu:1", {"train step", "evaluation"}),
    (
      "qwen2p5_0p5b_grpo",
      "cpu:8",
      {"weight stamp", "unstack", "prefill", "decode", "actor update"},
    ),
  ],
)
def test_small_ones_compile_at_their_size(name, topology, programs, capsys):
  (file,) = (file for file in RECIPES if file.stem == name)
  assert cli.main(["plan", str(file), "--topology", topology, "--json"]) == 0
  said = json.loads(capsys.readouterr().out)
  assert {program["name"] for program in said["programs"]} == programs
  assert said["mesh"] == config_lib.load([str(file)]).mesh
  step = said["programs"][0 if "train step" in programs else -1]
  # It is no tiny model. XLA counts the body of a loop over layers once on a CPU, with
  # jax 0.12.
  assert step["flops"] > 1e12 and said["model_flops"] > 2e12


@pytest.mark.slow
@pytest.mark.parametrize(
  "file",
  [pytest.param(f, marks=[pytest.mark.ci] * (f.stem in IN_CI)) for f in RECIPES],
  ids=lambda file: file.stem,
)
def test_each_runs_tiny(file, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  for name, record in _FILES.items():
    (tmp_path / name).write_text((json.dumps(record) + "\n") * 40)
  assert cli.main(["train", str(file), "--tiny", "--logging.tensorboard=false"]) == 0
  said = capsys.readouterr().out
  assert "done: 2 steps" in said
  config = config_lib.load([str(file)])
  folder = tmp_path / f"{file.stem}-tiny"
  made = config_lib.load([str(folder / "config.yaml")])
  # What the recipe is about stayed as it is.
  assert (made.job, made.lora is None) == (config.job, config.lora is None)
  assert made.model.quantize == config.model.quantize
  assert made.model.dtype == config.model.dtype
  assert set(made.mesh) == set(config.mesh)
  assert (folder / "export").is_dir() and not (tmp_path / file.stem).exists()


@pytest.mark.parametrize(
  "name", [n for f in families.FAMILIES.values() for n in list(f.presets)[:1]]
)
def test_the_smallest_of_a_family_keeps_what_makes_it(name):
  config = families.preset(name)[1]()
  small = tiny_models.shrink(config, 320)
  assert type(small) is type(config)
  assert small.num_layers == max(2, len({*(config.layer_types or ())}))
  assert small.vocab_size == 320
  assert len(small.kinds) == len(config.kinds)
  kept = (
    "norms",
    "activation",
    "qk_norm",
    "qkv_bias",
    "tie_embeddings",
    "final_softcap",
  )
  assert [getattr(small, k) for k in kept] == [getattr(config, k) for k in kept]
  assert (small.num_kv_heads < small.num_heads) == (
    config.num_kv_heads < config.num_heads
  )


@pytest.mark.parametrize(
  "mesh, devices, expected",
  [
    ({}, 8, {}),
    ({"fsdp": 16}, 8, {"fsdp": 8}),
    ({"fsdp": 256}, 1, {"fsdp": 1}),
    ({"fsdp": 16, "tp": 4}, 8, {"fsdp": 2, "tp": 4}),
    ({"dp": 2, "fsdp": -1}, 8, {"dp": 2, "fsdp": -1}),
    ({"fsdp": 4, "ep": 2}, 8, {"fsdp": 4, "ep": 2}),
    ({"fsdp": 1}, 8, {"fsdp": 8}),
    ({"tp": 2, "fsdp": 2}, 8, {"tp": 2, "fsdp": 4}),
    ({"tp": 2}, 8, {"tp": 2}),
  ],
)
def test_meshes_take_the_devices_there_are(mesh, devices, expected):
  assert tiny.fitted_mesh(mesh, devices) == expected


def test_tiny_needs_a_folder_and_a_model_that_is_known(tmp_path, capsys):
  words = ["train", "--tiny", "--model.name=qwen3_0p6b", "--data.train=x.jsonl"]
  assert cli.main(words) == 2
  assert "output_dir is not set" in capsys.readouterr().err
  monkey = [*words[:2], "--model.path=nobody", f"--output_dir={tmp_path / 'out'}"]
  assert cli.main(monkey) == 2
  assert "there is no folder nobody" in capsys.readouterr().err


def test_the_tokens_of_a_tiny_model_are_bytes(tmp_path):
  tiny.make_tokenizer().save(tmp_path)
  read = tiny.TokenizerAdapter.from_pretrained(tmp_path)
  assert read.vocab_size == 256 + 3
  assert read.decode(read.encode("Größe x")) == "Größe x"
  assert read.encode("<end>") == [read.eos_id()]
  assert len(read.encode("Größe")) == len("Größe".encode())
  assert "assistant" in read.apply_chat_template(
    [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
  )


def test_a_tiny_model_trains_the_calls_of_tools():
  call = {"function": {"name": "add", "arguments": {"a": 17}}}
  turns = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
  ]
  tokenizer = tiny.make_tokenizer()
  rendered = render.render_record({"messages": turns}, SFT, tokenizer)
  (ids,), (mask,) = rendered.completions, rendered.masks
  trained = tokenizer.decode(ids[mask == 1], skip_special_tokens=False)
  assert '"add"' in trained and "17" in trained and trained.endswith("<end>")
