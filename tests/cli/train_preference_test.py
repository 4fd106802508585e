"""`tunix train` with the jobs dpo, orpo, kto and reward, and what they refuse."""

import json

import jax
import numpy as np
import pytest

from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.run import folder as run_folder
from tunix.cli.run.settle import settle_values
from tunix.models import lora, safetensors_saver
from tunix.models.automodel import AutoModel

ANSWERS = [
  ("How many days are in a week?", "There are seven days.", "It is five."),
  ("What is the sum of two and three?", "It is five.", "The sea is deep."),
  ("Who runs past the mill?", "The river runs slowly.", "A student asks."),
]


def pairs(count):
  for i in range(count):
    question, good, bad = ANSWERS[i % len(ANSWERS)]
    yield {
      "prompt": f"{question} {i}",
      "chosen": f"{good} {i}",
      "rejected": f"{bad} {i}",
    }


def labelled(count):
  for i, pair in enumerate(pairs(count)):
    answer = pair["chosen" if i % 2 else "rejected"]
    yield {"prompt": pair["prompt"], "completion": answer, "label": bool(i % 2)}


def write(path, records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("preference")
  write(folder / "pairs.jsonl", pairs(12))
  write(folder / "held_out.jsonl", pairs(4))
  write(folder / "labelled.jsonl", labelled(12))
  return folder


@pytest.fixture
def keys(files, model, tmp_path):
  """Settings of a short run."""
  return {
    "job": "dpo",
    "model__path": model,
    "data__train": files / "pairs.jsonl",
    "preference__max_prompt_length": 32,
    "preference__max_response_length": 16,
    "training__global_batch_size": 4,
    "training__micro_batch_size": 2,
    "training__max_steps": 4,
    "training__learning_rate": 0.01,
    "logging__tensorboard": "false",
    "output_dir": tmp_path / "out",
  }


def train(keys, **more):
  return runs.tunix("train", *runs.arguments(**(keys | more)))


def everything(folder, weights="model"):
  """Bytes of what a run leaves, by name."""
  names = ["logs/metrics.jsonl", f"export/{weights}.safetensors"]
  return {name: (folder / name).read_bytes() for name in names}


def test_a_run_trains_and_exports(keys, files, model, capsys):
  keys = keys | {"data__eval": files / "held_out.jsonl"}
  assert train(keys) == 0
  said = capsys.readouterr().out
  assert "train data: 12 pairs: 12 kept; " in said and "eval data: 4 pairs" in said
  assert "dpo: 4 pairs of at most 32 + 16 tokens, in 2 micro-batches; 4 steps" in said
  out = keys["output_dir"]
  steps, held_out = runs.metrics(out), runs.metrics(out, "eval")
  assert sorted(steps) == [1, 2, 3, 4] and sorted(held_out) == [0, 4]
  assert steps[1]["loss"] == pytest.approx(np.log(2), rel=1e-5)  # it is its reference
  assert steps[4]["loss"] < steps[1]["loss"]
  found = [held_out[i]["rewards/accuracy"] for i in (0, 4)]
  assert f"eval accuracy {found[0]:.4f} -> {found[1]:.4f}" in said
  after = AutoModel.from_pretrained(out / "export")
  before = AutoModel.from_pretrained(model)
  leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after))
  assert before.config == after.config
  assert all((a != b).any() for a, b in leaves)
  assert train(keys) == 0
  assert "this run is finished: 4 steps" in capsys.readouterr().out


def test_a_row_length_trains_the_bytes_of_two_limits_and_resumes_them(keys, tmp_path):
  assert train(keys, training__max_steps=2, data__num_epochs=2) == 0
  one = {"preference__max_response_length": "null", "data__max_length": 48}
  again = {"training__max_steps": 4, "data__num_epochs": 2}
  # The folder was begun with two limits.
  assert train(keys | one, **again) == 0
  whole = keys | one | {"output_dir": tmp_path / "whole"}
  assert train(whole, **again) == 0
  assert everything(keys["output_dir"]) == everything(whole["output_dir"])


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({"lora__rank": 2}, id="dpo-lora"),
    pytest.param({"job": "kto"}, id="kto"),
    pytest.param({"job": "orpo"}, id="orpo", marks=pytest.mark.slow),
    pytest.param({"job": "reward"}, id="reward", marks=pytest.mark.slow),
    pytest.param(
      {"preference__reference_logps": "logps"}, id="logps", marks=pytest.mark.slow
    ),
  ],
)
def test_a_run_that_is_resumed_is_the_same(keys, files, changes, tmp_path, capsys):
  keys = keys | changes
  if keys["job"] == "kto":
    keys["data__train"] = files / "labelled.jsonl"
  if "preference__reference_logps" in changes:
    keys["preference__reference_logps"] = tmp_path / "logps"
  assert train(keys, output_dir=tmp_path / "whole") == 0
  assert train(keys, training__max_steps=2) == 0
  assert train(keys) == 0
  assert "resuming after step 2" in capsys.readouterr().out
  weights = "adapter_model" if "lora__rank" in keys else "model"
  whole = everything(tmp_path / "whole", weights)
  assert whole == everything(keys["output_dir"], weights)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({"lora__rank": 2}, id="dpo-lora"),
    pytest.param({"preference__reference_logps": "logps"}, id="dpo-logps"),
    pytest.param({"job": "orpo"}, id="orpo"),
    pytest.param({"job": "kto"}, id="kto"),
    pytest.param({"job": "reward"}, id="reward"),
  ],
)
def test_eight_devices_train_as_one(keys, files, changes, tmp_path):
  keys = keys | changes | {"data__eval": files / "held_out.jsonl"}
  keys |= {"training__global_batch_size": 8, "training__micro_batch_size": 4}
  if keys["job"] == "kto":
    keys |= {"data__train": files / "labelled.jsonl"}
    keys |= {"data__eval": files / "labelled.jsonl"}
  found = []
  for mesh in (None, "{fsdp: 4, tp: 2}"):
    more = {} if mesh is None else {"mesh": mesh}
    more["output_dir"] = out = tmp_path / str(len(found))
    if "preference__reference_logps" in changes:
      more["preference__reference_logps"] = tmp_path / f"logps{len(found)}"
    assert train(keys, **more) == 0
    steps = runs.metrics(out), runs.metrics(out, "eval")
    found.append([part[i]["loss"] for part in steps for i in sorted(part)])
  assert len(set(found[0])) > 3
  assert found[1] == pytest.approx(found[0], rel=1e-4)
  export = tmp_path / "1" / "export"
  assert (export / "adapter_config.json").exists() == ("lora__rank" in changes)


def test_a_reference_of_its_own_and_one_from_disk(keys, tmp_path):
  """The base as a folder, in memory, and as numbers on disk: the same training."""
  runs_made = {
    "memory": {},
    "folder": {"preference__reference": keys["model__path"]},
    "disk": {"preference__reference_logps": tmp_path / "logps"},
    "again": {"preference__reference_logps": tmp_path / "logps"},
  }
  # What a writer leaves that is killed is not what it would have written.
  (tmp_path / "logps").mkdir()
  (tmp_path / "logps" / "rows-00.npy.k1ll3d").write_bytes(b"half of it")
  losses = {}
  for name, more in runs_made.items():
    out = tmp_path / name
    assert train(keys, training__max_steps=2, output_dir=out, **more) == 0
    losses[name] = [runs.metrics(out)[i]["loss"] for i in (1, 2)]
  for name in runs_made:
    assert losses[name] == pytest.approx(losses["memory"], rel=1e-5)
  assert [*(tmp_path / "logps").glob("rows-*.npy")]


def test_a_reward_model_judges_pairs(keys, files, capsys):
  # At the rate of the other tests, 0.01, one pair of four came out wrong on some
  # processors; at this one margins are 5.8 or more, with each of six seeds.
  settings = {"training__learning_rate": 0.003, "training__max_steps": 40}
  assert train(keys, job="reward", **settings) == 0
  assert "train accuracy" in capsys.readouterr().out
  export = keys["output_dir"] / "export"
  assert AutoModel.from_pretrained(export).config.num_scores == 1
  assert runs.tunix("eval", export, "--pairs", files / "held_out.jsonl") == 0
  said = capsys.readouterr().out.split()
  assert said[said.index("4") + 2] == "1.0000"


def test_a_reward_model_with_adapters_is_exported_whole(keys, files):
  keys = keys | {"job": "reward", "lora__rank": 2, "training__max_steps": 1}
  assert train(keys) == 0
  export = keys["output_dir"] / "export"
  assert AutoModel.from_pretrained(export).config.num_scores == 1
  assert not (export / "adapter_config.json").exists()


def test_labels_out_of_balance_are_a_note(keys, tmp_path, capsys):
  records = list(labelled(12))
  for record in records[:5]:
    record["label"] = False
  keys = keys | {"job": "kto", "data__train": write(tmp_path / "l.jsonl", records)}
  assert train(keys, training__max_steps=1) == 0
  said = capsys.readouterr().out
  assert "4 desirable, 8 undesirable" in said
  assert "note: desirable completions weigh 0.50 times" in said
  assert "preference.desirable_weight=2 " in said
  result = json.loads((keys["output_dir"] / "result.json").read_text())
  assert any("weigh 0.50 times" in note for note in result["notes"])
  for record in records:
    record["label"] = True
  write(keys["data__train"], records)
  assert train(keys, output_dir=tmp_path / "other") == 2
  assert "all 12 completions have the label true" in capsys.readouterr().err


def test_bad_records_are_counted_or_refused(keys, tmp_path, capsys):
  records = list(pairs(6))
  records[2]["chosen"] = records[2]["rejected"]
  records[4]["rejected"] = ""
  file = write(tmp_path / "p.jsonl", records)
  assert train(keys, data__train=file) == 2
  error = capsys.readouterr().err
  assert 'p.jsonl:3: "chosen" and "rejected" are equal' in error
  assert 'set preference.unusable to "drop"' in error
  keys = keys | {"preference__unusable": "drop", "training__max_steps": "null"}
  assert train(keys, data__train=file) == 0
  said = capsys.readouterr().out
  assert "6 pairs: 4 kept, 1 with an empty completion left out, 1 with equal" in said
  assert "done: 1 step;" in said


def test_pairs_can_be_looked_at(keys, files, capsys):
  argv = runs.arguments(**keys, data__shuffle="false")
  assert runs.tunix("data", "show", *argv, "--rows=1") == 0
  shown = capsys.readouterr().out
  assert "«There are seven days. 0<|im_end|>»" in shown
  assert "<|im_start|>user\nHow many days are in a week? 0<|im_end|>" in shown
  assert shown.count("rejected, ") == 1
  assert runs.tunix("data", "scan", *argv) == 0
  assert "train: 12 pairs: 12 kept" in capsys.readouterr().out
  keys = keys | {"job": "kto", "data__train": files / "labelled.jsonl"}
  assert runs.tunix("data", "show", *runs.arguments(**keys), "--rows=1") == 0
  shown = capsys.readouterr().out
  assert "completion, " in shown and "label: " in shown


def test_other_pairs_or_another_reference_cannot_resume(keys, model, tmp_path, capsys):
  records = list(pairs(12))
  keys = keys | {
    "data__train": write(tmp_path / "p.jsonl", records),
    "preference__reference": model,
    "training__max_steps": 1,
  }
  assert train(keys) == 0
  again = keys | {"training__max_steps": 2}
  write(tmp_path / "p.jsonl", records[1:])
  assert train(again) == 2
  assert "data.train" in capsys.readouterr().err
  write(tmp_path / "p.jsonl", records)
  other = runs.write_model(tmp_path / "other")
  safetensors_saver.save_pretrained(
    AutoModel.from_pretrained(other), other, dtype="bfloat16"
  )
  assert train(again, preference__reference=other) == 2
  assert "preference.reference" in capsys.readouterr().err
  assert train(again, preference__beta=0.5) == 2
  assert "preference.beta was 0.1 and is 0.5" in capsys.readouterr().err


def test_a_reward_model_with_adapters_trains_and_saves_its_head(keys, model):
  out = keys["output_dir"]
  short = keys | {"job": "reward", "lora__rank": 2, "export__kind": "adapter"}
  short |= {"training__max_steps": 1, "lora__targets": "[q_proj]"}
  assert train(short) == 0
  drawn = AutoModel.from_pretrained(model, num_scores=1)
  trained = lora.load_adapter(drawn, out / "export")
  before, after = (np.asarray(m.score.kernel[...]) for m in (drawn, trained))
  assert (before != after).all()
  written = (out / "config.yaml").read_text()
  assert "modules_to_save:\n  - score\n" in written


def test_whose_head_of_scores_is_trained(tmp_path):
  (tmp_path / "config.yaml").write_text("job: reward\nlora:\n  rank: 2\n")
  # Of a run that began before there was the key: its head stays as it was drawn.
  before = run_folder.RunFolder(tmp_path).read_config()
  assert before.lora.modules_to_save == ()
  layer = {"job": "reward", "lora": {"rank": 2}}
  now = settle_values(config_lib.from_layers([("given", layer)]), None)
  assert now.lora.modules_to_save == ("score",)
  assert settle_values(before, None).lora.modules_to_save == ()


def test_orpos_lambda_has_a_key():
  layer = {"job": "orpo", "preference": {"lambda_orpo": 0.7}}
  config = config_lib.from_layers([("given", layer)])
  assert config.preference.lambda_orpo == 0.7


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"preference__betta": 1}, "did you mean preference.beta?"),
    ({"preference__beta": -1}, "preference.beta=-1.0 must be positive"),
    ({"preference__loss": "sigmoidal"}, "preference: unknown pair loss 'sigmoidal'"),
    ({"preference__options": "{gamma: 1.0}"}, "pair loss sigmoid takes no gamma"),
    (
      {"preference__options": "{beta: abc}"},
      "preference.options hold 'beta', which is a setting of",
    ),
    ({"preference__options": "{label_smoothing: 0.1}"}, "Set label_smoothing=0.1"),
    (
      {"job": "orpo", "preference__options": "{lambda_orpo: 1}"},
      "preference.options is {'lambda_orpo': 1}, and the job 'orpo' does not",
    ),
    (
      {"preference__loss": "simpo", "preference__options": "{gamma: abc}"},
      "preference.options.gamma is 'abc': it must be a finite number",
    ),
    ({"job": "orpo", "preference__options": "{a: 1}"}, "it belongs to the job dpo"),
    ({"preference__lambda_orpo": 1}, "it belongs to the job orpo"),
    (
      {"preference__loss": "simpo", "preference__reference": "x"},
      "preference.loss is 'simpo'",
    ),
    (
      {"preference__reference_free": "true", "preference__reference": "x"},
      "preference.reference is 'x'",
    ),
    ({"preference__reference": "/no/such"}, "there is no folder /no/such"),
    ({"preference__max_prompt_length": 0}, "preference.max_prompt_length is 0"),
    ({"preference__unusable": "keep"}, "expected one of error, drop"),
    ({"preference__centering": 0.1}, "it belongs to the job reward"),
    ({"preference__desirable_weight": 2}, "it belongs to the job kto"),
    ({"job": "orpo", "preference__beta": 0.2}, "it belongs to the jobs dpo and kto"),
    ({"job": "orpo", "preference__loss": "ipo"}, "it belongs to the job dpo"),
    ({"job": "kto"}, "found fields 'prompt', 'chosen', 'rejected', expected"),
    ({"job": "sft"}, "it belongs to the jobs dpo and orpo and kto and reward"),
    ({"data__packing": "true"}, "data.packing is True, and the job 'dpo' does not"),
    ({"data__max_length": 9}, "data.max_length is 9; expected 48, which is"),
    (
      {"algorithm__beta": 1},
      "and the job 'dpo' does not read it: it belongs to the jobs grpo and ppo",
    ),
    (
      {
        "job": "reward",
        "lora__rank": 2,
        "lora__modules_to_save": "[]",
        "export__kind": "adapter",
      },
      "export.kind is 'adapter' and job is 'reward'",
    ),
    ({"lora__rank": 2, "lora__modules_to_save": "[head]"}, "'head' matches no module"),
    ({"preference__max_response_length": 4}, "preference.max_response_length is 4"),
  ],
  ids=str,
)
def test_bad_settings_are_one_line(keys, capsys, changed, message):
  assert train(keys, **changed) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1
