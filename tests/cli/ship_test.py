"""`tunix plan --ship`, and a run that loads what was shipped."""

import json

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.cli import runs
from tests.cli.train_preference_test import labelled, pairs
from tunix.sft.steps import shared_steps

MESH = {"mesh": "{fsdp: 4, tp: 2}", "training__global_batch_size": 8}
SHORT = {"rollout__max_prompt_length": 40, "rollout__max_tokens_to_generate": 4}
PAIRS = {
  "data__max_length": None,
  "preference__max_prompt_length": 32,
  "preference__max_response_length": 16,
}
RL = {
  **SHORT,
  "data__max_length": None,
  "reward__functions": "[exact_match]",
  "rl__bucketed_lengths": False,  # all widths are shipped
}
JOBS = {
  "sft": {"training__eval_every_n_steps": 1},
  "dpo": {**PAIRS, "lora__rank": 2},
  "kto": {**PAIRS, "lora__rank": 2},
  "distill": {**SHORT, "data__max_length": None, "distill__on_policy_fraction": 1},
  "grpo": {**RL, "algorithm__beta": 0.04},
  "ppo": {**RL, "model__task": None},
  # Without an axis that splits rows the engine samples, whose programs depend on what
  # was drawn before.
  "grpo_engine": {
    **RL,
    "mesh": "{tp: 8}",
    "rollout__max_prompt_length": 24,
    "rollout__max_tokens_to_generate": 40,
  },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("ship")
  questions = [{"prompt": f"What is {i} and {i}?", "answer": "5"} for i in range(16)]
  of_jobs = {"dpo": pairs(16), "kto": labelled(16)}
  for name in ("grpo", "grpo_engine", "ppo", "distill"):
    of_jobs[name] = questions
  for name, records in of_jobs.items():
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(lines)
  return folder


@pytest.fixture
def own_cache():
  """The cache of compiled programs is that of the tests again afterwards."""
  names = (
    *("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches"),
    "jax_persistent_cache_min_compile_time_secs",
  )
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture
def keys(settings, files, model, eval_file):
  def of(job):
    own = MESH | JOBS[job] | {"job": job.partition("_")[0], "training__max_steps": 2}
    own |= {"distill__teacher": model} if job == "distill" else {}
    own |= (
      {"data__eval": eval_file}
      if job == "sft"
      else {"data__train": files / f"{job}.jsonl"}
    )
    both = settings | own
    return {name: value for name, value in both.items() if value is not None}

  return of


def train(keys, out, **more):
  shared_steps.clear()  # as in a process of its own
  return runs.tunix("train", *runs.arguments(**(keys | {"output_dir": out} | more)))


@pytest.mark.parametrize(
  "job",
  [
    pytest.param(j, marks=[pytest.mark.slow] * (j not in ("sft", "grpo_engine")))
    for j in JOBS
  ],
)
def test_a_run_loads_what_was_shipped(job, keys, tmp_path, own_cache, capsys):
  keys, folder = keys(job), tmp_path / "programs"
  words = runs.arguments(**keys)
  assert runs.tunix("plan", *words, "--topology", "cpu:8", "--ship", folder) == 0
  names = json.loads((folder / "shipped.json").read_text())["programs"]
  assert f"shipped: {len(names)} programs" in capsys.readouterr().out
  assert train(keys, tmp_path / "plain") == 0
  plain = capsys.readouterr().out
  jax.clear_caches()
  assert train(keys, tmp_path / "out", compilation_cache=folder) == 0
  said = capsys.readouterr().out
  assert not [line for line in said.splitlines() if "compiled here" in line]
  assert "loaded from" not in plain
  loaded = {x.partition(":")[0] for x in said.splitlines() if "loaded from" in x}
  # Every trainer's update is a "train step". A frozen copy of the actor scores by the
  # actor's own program, which is in memory then.
  steps = {"train step" if name.endswith(" update") else name for name in names}
  assert loaded >= steps - {"evaluation", "reference scoring"}
  assert ("evaluation" in loaded) == (job == "sft")
  engine = {"engine mixed", "engine decode", "engine load", "engine write"}
  assert engine <= loaded or job != "grpo_engine"
  logs = [tmp_path / name / "logs" / "metrics.jsonl" for name in ("plain", "out")]
  assert logs[0].read_bytes() == logs[1].read_bytes()


def test_other_settings_are_compiled_and_said(keys, tmp_path, own_cache, capsys):
  keys, folder = keys("sft"), tmp_path / "programs"
  words = runs.arguments(**keys)
  assert runs.tunix("plan", *words, "--topology", "cpu:8", "--ship", folder) == 0
  other = {"compilation_cache": folder, "training__learning_rate": "2e-2"}
  assert train(keys, tmp_path / "rate", **other) == 0
  said = capsys.readouterr().out
  assert "train step: not among the programs shipped to" in said
  assert "evaluation: loaded from" in said
  assert train(keys, tmp_path / "mesh", **other, mesh="{fsdp: 8}") == 0
  said = capsys.readouterr().out
  assert "all is compiled here: mesh {'fsdp': 4, 'tp': 2} when they were made" in said


def test_a_folder_that_cannot_be_written_is_refused_before_compiling(
  keys, tmp_path, capsys
):
  (tmp_path / "file").write_text("")
  words = runs.arguments(**keys("sft"))
  flags = ("--topology", "cpu:8", "--ship", tmp_path / "file")
  assert runs.tunix("plan", *words, *flags) == 2
  assert "--ship is" in capsys.readouterr().err


def test_a_signed_folder_needs_its_key(keys, tmp_path, own_cache, capsys):
  keys, folder, key = keys("sft"), tmp_path / "programs", tmp_path / "key"
  key.write_bytes(bytes(range(32)))
  words = [*runs.arguments(**keys), "--topology", "cpu:8"]
  assert runs.tunix("plan", *words, "--ship-key", key) == 2
  assert "--ship is missing" in capsys.readouterr().err
  flags = ("--ship", tmp_path, "--ship-key", key)
  assert runs.tunix("plan", *words, *flags) == 2
  assert "which is in the folder of --ship" in capsys.readouterr().err
  flags = ("--ship", folder, "--ship-key", key)
  assert runs.tunix("plan", *words, *flags) == 0
  assert ", signed" in capsys.readouterr().out
  assert train(keys, tmp_path / "out", compilation_cache=folder) == 2
  assert "is signed; expected its key" in capsys.readouterr().err
  with_key = {"compilation_cache": folder, "compilation_cache_key": key}
  assert train(keys, tmp_path / "out", **with_key) == 0
  assert "train step: loaded from" in capsys.readouterr().out
  settings = (tmp_path / "out" / "config.yaml").read_text()
  assert f"compilation_cache_key: {key}" in settings
  # The same command finds the folder as it was, and resumes.
  assert train(keys, tmp_path / "out", **with_key) == 0
  assert "this run is finished" in capsys.readouterr().out
