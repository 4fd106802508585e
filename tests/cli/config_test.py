"""Files and arguments become a checked configuration, or an error that says where."""

import re

import pytest

from tunix.cli import config as config_lib
from tunix.cli.settings import spelling, yaml_text
from tunix.perf.metrics import PerfMetricsOptions
from tunix.sft.metrics import backends as metrics_backends


def load(*argv):
  return config_lib.load(list(map(str, argv)))


def file(folder, text, name="mine.yaml"):
  path = folder / name
  path.write_text(text)
  return path


def test_later_files_and_then_arguments_override_key_by_key(tmp_path):
  a = file(tmp_path, "training: {max_steps: 1, learning_rate: 1e-4}\nseed: 1", "a.yaml")
  b = file(tmp_path, "training: {max_steps: 2}", "b.yaml")
  config = load("--config", f"{a},{b}", "--seed=3")
  assert config.training.max_steps == 2
  assert config.training.learning_rate == 1e-4
  assert config.seed == 3
  assert load(a, b, "--seed", 3) == config


def test_bare_base_config_is_the_packaged_one(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert load("--config", "base_config.yaml") == load()
  file(tmp_path, "seed: 4", "base_config.yaml")
  assert load("--config", "base_config.yaml").seed == 4


def test_open_mappings_gain_entries_and_null_empties_them(tmp_path):
  a = file(tmp_path, "optimizer: {args: {b1: 0.8}}\nmesh: {fsdp: 2}", "a.yaml")
  b = file(tmp_path, "optimizer: {args: {b2: 0.9}}\nmesh:", "b.yaml")
  config = load(a, b, "--optimizer.args.eps=1e-6", "--mesh={tp: 4}")
  assert config.optimizer.args == {"b1": 0.8, "b2": 0.9, "eps": 1e-6}
  assert config.mesh == {"tp": 4}


def test_an_empty_section_says_nothing(tmp_path):
  assert load(file(tmp_path, "lora:\n  # rank: 8\n")) == load()


def test_an_optional_section_of_no_keys_is_all_its_defaults(tmp_path):
  asked = file(tmp_path, "training: {perf_metrics_options: {}}")
  options = load(asked).training.perf_metrics_options
  assert options == PerfMetricsOptions()
  assert load("--training.perf_metrics_options={}").training == load(asked).training
  assert load().training.perf_metrics_options is None


def test_scalars_are_those_of_yaml_1_2(tmp_path):
  text = "output_dir: no\nseed: 010\ntraining: {learning_rate: 1e-4}\n"
  config = load(file(tmp_path, text))
  assert config.output_dir == "no"
  assert config.seed == 10
  assert config.training.learning_rate == 1e-4


def test_text_on_the_command_line_stays_text():
  config = load(
    "--logging.run_name=17", "--output_dir", "2024-01-01", "--model.path=a: b"
  )
  assert config.logging.run_name == "17"
  assert config.output_dir == "2024-01-01"
  assert config.model.path == "a: b"
  assert load("--output_dir=null").output_dir is None


def test_lists_and_booleans_on_the_command_line():
  config = load(
    "--lora.rank=2", "--lora.targets=[q_proj, v_proj]", "--data.packing=true"
  )
  assert config.lora.targets == ("q_proj", "v_proj")
  assert config.data.packing is True


def test_dump_reads_back(tmp_path):
  config = load(
    "--training.learning_rate=1e-5",
    "--lora.rank=2",
    "--lora.targets=[q_proj]",
    "--mesh.fsdp=2",
    "--model.path=a: b: c",
  )
  assert load(file(tmp_path, config_lib.dump(config))) == config


def test_dataset_name_is_another_name_of_data_train():
  assert load("--dataset_name=a.jsonl") == load("--data.train=a.jsonl")
  with pytest.raises(ValueError, match="two names of one setting"):
    load("--dataset_name=a.jsonl", "--data.train=b.jsonl")


@pytest.mark.parametrize(
  ("argument", "nearest"),
  [
    ("--training.lerning_rate=1", "training.learning_rate"),
    ("--learning_rate=1", "training.learning_rate"),
    ("--optimiser.name=adam", "optimizer.name"),
    ("--training.lr=1", "training.learning_rate"),
    ("--max_step=1", "training.max_steps"),
    ("--teacher.path=x", "distill.teacher"),
    ("--training.checkpoint_every=1", "checkpoint.save_every_n_steps"),
    ("--training.checkpoint_each_steps=1", "checkpoint.save_every_n_steps"),
    ("--training.prompt_length=1", "rollout.max_prompt_length"),
  ],
)
def test_unknown_keys_name_the_nearest_known_one(argument, nearest):
  with pytest.raises(ValueError, match=rf"unknown: did you mean {nearest}\?"):
    load(argument)


BACKENDS = "logging.tensorboard, logging.wandb or logging.console"


def test_the_named_backends_are_all_there_are():
  always = {"jsonl"}
  assert {f"logging.{x}" for x in metrics_backends.BACKENDS.keys() - always} == set(
    re.findall(r"logging\.\w+", BACKENDS)
  )


@pytest.mark.parametrize(
  ("argument", "ours"),
  [
    ("--lr=1e-4", "training.learning_rate"),
    ("--num_train_epochs=1", "data.num_epochs"),
    ("--gradient_accumulation_steps=4", "training.micro_batch_size: global_batch_size"),
    ("--precision=bf16", "model.dtype"),
    ("--early_stopping_patience=3", "training.best.patience"),
    ("--load_best_model_at_end=true", "export.checkpoint: best"),
    ("--lora_r=8", "lora.rank"),
    ("--max_seq_length=8", "data.max_length"),
    ("--report_to=trackio", BACKENDS),
    ("--logging.trackio=true", BACKENDS),
    ("--logging.mlflow=true", BACKENDS),
    ("--logging.backends=[neptune]", BACKENDS),
  ],
)
def test_options_of_other_libraries_are_named_as_ours(argument, ours):
  with pytest.raises(ValueError, match=f"unknown: here it is {ours}"):
    load(argument)


def test_what_is_named_for_other_libraries_is_a_key():
  keys = config_lib.known_keys()
  for theirs, ours in spelling.ELSEWHERE.items():
    named = re.findall(r"\b[a-z]+\.[a-z_]+", ours)
    assert theirs not in keys and set(named) <= keys.keys(), ours
  assert spelling.ELSEWHERE.keys().isdisjoint(spelling.ALIASES)


def test_unknown_keys_and_wrong_types_name_their_file(tmp_path):
  with pytest.raises(ValueError, match=r"mine\.yaml: the key 'training.step' is unk"):
    load(file(tmp_path, "training: {step: 1}"))
  with pytest.raises(ValueError, match=r"mine\.yaml: training.max_steps is the text"):
    load(file(tmp_path, "training: {max_steps: many}"))
  with pytest.raises(ValueError, match=r"mine\.yaml: training.max_steps is 0"):
    load(file(tmp_path, "training: {max_steps: 0}"))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("seed: 1\nseed: 2", "twice"),
    (
      "training: &a\n  loss: *a",
      r"mine\.yaml: the key 'training.loss' contains itself",
    ),
    ("seed: &a [1, [*a]]", r"mine\.yaml: the key 'seed.1.0' contains itself"),
    (
      "a0: &a0 {k: 1, l: 2}\n"
      + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40)),
      r"mine\.yaml: the key 'a.*' and its aliases have more than 1,000,000 values",
    ),
    ("seed: [1", r"mine\.yaml:1: invalid YAML"),
    ("seed: " + "[" * 5000, r"mine\.yaml: nested too deeply"),
    ("optimizer: {args: {1: 2}}", r"the mapping \{1: 2\}, expected a mapping of names"),
    ("- 1", "holds the list"),
    ("training: 3", "training is the number 3, expected keys below it"),
    ("mesh: 8", "mesh is the number 8, expected a mapping"),
    ("mesh: {fsdp: two}", "mesh.fsdp is the text 'two', expected a whole number"),
    ("data: {packing: 1}", "expected true or false"),
    ("data: {packing: yes}", "expected true or false"),
    ("lora: {rank: true}", "lora.rank is true, expected a whole number"),
    ("training: {max_steps: 1e3}", "expected a whole number"),
    ("training: {learning_rate: '1e-4'}", "the text '1e-4', expected a number"),
    ("data: {overlong: cut}", "expected one of error, truncate, drop"),
    ("job: spin", "expected one of sft, dpo, orpo, kto, reward"),
    ("lora: {rank: 2, targets: q_proj}", "expected a list of names"),
    ("logging: {run_name: 17}", "expected text"),
  ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
  with pytest.raises(ValueError, match=message):
    load(file(tmp_path, text))


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--training.learning_rate=-1e-5"], "training.learning_rate is -1e-05"),
    (["--training.learning_rate=.nan"], "training.learning_rate is nan"),
    (["--training.global_batch_size=8", "--training.micro_batch_size=3"], "multiple"),
    (["--training.max_grad_norm=0"], "training.max_grad_norm is 0"),
    (["--training.eval_every_n_steps=5"], "data.eval is not set"),
    (["--training.best.metric=loss"], "training.best is set and data.eval is not"),
    (
      ["--training.best.patience=3", "--data.eval=e.jsonl"],
      "best.patience is 3 and training.eval_every_n_steps is not set",
    ),
    (
      ["--training.best.metric=rewards/accuracy", "--data.eval=e.jsonl"],
      "training.best.metric is 'rewards/accuracy' and greater_is_better is not set",
    ),
    (["--export.checkpoint=best"], "export.checkpoint is 'best' and training.best"),
    (
      ["--export.checkpoint=best", "--export.kind=none"],
      "export.checkpoint is 'best' and export.kind 'none'",
    ),
    (
      ["--data.max_length=1"],
      "--data.max_length: data.max_length is 1: it must be a whole number of at",
    ),
    (["--data.num_threads=-1"], "data.num_threads is -1"),
    (["--checkpoint.max_to_keep=0"], "checkpoint.max_to_keep is 0"),
    (
      ["--checkpoint.every_n_steps=5", "--checkpoint.min_interval_secs=60"],
      "checkpoint.save_every_n_steps is 5",
    ),
    (["--seed=-1"], "seed is -1"),
    (["--lora.rank=0"], "lora.rank is 0"),
    (["--lora.alpha=16"], "lora.alpha is set and lora.rank is not"),
    (["--lora.targets=[q_proj]"], "lora.targets is set and lora.rank is not"),
    (["--lora.rank=2", "--lora.alpha=0"], "lora.alpha is 0"),
    (["--model.path=a", "--model.name=qwen3_0p6b"], "model.path is 'a' and model.name"),
    (["--model.args.num_layers=2"], "model.name is not set"),
    (["--schedule.args.decay_steps=2"], "schedule.name is not"),
    (["--optimizer.args.learning_rate=1"], "optimizer.args.learning_rate is set"),
    (["--export.kind=adapter"], "lora.rank is not set"),
    (["--export.kind=full", "--lora.rank=2"], "export.kind is 'full' and lora.rank"),
    (["--export.dtype=bfloat16", "--lora.rank=2"], "export.dtype is 'bfloat16'"),
    (["--export.dtype=bfloat16", "--export.kind=none"], "export.kind 'none'"),
    (["--mesh.fsdp=3"], "3 shards"),
    (["--mesh.fsdp=8", "--training.micro_batch_size=4"], "micro_batch_size is 4"),
    (["--mesh.fsdp=8", "--training.eval_batch_size=4"], "eval_batch_size is 4"),
    (["--mesh.model=2"], "mesh.model is no axis"),
    (["--mesh.tp=0"], "mesh.tp is 0"),
  ],
)
def test_values_out_of_range_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    load(*arguments)


def test_tensor_parallel_axes_do_not_split_the_batch():
  assert load("--mesh.tp=8", "--training.global_batch_size=3").mesh == {"tp": 8}


def test_an_argument_without_a_value_is_refused():
  for argv in (["--seed"], ["--seed", "--job=sft"]):
    with pytest.raises(ValueError, match=r"--seed has no value: write --seed=VALUE"):
      load(*argv)


def test_no_such_file(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"none\.yaml': no such file"):
    load(tmp_path / "none.yaml")
  with pytest.raises(FileNotFoundError, match="a folder"):
    load(tmp_path)


@pytest.mark.parametrize(
  "text", ["1e-4", ".5e3", "5", "010", "no", "null", "a: b", "out #1", "", "a\nb"]
)
def test_texts_are_written_as_texts(text):
  for write in yaml_text.inline, yaml_text.lines:
    assert yaml_text.parse(write(text), "here") == text
  assert yaml_text.inline([5, 1.0, True, None]) == "[5, 1.0, true, null]"
