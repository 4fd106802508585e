"""Wrong commands and configurations: one line that names key and remedy; no model is
loaded for any of them."""

import json
import shlex
import shutil

import pytest

from tests.cli import runs
from tunix.models.automodel import AutoModel

SFT = (
  "train --model.path={d}/model --data.train={d}/train.jsonl --data.max_length=48 "
  "--training.max_steps=2 --training.global_batch_size=4 --output_dir={d}/out "
)
GRPO = (
  "train --job=grpo --model.path={d}/model --data.train={d}/prompts.jsonl "
  "--rollout.max_prompt_length=32 --rollout.max_tokens_to_generate=8 "
  "--algorithm.num_generations=2 --training.max_steps=2 --output_dir={d}/out "
)

# Command -> a key, a value or a remedy in its line. The tests beside each error check
# the whole sentence.
WRONG = {
  SFT + "--traning.max_steps=5": "did you mean training.max_steps?",
  SFT + "--training.max_step=5": "did you mean training.max_steps?",
  SFT + "--modle.dtype=float32": "did you mean model.dtype?",
  SFT + "--optimzer.nam=adam": "did you mean optimizer.name?",
  SFT + "--lora.lora_alpha=4": "did you mean lora.alpha?",
  SFT + "--max_steps=4": "did you mean training.max_steps?",
  SFT + "--lr=1": "training.learning_rate",
  SFT + "--training.lr=1": "did you mean training.learning_rate?",
  SFT + "--training.num_train_epochs=4": "did you mean data.num_epochs?",
  SFT + "--gradient_accumulation_steps=4": "global_batch_size / micro_batch_size",
  SFT + "--precision=bf16": "model.dtype",
  SFT + "--dataset_text_field=body": "data.columns: {{text: ...}}",
  SFT + "--resume": "the same command resumes",
  SFT + "--dry_run": "--dry-run",
  SFT + "--training.max_steps": "write --training.max_steps=VALUE",
  SFT + "--training.max_steps=many": "'many'",
  SFT + "--training.learning_rate=-1": "training.learning_rate is -1",
  SFT + "--job=sfft": "sft, dpo",
  **{
    SFT + f"--job={job}": f"train.jsonl:1: found fields 'messages', expected {fields}"
    for job, fields in (
      ("dpo", '{{"prompt": ..., "chosen"'),
      ("kto", '{{"prompt": ..., "completion"'),
      ("reward", '{{"prompt": ..., "chosen"'),
    )
  },
  SFT + "--mesh='{{fsdp: 3}}'": "multiple of 3",
  SFT + "--optimizer.name=adamm": "did you mean adam?",
  SFT + "--export.kind=adapter": "export.kind is 'adapter'",
  SFT + "--output_dir={d}/file": "output_dir is ",
  SFT + "--data.train={d}/none.jsonl": "none.jsonl",
  SFT + "--data.train={d}/pairs.jsonl": "pairs.jsonl:1: the record is a pair",
  SFT + "--data.train={d}/broken.py:f": "broken.py:2: '(' was never closed",
  SFT + "--model.path={d}/none": "/none",
  SFT + "--model.path={d}/bare": "tokenizer.json",
  SFT + "--model.path={d}/no_template": "tokenizer.chat_template",
  SFT + "--model.path={d}/run": "/run/export",
  SFT + "--model.path={d}/adapter": "model.path is ",
  SFT + "--config={d}/none.yaml": "none.yaml",
  SFT + "--config={d}/twice.yaml": "twice.yaml:2: ",
  SFT + "--config={d}/open.yaml": "open.yaml:3: ",
  GRPO: "reward.functions is empty",
  GRPO + "--reward.functions=exact_mach": "did you mean exact_match?",
  GRPO + "--reward.functions={d}/broken.py:f": "broken.py:2: '(' was never closed",
  GRPO + "--reward.functions={d}/asks.py:f": "'solution'",
  GRPO + "--reward.functions={d}/asks.py": "asks.py",
  GRPO + "--reward.functions='numeric_match(column=none)'": "'none'",
  "generate --model {d}/adapter --prompt x": "--model is ",
  "generate --model {d}/bare --prompt x": "--tokenizer",
  "generate --model {d}/no_template --chat --prompt x": "--chat is given",
  "generate --model {d}/model --adapter {d}/run --prompt x": "adapter_config",
  "eval --data {d}/train.jsonl": "MODEL is missing",
  "eval {d}/run --model {d}/model --data {d}/train.jsonl": "--model is ",
  "parity {d}/run": "/run/export",
  "data show {d}/prompts.jsonl --lr=1": "--lr ",
  "data show {d}/none.jsonl": "none.jsonl",
  SFT + "--model.revision=v1": "model.revision is 'v1'",
  "export --run {d}/run --to {d}/x --private": "add --push-to-hub",
  "export --run {d}/run --to {d}/x --push-to-hub=x/y": "checkpoint",
  "export --run {d}/model --to {d}/x": "output_dir",
  "train --help optimiser": "did you mean optimizer?",
  "trian": "did you mean train?",
  "data shw": "show or scan",
  "init sfft": "'sfft'",
  "init sft --output {d}/file": "--output is ",
  "completion csh": "'csh'",
}


@pytest.fixture(scope="module")
def place(model, train_file, tmp_path_factory):
  d = tmp_path_factory.mktemp("wrong")
  shutil.copytree(model, d / "model")
  shutil.copy(train_file, d / "train.jsonl")
  (d / "prompts.jsonl").write_text('{"prompt": "Two and two?", "answer": "4"}\n')
  (d / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
  (d / "broken.py").write_text("# mine\ndef f(prompts, completions:\n  return 1\n")
  (d / "asks.py").write_text("def f(completions, solution):\n  return [0.0]\n")
  (d / "twice.yaml").write_text("seed: 1\nseed: 2\n")
  (d / "open.yaml").write_text("training:\n  max_steps: [1\n")
  (d / "file").write_text("")
  (d / "adapter").mkdir()
  (d / "adapter" / "adapter_config.json").write_text("{}")
  (d / "run").mkdir()
  (d / "run" / "config.yaml").write_text("job: sft\n")
  shutil.copytree(model, d / "run" / "export")
  (d / "bare").mkdir()
  shutil.copy(model / "config.json", d / "bare")
  shutil.copytree(model, d / "no_template")
  (d / "no_template" / "chat_template.jinja").unlink(missing_ok=True)
  file = d / "no_template" / "tokenizer_config.json"
  fields = json.loads(file.read_text())
  fields.pop("chat_template", None)
  file.write_text(json.dumps(fields))
  return d


@pytest.fixture
def no_model(monkeypatch):
  def load(*args, **options):
    raise AssertionError("a model was loaded")

  monkeypatch.setattr(AutoModel, "from_pretrained", load)


@pytest.mark.parametrize(("command", "says"), WRONG.items())
def test_one_line_says_what_to_do(command, says, place, no_model, capsys):
  assert runs.tunix(*shlex.split(command.format(d=place))) == 2
  error = capsys.readouterr().err
  assert error.startswith("tunix: error: ")
  assert error.count("\n") == 1
  assert "Traceback" not in error
  assert says.format() in error
  assert not (place / "out").exists()


def test_there_are_forty():
  assert len(WRONG) >= 40
