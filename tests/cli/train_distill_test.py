"""`tunix train --job=distill`: from records, from a cache, and on-policy."""

import json

import jax
import numpy as np
import pytest

from tests import toys, toys_text
from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.run.folder import RunFolder
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import safetensors_saver
from tunix.models.automodel import AutoModel


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  """A model like the student's, with other weights."""
  folder = runs.write_model(tmp_path_factory.mktemp("distill") / "teacher")
  model = AutoModel.from_config(AutoModel.from_pretrained(folder).config, seed=8)
  tokenizer = toys_text.chat_tokenizer("chatml")
  safetensors_saver.save_pretrained(
    model, folder, hf_fields={"eos_token_id": tokenizer.eos_id()}
  )
  return folder


@pytest.fixture(scope="module")
def other_teacher(tmp_path_factory):
  """A model with another vocabulary, BOS, end of a turn and chat template."""
  folder = tmp_path_factory.mktemp("other") / "teacher"
  tokenizer = TokenizerAdapter(
    toys_text.metaspace(),
    chat_template=toys_text.LLAMA2,
    bos_token="<s>",
    eos_token="</s>",
  )
  model = toys.model(5, vocab_size=tokenizer.vocab_size)
  safetensors_saver.save_pretrained(
    model, folder, hf_fields={"eos_token_id": tokenizer.eos_id()}
  )
  tokenizer.save(folder)
  return folder


@pytest.fixture
def keys(settings, teacher):
  return settings | {"job": "distill", "distill__teacher": teacher}


ON_POLICY = {
  "data__max_length": None,
  "distill__on_policy_fraction": 0.5,
  "rollout__max_prompt_length": 40,
  "rollout__max_tokens_to_generate": 20,
}

GRADIENT = ON_POLICY | {
  "distill__on_policy_fraction": 1,
  "distill__strategy": "policy_gradient",
}

ALIGNED = GRADIENT | {
  "distill__align": "text",
  "distill__max_teacher_prompt_length": 80,
}

SELF = ON_POLICY | {
  "distill__on_policy_fraction": 1,
  "distill__teacher": None,
  "distill__self_teacher": "average",
  "distill__max_teacher_prompt_length": 200,
}


def train(keys, **more):
  given = {name: value for name, value in (keys | more).items() if value is not None}
  return runs.tunix("train", *runs.arguments(**given))


def everything(folder):
  names = ["logs/metrics.jsonl", "export/model.safetensors"]
  return {name: (folder / name).read_bytes() for name in names}


def losses(folder):
  return [record["loss"] for _, record in sorted(runs.metrics(folder).items())]


def test_a_run_trains_and_exports_the_student(keys, teacher, eval_file, model, capsys):
  keys = keys | {"distill__alpha": 1, "training__learning_rate": "1e-3"}
  assert train(keys, data__eval=eval_file) == 0
  said = capsys.readouterr().out
  assert f"taught by {teacher}; 4 steps" in said
  steps = runs.metrics(keys["output_dir"])
  assert steps[4]["distill/kl_div"] < steps[1]["distill/kl_div"]
  assert sorted(runs.metrics(keys["output_dir"], "eval")) == [0, 4]
  before = AutoModel.from_pretrained(model)
  after = AutoModel.from_pretrained(keys["output_dir"] / "export")
  assert jax.tree.structure(before) == jax.tree.structure(after)


@pytest.mark.parametrize(
  "more",
  [
    pytest.param({}, id="rows"),
    pytest.param(ON_POLICY, id="on-policy", marks=[pytest.mark.slow, pytest.mark.ci]),
    pytest.param(SELF, id="self", marks=pytest.mark.slow),
  ],
)
def test_a_run_that_is_resumed_is_the_same(keys, more, tmp_path, capsys):
  keys = keys | more
  assert train(keys, output_dir=tmp_path / "whole") == 0
  assert train(keys, training__max_steps=2) == 0
  assert train(keys) == 0
  assert "resuming after step 2" in capsys.readouterr().out
  assert everything(tmp_path / "whole") == everything(keys["output_dir"])


@pytest.mark.slow
@pytest.mark.parametrize(
  "more",
  [
    pytest.param({}, id="rows"),
    pytest.param({"distill__top_k": 5, "distill__cache": "cache"}, id="cache"),
    pytest.param(ON_POLICY, id="on-policy"),
    pytest.param(GRADIENT, id="policy-gradient"),
    pytest.param(SELF, id="self"),
  ],
)
def test_eight_devices_train_as_one(keys, more, tmp_path, eval_file):
  keys = keys | more | {"data__eval": eval_file}
  keys |= {"training__global_batch_size": 8, "training__micro_batch_size": 4}
  found = []
  for mesh in (None, "{fsdp: 4, tp: 2}"):
    changed = {} if mesh is None else {"mesh": mesh}
    changed["output_dir"] = tmp_path / str(len(found))
    if "distill__cache" in more:
      changed["distill__cache"] = tmp_path / f"cache{len(found)}"
    assert train(keys, **changed) == 0
    steps = (runs.metrics(changed["output_dir"], *kind) for kind in ((), ("eval",)))
    found.append([part[i]["loss"] for part in steps for i in sorted(part)])
  assert len(set(found[0])) > 3
  assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_a_cache_stands_for_the_teacher(keys, tmp_path, capsys):
  cached = keys | {"distill__top_k": 5, "training__max_steps": 2}
  out = [tmp_path / name for name in ("asked", "filled", "read")]
  assert train(cached, output_dir=out[0]) == 0
  cached = cached | {"distill__cache": tmp_path / "cache"}
  assert train(cached, output_dir=out[1]) == 0
  assert train(cached, output_dir=out[2], distill__teacher=None) == 0
  assert losses(out[1]) == losses(out[2])
  assert losses(out[0]) == pytest.approx(losses(out[1]), rel=1e-5)
  assert train(cached, output_dir=tmp_path / "other", distill__temperature=3) == 2
  assert "at temperature 3.0" in capsys.readouterr().err


def test_the_student_answers_itself(keys, tmp_path, capsys, eval_file):
  keys = keys | ON_POLICY | {"training__max_steps": 2, "data__eval": eval_file}
  prompts = [{"prompt": f"How many days {i}"} for i in range(15)]
  prompts.append({"prompt": "Who runs", "response": "longer than the limit " * 9})
  file = tmp_path / "prompts.jsonl"
  file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
  alone = {"data__train": file, "distill__on_policy_fraction": 1.0}
  assert train(keys | alone) == 0
  said = capsys.readouterr().out
  assert "in 100% of the steps the student writes, with at most 20 tokens" in said
  assert "train data: 16 prompts: 16 kept; the longest prompt has" in said
  assert "eval data: 6 completions: 6 kept" in said
  argv = runs.arguments(**{k: v for k, v in keys.items() if v is not None})
  assert runs.tunix("data", "show", *argv, "--rows=1") == 0
  assert "completion, " in capsys.readouterr().out
  argv += runs.arguments(**alone)
  assert runs.tunix("data", "show", *argv, "--rows=1") == 0
  shown = capsys.readouterr().out
  assert "prompt, " in shown and "response" not in shown


def test_a_student_teaches_itself(keys, capsys):
  """The teacher reads the answer of the record; its prompt is no longer than needed."""
  assert train(keys | SELF, training__max_steps=2) == 0
  said = capsys.readouterr().out
  assert "taught by itself (average weights) with a demonstration" in said
  assert "the longest teacher prompt has" in said
  assert runs.metrics(keys["output_dir"])[2]["distill/kl_div"] > 0


def test_a_teacher_with_another_tokenizer(keys, other_teacher, capsys):
  """It reads the question in its own template, and a resumed run is the same."""
  keys = keys | ALIGNED | {"distill__teacher": other_teacher}
  alone = dict.fromkeys(("distill__align", "distill__max_teacher_prompt_length"))
  assert train(keys | alone) == 2
  error = capsys.readouterr().err
  assert "the tokenizers differ" in error and "distill.align=text" in error
  assert train(keys, training__max_steps=2) == 0
  assert "the longest teacher prompt has" in capsys.readouterr().out
  assert np.isfinite(runs.metrics(keys["output_dir"])[2]["distill/reverse_kl"])
  file = other_teacher / "chat_template.jinja"
  before = file.read_text()
  file.write_text(before + "\n")
  try:
    assert train(keys, training__max_steps=3) == 2
    assert "the content of distill.align has changed" in capsys.readouterr().err
  finally:
    file.write_text(before)


@pytest.mark.slow
def test_an_aligned_run_that_is_resumed_is_the_same(keys, other_teacher, tmp_path):
  keys = keys | ALIGNED | {"distill__teacher": other_teacher}
  assert train(keys, output_dir=tmp_path / "whole") == 0
  assert train(keys, training__max_steps=2) == 0
  assert train(keys) == 0
  assert everything(tmp_path / "whole") == everything(keys["output_dir"])


@pytest.mark.slow
def test_records_name_their_teachers(keys, teacher, model, tmp_path, capsys):
  """The student as the second teacher: its divergence is 0 in the first step."""
  rows = [
    {"prompt": f"How many {i}", "task": "known" if i % 2 else "new"} for i in range(8)
  ]
  file = tmp_path / "tasks.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  several = SELF | {
    "data__train": file,
    "distill__self_teacher": None,
    "distill__max_teacher_prompt_length": None,
    "distill__teacher_column": "task",
    "training__max_steps": 1,
  }
  values = []
  for number, names in enumerate(({"known": model, "new": teacher}, {"new": model})):
    folders = {"known": model} | names
    given = several | {"distill__teachers": json.dumps(folders, default=str)}
    assert train(keys | given, output_dir=tmp_path / str(number)) == 0
    values.append(runs.metrics(tmp_path / str(number))[1]["distill/kl_div"])
  assert values[0] > 1e-4 and abs(values[1]) < 1e-5
  given["distill__teachers"] = json.dumps({"known": str(model)})
  assert train(keys | given, output_dir=tmp_path / "2") == 2
  assert "'task' is 'new'; expected the name of a teacher" in capsys.readouterr().err


@pytest.mark.slow
def test_the_policy_gradient(keys):
  keys = keys | ON_POLICY | {"distill__strategy": "policy_gradient"}
  assert train(keys, distill__on_policy_fraction=1.0) == 0
  assert "distill/reverse_kl" in runs.metrics(keys["output_dir"])[1]


def test_another_teacher_cannot_resume(keys, model, capsys):
  assert train(keys, training__max_steps=1) == 0
  assert train(keys, training__max_steps=2, distill__teacher=model) == 2
  assert "distill.teacher" in capsys.readouterr().err


def test_another_of_several_teachers_cannot_resume(tmp_path):
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)
  words = ["--distill.teachers={a: one, b: two}", "--distill.teacher_column=task"]
  words += ["--distill.on_policy_fraction=1", "--rollout.max_prompt_length=8"]
  words += ["--rollout.max_tokens_to_generate=8", "--model.path=student"]
  config = config_lib.load(["--job=distill", *words])
  folder = RunFolder(tmp_path)
  folder.start(config, {"teachers.a": "1", "teachers.b": "2"}, {})
  folder.check_resume(config, {"teachers.a": "1", "teachers.b": "2"})
  with pytest.raises(ValueError, match=r"content of distill\.teachers has changed"):
    folder.check_resume(config, {"teachers.a": "1", "teachers.b": "3"})


def test_records_that_end_with_no_answer(keys, tmp_path, capsys):
  turns = [{"role": "user", "content": "How"}] * 2
  (tmp_path / "d.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
  assert train(keys | ON_POLICY, data__train=tmp_path / "d.jsonl") == 2
  assert "d.jsonl:1: the last message has the role 'user'" in capsys.readouterr().err
  (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
  assert train(keys | ON_POLICY, data__train=tmp_path / "d.jsonl") == 2
  assert 'd.jsonl:1: expected {"prompt"' in capsys.readouterr().err


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"distill__teacher": None}, "distill.teacher is not set"),
    ({"distill__teacher": "/no/such"}, "/no/such"),
    ({"distill__alpha": 2}, "distill.alpha is 2.0"),
    ({"distill__jsd_beta": 0.5}, "distill: "),
    ({"distill__strategy": "policy_gradient"}, "distill.on_policy_fraction not set"),
    ({"distill__teacher": None, "distill__teacher_dtype": "bfloat16"}, "teacher_dtype"),
    ({"rollout__temperature": 0.5}, "rollout.temperature is 0.5 and distill.on_policy"),
    ({"rollout__engine": "padded"}, "it belongs to the jobs grpo and ppo"),
    ({"rollout__slots": 4}, "it belongs to the jobs grpo and ppo"),
    (ON_POLICY | {"data__packing": "true"}, "data.packing is True and distill.on_pol"),
    (
      {"data__pad_to": "longest", "distill__cache": "x"},
      "data.pad_to is 'longest' and distill.cache is '",
    ),
    (ON_POLICY | {"distill__on_policy_fraction": 2}, "on_policy_fraction is 2.0"),
    (
      ON_POLICY | {"rollout__max_tokens_to_generate": 4},
      "rollout.max_tokens_to_generate is 4",
    ),
    (ON_POLICY | {"distill__cache": "x"}, "distill.cache is 'x'"),
    (
      GRADIENT | {"distill__alpha": 1},
      "distill.alpha is 1.0 and distill.strategy 'policy_gradient'",
    ),
    (GRADIENT | {"distill__on_policy_fraction": 0.5}, "distill.on_policy_fraction 0.5"),
    (GRADIENT | {"rollout__top_p": 0.5}, "rollout.top_p is 0.5 and distill.strategy"),
    (GRADIENT | {"rollout__top_k": 5}, "rollout.top_k is 5 and distill.strategy"),
    (GRADIENT | {"rollout__min_p": 0.5}, "rollout.min_p is 0.5 and distill.strategy"),
    (
      GRADIENT | {"distill__temperature": 2},
      "distill.temperature is 2.0, rollout.temp",
    ),
    ({"job": "sft"}, "it belongs to the job distill"),
    ({"distill__self_teacher": "average"}, "distill.self_teacher is 'average' and dis"),
    (
      SELF | {"distill__on_policy_fraction": None, "rollout__max_prompt_length": None},
      "self_teacher is 'average' and distill.on_policy_fraction not set",
    ),
    (SELF | {"distill__template": "{prompt}"}, "without {demonstration}"),
    (ON_POLICY | {"distill__average_rate": 0.1}, "distill.average_rate is 0.1, and"),
    (
      ON_POLICY | {"distill__teacher_column": "x"},
      "distill.teacher_column is 'x', and",
    ),
    (
      SELF | {"distill__max_teacher_prompt_length": 4},
      "distill.max_teacher_prompt_length is 4",
    ),
    (ON_POLICY | {"distill__align": "text"}, "distill.align is 'text', distill.strat"),
    (SELF | {"distill__demonstration": "hint"}, "the 'hint' is None; expected a text"),
  ],
  ids=str,
)
def test_bad_settings_are_one_line(keys, capsys, changed, message):
  assert train(keys, **changed) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1
  assert not keys["output_dir"].exists()


def test_another_tokenizer_is_refused(keys, tmp_path, capsys):
  folder = runs.write_model(tmp_path / "other")
  toys_text.chat_tokenizer("llama3").save(folder)
  assert train(keys, distill__teacher=folder) == 2
  assert "the tokenizers differ" in capsys.readouterr().err
