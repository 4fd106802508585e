"""`tunix train` from end to end: what is written, resuming, refusing."""

import dataclasses
import json
import pathlib
import signal

import numpy as np
import pytest

from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.commands import train as train_main
from tunix.cli.run.folder import RunFolder
from tunix.cli.run.result import Result
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel
from tunix.sft.loop.interrupts import Stopped


def train(keys, **more):
  return runs.tunix("train", *runs.arguments(**(keys | more)))


def weights(folder):
  """The bytes of the safetensors files of a folder."""
  files = sorted(pathlib.Path(folder).glob("*.safetensors"))
  assert files
  return [file.read_bytes() for file in files]


def metrics_text(out):
  return (out / "logs" / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def finished(model, train_file, eval_file, tmp_path_factory):
  """(keys, standard output) of a LoRA run of 6 steps with evaluation."""
  out = tmp_path_factory.mktemp("finished") / "out"
  keys = {
    "model__path": model,
    "data__train": train_file,
    "data__eval": eval_file,
    "data__max_length": 48,
    "lora__rank": 4,
    "training__max_steps": 6,
    "training__global_batch_size": 4,
    "training__micro_batch_size": 2,
    "training__eval_every_n_steps": 4,
    "training__learning_rate": "2e-2",
    "checkpoint__every_n_steps": 2,
    "output_dir": out,
  }
  process = runs.spawn("train", *runs.arguments(**keys))
  stdout, stderr = process.communicate(timeout=300)
  assert process.returncode == 0, stderr
  return keys, stdout


def test_a_lora_run_leaves_everything_in_its_folder(finished):
  keys, stdout = finished
  out = keys["output_dir"]
  assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "4", "6"]
  logs = {p.name.split(".")[0] for p in (out / "logs").iterdir()}
  assert logs == {"metrics", "timings", "events"}
  steps = runs.metrics(out)
  assert sorted(steps) == [1, 2, 3, 4, 5, 6]
  assert steps[6]["loss"] < steps[1]["loss"]
  assert steps[1]["learning_rate"] == 2e-2
  assert sorted(runs.metrics(out, "eval")) == [0, 4, 6]
  assert "layers.attn.q_proj" in stdout
  assert "trainable 4,096 of 55,584 parameters" in stdout
  assert "train data: 16 records" in stdout
  assert "4 records of at most 48 tokens, in 2 micro-batches; 6 steps" in stdout
  assert f"train loss {steps[1]['loss']:.4f} -> {steps[6]['loss']:.4f}" in stdout


def test_a_run_leaves_its_page(finished):
  out, stdout = finished[0]["output_dir"], finished[1]
  assert str(out / "report.html") in stdout
  text = (out / "report.html").read_text()
  assert "finished after 6 steps" in text and text.count('"points"') > 4
  assert "16 records: 16 kept" in text and "training.max_steps" in text
  about = json.loads((out / "about.json").read_text())
  assert about["devices"].startswith("1 of ") and "jax " in about["packages"]


def test_a_page_that_cannot_be_written_hides_nothing(tmp_path, caplog):
  folder = RunFolder(tmp_path / "run")
  (folder.path / "report.html").mkdir(parents=True)
  train_main._write_page(folder, KeyboardInterrupt, KeyboardInterrupt(), None)
  assert not caplog.messages
  train_main._write_page(folder, None, None, None)
  assert "report.html" in caplog.messages[0]


def test_the_page_of_a_run_that_failed_says_why(tmp_path):
  folder = RunFolder(tmp_path)
  (tmp_path / "logs").mkdir()
  (tmp_path / "logs" / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
  error = RuntimeError("the <chip> is gone\nand " + "x" * 9999)
  train_main._write_page(folder, RuntimeError, error, None)
  text = (tmp_path / "report.html").read_text()
  assert "failed; step 7 is the last one logged" in text
  assert "RuntimeError: the \\u003cchip> is gone\\nand xxx" in text
  assert "x" * 4001 not in text
  folder.start(config_lib.load([]), {}, {})
  train_main._write_page(folder, Stopped, Stopped(signal.SIGTERM, "stopped"), None)
  assert "not finished; step 7" in (tmp_path / "report.html").read_text()


def test_the_adapter_is_exported(finished, model):
  out = finished[0]["output_dir"]
  base = AutoModel.from_pretrained(model)
  adapted = lora.load_adapter(base, out / "export")
  pairs = [lora_modules.pair_of(m) for m in lora_modules.adapted(adapted).values()]
  assert len(pairs) == 7
  assert all(np.any(np.asarray(b)) for _, b in pairs)
  recorded = json.loads((out / "export" / "adapter_config.json").read_text())
  assert recorded["base_model_name_or_path"] == str(model)


def test_the_saved_config_is_the_run(finished):
  keys, _ = finished
  saved = config_lib.load([str(keys["output_dir"] / "config.yaml")])
  assert saved.training.max_steps == 6
  assert saved.output_dir == str(keys["output_dir"])
  assert saved.lora.rank == 4


def test_a_finished_run_says_so_and_does_nothing(finished, capsys):
  keys, _ = finished
  out = keys["output_dir"]
  before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
  assert runs.tunix("train", out / "config.yaml") == 0
  assert "this run is finished: 6 steps" in capsys.readouterr().out
  assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"seed": 1}, "seed was 0 and is 1"),
    ({"training__learning_rate": 1}, "training.learning_rate was 0.02 and is 1.0"),
    ({"training__micro_batch_size": 4}, "training.micro_batch_size was 2 and is 4"),
    ({"lora__rank": 2}, "lora.rank was 4 and is 2"),
    ({"data__packing": "true"}, "data.packing was False and is True"),
    ({"training__max_steps": "null"}, "data.num_epochs was None and is 1"),
    (
      {"schedule__name": "cosine_decay_schedule"},
      "schedule.name was None and is 'cosine_decay_schedule'",
    ),
  ],
)
def test_other_settings_cannot_resume(finished, capsys, changed, message):
  assert train(finished[0], **changed) == 2
  error = capsys.readouterr().err
  assert message in error
  assert "or another output_dir" in error
  assert error.count("\n") == 1


def test_other_data_cannot_resume_and_the_same_elsewhere_can(
  finished, tmp_path, capsys, train_file
):
  other = runs.write_records(tmp_path / "other.jsonl", 16, start=1)
  assert train(finished[0], data__train=other) == 2
  assert "data.train" in capsys.readouterr().err
  same = tmp_path / "same.jsonl"
  same.write_bytes(pathlib.Path(train_file).read_bytes())
  assert train(finished[0], data__train=same, export__kind="merged") == 0
  merged = AutoModel.from_pretrained(finished[0]["output_dir"] / "export")
  assert not lora_modules.adapted(merged)


def test_raising_max_steps_goes_on_and_equals_one_run(settings, tmp_path, capsys):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert train(settings, output_dir=whole) == 0
  assert train(settings, output_dir=parts, training__max_steps=2) == 0
  capsys.readouterr()
  assert train(settings, output_dir=parts) == 0
  assert "resuming after step 2" in capsys.readouterr().out
  assert weights(parts / "export") == weights(whole / "export")
  assert metrics_text(parts) == metrics_text(whole)
  # A full export stands alone.
  trained = AutoModel.from_pretrained(whole / "export")
  assert trained.config.num_layers == 2
  assert TokenizerAdapter.from_pretrained(whole / "export").has_chat_template()


def test_sigterm_saves_and_the_same_command_resumes(settings, tmp_path):
  settings |= {"training__max_steps": 150, "checkpoint__every_n_steps": 1000}
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  keys = settings | {"output_dir": stopped, "logging__console": "true"}
  process = runs.spawn("train", *runs.arguments(**keys))
  for line in process.stdout:
    if line.startswith("step 3 "):
      process.send_signal(signal.SIGTERM)
      break
  stderr = runs.without_progress(process.communicate(timeout=300)[1])
  assert process.returncode == 143
  first, last = stderr.splitlines()
  assert first == "tunix: stopping after this step; send SIGTERM again to end now"
  assert last.startswith("tunix: stopped after step ")
  assert last.endswith("; a checkpoint is saved; the same command resumes")
  assert "not finished" in (stopped / "report.html").read_text()
  (step,) = (int(p.name) for p in (stopped / "checkpoints").iterdir())
  assert 3 <= step < 150
  assert max(runs.metrics(stopped)) == step
  assert train(settings, output_dir=stopped) == 0
  assert train(settings, output_dir=whole) == 0
  assert weights(stopped / "export") == weights(whole / "export")
  assert metrics_text(stopped) == metrics_text(whole)


@pytest.mark.slow
@pytest.mark.ci
def test_a_mesh_gives_the_same_losses(settings, tmp_path):
  keys = settings | {"training__max_steps": 2, "training__global_batch_size": 8}
  assert train(keys, output_dir=tmp_path / "one") == 0
  mesh = {"mesh": "{fsdp: 4, tp: 2}"}
  assert train(keys | mesh, output_dir=tmp_path / "eight") == 0
  one, eight = runs.metrics(tmp_path / "one"), runs.metrics(tmp_path / "eight")
  for step in one:
    assert eight[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)


def test_a_run_that_stops_early_exports_its_best_checkpoint(
  settings, eval_file, tmp_path, capsys
):
  # The loss falls, and more of it is said to be better: the first one is the best.
  best = {"metric": "loss", "greater_is_better": "true", "patience": 2}
  keys = settings | {f"training__best__{k}": v for k, v in best.items()}
  keys |= {"data__eval": eval_file, "training__eval_every_n_steps": 1, "lora__rank": 2}
  keys |= {"checkpoint__max_to_keep": 1, "export__checkpoint": "best"}
  keys["export__checksums"] = "true"
  out = keys["output_dir"]
  assert train(keys) == 0
  said = capsys.readouterr().out
  losses = {step: line["loss"] for step, line in runs.metrics(out, "eval").items()}
  assert losses[1] > losses[2] > losses[3] and 4 not in losses
  result = json.loads((out / "result.json").read_text())
  kept = result["best"] | {"steps": result["steps"], "ended_by": result["ended_by"]}
  assert (kept["step"], kept["value"], kept["waited"]) == (1, losses[1], 2)
  assert (kept["steps"], kept["ended_by"]) == (3, "early_stopping")
  assert "step 1; stopped early: no better one in 2 evaluations; step 1 exp" in said
  assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["1", "3"]
  assert (out / "export" / "SHA256SUMS").is_file()
  assert "finished after 3 steps, stopped early" in (out / "report.html").read_text()
  for flags, is_same in ((["--best"], True), ([], False)):
    to = tmp_path / f"to{len(flags)}"
    assert runs.tunix("export", "--run", out, "--to", to, *flags) == 0
    assert (weights(to) == weights(out / "export")) == is_same
  assert train(keys) == 0
  again = capsys.readouterr().out
  assert "this run is finished: 3 steps" in again
  assert "raise training.best.patience to go on" in again


@pytest.mark.slow
@pytest.mark.ci
def test_compiled_programs_are_kept(settings, tmp_path):
  cache = tmp_path / "programs"
  keys = settings | {"compilation_cache": cache, "training__max_steps": 1}
  process = runs.spawn("train", *runs.arguments(**keys))
  _, stderr = process.communicate(timeout=300)
  assert process.returncode == 0, stderr
  assert any("train_step" in p.name or "step" in p.name for p in cache.iterdir())


def test_without_an_argument_the_help_is_shown(capsys):
  assert runs.tunix("train") == 0
  assert train_main.HELP.partition("{")[0] in capsys.readouterr().out


def test_a_result_holds_the_warnings_of_the_run():
  old = Result.from_json({"steps": 4, "export": None})
  assert old.notes == ()
  result = dataclasses.replace(old, notes=["nothing was learned"])
  assert "nothing was learned" in str(result)
  assert Result.from_json(result.to_json()) == result
