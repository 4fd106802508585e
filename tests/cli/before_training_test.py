"""`tunix init`, `train --dry-run`, `--print-config`, `--help SECTION`, `completion`."""

import json
import re
import subprocess
import types

import jax
import pytest
import yaml

from tests import optimizers, toys
from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.commands import init as init_main
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import loading
from tunix.cli.run import about, dry_run
from tunix.cli.run.prepare import trained_of
from tunix.cli.run.settle import settle_values
from tunix.models import automodel
from tunix.models.automodel import AutoModel

QUESTION = {"prompt": "Two and two?", "answer": "4"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
COMPLETION = {"prompt": "a", "completion": "b"}
RECORDS = {
  "sft": {"prompt": "a", "response": "b"},
  "distill": {"prompt": "a", "response": "b"},
  "grpo": QUESTION,
  "ppo": QUESTION,
}


@pytest.mark.parametrize("job", JOBS)
def test_what_init_writes_passes_a_dry_run(job, model, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(AutoModel, "from_pretrained", None)  # no weights are needed
  file, data = tmp_path / "mine.yaml", tmp_path / "data.jsonl"
  assert runs.tunix("init", job, "--output", file) == 0
  text = file.read_text()
  assert runs.tunix("init", job, "--output", file) == 2
  assert file.read_text() == text
  labelled = [COMPLETION | {"label": good} for good in (True, False)]
  records = labelled if job == "kto" else [RECORDS.get(job, PAIR)] * 2
  data.write_text("".join(json.dumps(record) + "\n" for record in records * 4))
  keys = {"model__path": model, "data__train": data, "output_dir": tmp_path / "out"}
  if job == "distill":
    keys["distill__teacher"] = model
  if job in ("grpo", "ppo"):
    keys["rollout__max_tokens_to_generate"] = 8
  assert runs.tunix("train", "--dry-run", file, *runs.arguments(**keys)) == 0
  said = capsys.readouterr().out
  assert "LoRA on:" in said
  assert "memory: weights " in said
  assert "would begin a new run" in said
  if job == "grpo":
    assert "rewards of the completion '4': exact_match 1" in said
  assert not (tmp_path / "out").exists()


def test_memory_counts_modules_that_are_trained_whole(monkeypatch):
  monkeypatch.setattr(dry_run, "_readable", str)  # bytes
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))

  def sizes(*words):
    config = config_lib.load(["--model.name=qwen3_8b", "--lora.rank=2", *words])
    model = loading.ModelLoader(config, mesh, of_shapes=True).model()
    said = dry_run._memory(trained_of(config, model), model, optimizers.adam(1))
    return [int(x) for x in re.findall(r"(?:gradients|optimizer) (\d+)", said)]

  bare, whole = sizes(), sizes("--lora.modules_to_save=[lm_head]")
  head = 4096 * 151_936 * 4
  assert [b - a for a, b in zip(bare, whole)] == [head, 2 * head]


@pytest.mark.parametrize(
  ("keys", "note"),
  [
    ({}, None),
    ({"lora.rank": 4, "training.learning_rate": 2e-3}, None),
    (
      {"training.learning_rate": 2e-3},
      "0.002; expected for all weights in the job sft: 5e-6",
    ),
    ({"job": "dpo", "lora.rank": 4}, None),
    (
      {"job": "dpo", "training.learning_rate": 1e-4},
      "0.0001; expected for all weights in the job dpo: ",
    ),
    (
      {"lora.rank": 4, "training.learning_rate": 1e-8},
      "1e-08; expected for adapters in the job sft: ",
    ),
    # A tiny model takes larger rates.
    ({"model.name": "tiny", "training.learning_rate": 4e-3}, None),
  ],
)
def test_a_rate_far_from_the_usual_ones_is_noted(keys, note):
  is_tiny = keys.pop("model.name", None)
  words = [f"--{key}={value}" for key, value in keys.items()]
  config = settle_values(config_lib.load([*words, "--model.name=qwen3_0p6b"]), 10)
  report = types.SimpleNamespace(
    scanned=9, is_whole=True, records=9, kept=9, blank=0, unknown=0
  )
  run = types.SimpleNamespace(
    config=config,
    data=types.SimpleNamespace(reports={"train": report}),
    row_length=("data.max_length", 8),
  )
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
  sizes = toys.config() if is_tiny else loading.ModelLoader(config).sizes()
  notes = list(about._unusual(run, automodel.of_shapes(sizes, mesh)))
  assert len(notes) == (note is not None)
  assert all(f"training.learning_rate is {note}" in x for x in notes), notes


def test_init_sets_keys(tmp_path, capsys):
  file = tmp_path / "mine.yaml"
  words = ["init", "sft", f"--output={file}", "--lora.rank=null"]
  keys = ["--optimizer.args.b2=0.5", "--data.packing=true", "--training.max_steps", "7"]
  assert runs.tunix(*words, *keys) == 0
  set_keys = yaml.safe_load(file.read_text())
  assert set_keys["optimizer"] == {"args": {"b2": 0.5}}
  assert set_keys["data"]["packing"] is True and "lora" not in set_keys
  assert set_keys["training"]["max_steps"] == 7
  assert "num_epochs" not in set_keys["data"]  # it could end the run before
  assert set_keys["training"]["global_batch_size"] == 8  # not given: the first value
  for key in ("--training.max_steps=many", "--traning.max_steps=1"):
    assert runs.tunix("init", "sft", f"--output={tmp_path / 'other.yaml'}", key) == 2
    assert "training.max_steps" in capsys.readouterr().err
  assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize("job", ["sft", "distill", "dpo", "orpo", "reward", "kto"])
def test_init_writes_the_epochs_that_the_page_advises(job):
  page = (runs.ROOT / "docs" / "trainers" / f"{job}.md").read_text()
  [low, high] = re.findall(r"`data.num_epochs` \| (\d)(?: to (\d))?", page)[0]
  written = yaml.safe_load(init_main.configuration(job, "a.yaml", has_all=False))
  assert int(low) <= written["data"]["num_epochs"] <= int(high or low)
  assert "max_steps" not in written["training"]


@pytest.mark.parametrize("job", JOBS)
def test_a_batch_of_one_is_singular(job):
  config = config_lib.load([f"--job={job}", "--training.global_batch_size=1"])
  assert not re.search(r"\b1 [a-z-]+s\b", JOBS[job].batch(config))


@pytest.mark.parametrize("job", JOBS)
def test_init_writes_few_keys_or_all(job, tmp_path):
  few, whole = tmp_path / "few.yaml", tmp_path / "all.yaml"
  assert runs.tunix("init", job, "--output", few) == 0
  assert runs.tunix("init", job, "--output", whole, "--all") == 0
  assert yaml.safe_load(few.read_text()) == yaml.safe_load(whole.read_text())
  lines = few.read_text().splitlines()
  keys = [line for line in lines if line and not line.lstrip().startswith("#")]
  assert len(keys) <= 21  # with the sections around them
  assert len(whole.read_text().splitlines()) > 4 * len(lines)
  assert f"tunix init {job} --all" in few.read_text()


def test_init_has_every_key_of_the_job():
  text = init_main.configuration("grpo", "mine.yaml")
  lines = [line.lstrip("# ") for line in text.splitlines()]
  for key in config_lib.known_keys():
    owners = [job for job, _, _ in config_lib.known_keys()[key]]
    if "grpo" in owners and key.count(".") < 2:
      assert any(x.startswith(f"{key.rpartition('.')[2]}:") for x in lines), key


def test_a_dry_run_calls_the_reward_functions(model, tmp_path, capsys):
  (tmp_path / "falls.py").write_text("def f(completions):\n  return completions[9]\n")
  (tmp_path / "data.jsonl").write_text(json.dumps(QUESTION) + "\n")
  keys = {
    "job": "grpo",
    "model__path": model,
    "data__train": tmp_path / "data.jsonl",
    "reward__functions": f"{tmp_path / 'falls.py'}:f",
    "rollout__max_tokens_to_generate": 8,
    "output_dir": tmp_path / "out",
  }
  assert runs.tunix("train", "--dry-run", *runs.arguments(**keys)) == 1
  error = capsys.readouterr().err
  assert "reward.functions fail on two rows of the first record" in error
  assert error.count("\n") == 1
  # One value for a batch of any size is right for one row only.
  (tmp_path / "falls.py").write_text("def f(completions):\n  return [1.0]\n")
  assert runs.tunix("train", "--dry-run", *runs.arguments(**keys)) == 1
  assert "2" in capsys.readouterr().err


def test_a_dry_run_warns_of_unusual_values(settings, tmp_path, capsys):
  records = [{"prompt": "a", "response": text} for text in ("", "b", "c")]
  file = tmp_path / "data.jsonl"
  file.write_text("".join(json.dumps(record) + "\n" for record in records))
  keys = settings | {"data__train": file, "training__learning_rate": "1e9"}
  keys |= {"lora__rank": 64, "output_dir": tmp_path / "out"}
  assert runs.tunix("train", "--dry-run", *runs.arguments(**keys)) == 0
  said = capsys.readouterr().out
  for note in (
    "training.learning_rate is 1e+09",
    "lora.rank is 64, above the 32 dimensions",
    "training.global_batch_size is 4, and the train data has only 3 records",
    "the train data has 1 record with an empty answer",
    f"everything would be written to {tmp_path / 'out'}",
  ):
    assert note in said
  keys["output_dir"] = "/proc/x"
  assert runs.tunix("train", "--dry-run", *runs.arguments(**keys)) == 2
  error = capsys.readouterr().err
  assert "output_dir is '/proc/x', and /proc cannot be written" in error


def test_print_config_says_where_values_come_from(tmp_path, capsys):
  file = tmp_path / "mine.yaml"
  file.write_text("training:\n  # how long\n  max_steps: 3\ndataset_name: a.jsonl\n")
  argv = [file, "--optimizer.args.b2=0.5", "--print-config"]
  assert runs.tunix("train", *argv) == 0
  text = capsys.readouterr().out
  assert f"  max_steps: 3  # {file}:3\n" in text
  assert f"  train: a.jsonl  # {file}:4\n" in text
  assert "# --optimizer.args.b2" in text
  assert "seed: 0  # default\n" in text
  again = config_lib.from_layers([("again", yaml.safe_load(text))])
  assert again == config_lib.load([str(word) for word in argv[:2]])


def test_help_of_a_section(capsys):
  assert runs.tunix("train", "--help", "reward", "--job=grpo") == 0
  text = capsys.readouterr().out
  assert "--reward.functions" in text
  assert "--training" not in text
  assert runs.tunix("train", "--help", "all") == 0
  assert "\ndistill:\n" in capsys.readouterr().out


def test_completions_know_commands_options_and_keys(tmp_path, capsys):
  for shell in ("zsh", "fish", "bash"):
    assert runs.tunix("completion", shell) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("training.max_steps", "quickstart", "top_p"))
  file = tmp_path / "tunix.sh"
  file.write_text(text)
  script = f"source {file}"
  for words in (
    "train --training.max_s",
    "qui",
    "train a.yaml --job gr",
    "eval --sh",
    "serve --tinker_max_ra",
  ):
    script += f"; COMP_WORDS=(tunix {words}); COMP_CWORD={len(words.split())}"
    script += '; COMPREPLY=(); _shtab_tunix; echo "${COMPREPLY[@]}"'
  done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
  assert done.stdout.split() == [
    "--training.max_steps",
    "quickstart",
    "grpo",
    "--show",
    "--tinker_max_rank",
  ]
