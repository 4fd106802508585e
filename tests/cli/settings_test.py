"""Every key reaches what is built; files and folders of before go on working; help,
reference and schema say what the dataclasses say."""

import dataclasses
import json
import pathlib
import re
import typing

import jsonschema
import pytest
import yaml

from tests.cli import runs
from tunix.cli import config as config_lib, reference
from tunix.cli.commands import init
from tunix.cli.jobs import rl
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import former as former_lib, training
from tunix.cli.run.folder import RunFolder
from tunix.cli.run.settle import settle_values
from tunix.cli.settings import keys, rates, spelling, yaml_text
from tunix.cli.settings.convert import Choice, convert, options, plain, section_of
from tunix.rl.config import PromptSizes
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.config import TrainingConfig
from tunix.sft.loop.run import TrainResult
from tunix.sft.metrics_logger import Mode
from tunix.utils.setting import shared_values

BEFORE = sorted((pathlib.Path(__file__).parent / "before").glob("*.yaml"))

# Values for keys where one made of the type would be refused.
VALUES = {
  "data.length_buckets": [64],
  "data.pad_to": "max_length",
  "data.columns": {"prompt": "question"},
  "seed": 5,
  "model.name": "qwen3_0p6b",
  "data.template_args": {"mark": "seven"},
  "optimizer.args": {"b2": 0.5},
  "training.micro_batch_size": 4,
  "training.eval_every_n_steps": 3,
  "mesh": {"tp": 2},
  "export.kind": "none",
  "lora.dropout": 0.5,
  "preference.loss": "simpo",
  "preference.options": {"gamma": 0.5},
  "preference.label_smoothing": 0.25,
  "rollout.kv_cache_size": 4096,
  "rollout.engine": "vllm",
  "rollout.eos_tokens": [2],
  "rl.train_micro_batch_size": 1,
  "reward.weights": [0.5],
  "distill.strategy": "logit",
  "algorithm.kl_method": "k2",
  "algorithm.num_generations": 6,
  "algorithm.epsilon": 0.25,
  "rl.rollout_mesh": {"tp": 3},
  "algorithm.epsilon_low": 0.125,
  "algorithm.epsilon_high": 0.625,
  "algorithm.epsilon_c": 9.0,
  "algorithm.loss_algo": "cispo",
  "algorithm.loss_agg_mode": "sequence-mean-token-sum",
  "algorithm.advantage_estimator": "batch_normalized",
  "algorithm.gamma": 0.5,
  "algorithm.gae_lambda": 0.5,
  "algorithm.distill_weight": 0.5,
  "algorithm.template": "{prompt} {hints}",
  "algorithm.solution_template": "So: {solution}",
  "algorithm.feedback_template": "But: {feedback}",
  "distill.teachers": {"math": "teacher"},
  "distill.template": "{prompt} {demonstration}",
}
ON_POLICY = {"distill.teacher": None, "distill.on_policy_fraction": 1.0}
SELF = ON_POLICY | {
  "distill.self_teacher": "average",
  "distill.template": "{prompt} {demonstration}",
}
ALIGNED = {
  "distill.teacher": "teacher",
  "distill.align": "text",
  "distill.strategy": "policy_gradient",
  "distill.on_policy_fraction": 1.0,
}
# What else a key needs, to be set at all.
NEEDS = {
  "model.revision": {"model.path": "owner/name"},
  "model.images": {"model.path": "owner/name"},
  "model.args": {"model.name": "qwen3_0p6b"},
  "model.quantize": {"lora.rank": 2},
  "compilation_cache_key": {"compilation_cache": "programs"},
  "schedule.args": {"schedule.name": "cosine_decay_schedule"},
  "training.eval_every_n_steps": {"data.eval": "eval.jsonl"},
  "export.checkpoint": {"training.best": {"metric": "loss"}, "data.eval": "e.jsonl"},
  "preference.options": {"preference.loss": "simpo"},
  "rollout.engine_options": {"rollout.engine": "vllm"},
  "reward.weights": {"reward.functions": ["exact_match"]},
  "reward.timeout_s": {"reward.workers": 1},
  "rl.reference": {"algorithm.beta": 0.1},
  "rl.lag": {"rl.schedule": "lagged"},
  "rl.replay": {"rl.schedule": "greedy"},
  "rl.rollout_hosts": {"rollout.engine": "remote"},
  "data.stream": {"training.max_steps": 3},
  "distill.self_teacher": ON_POLICY,
  "distill.average_rate": SELF,
  "distill.template": SELF,
  "distill.demonstration": SELF,
  "distill.max_teacher_prompt_length": SELF,
  "distill.align": ALIGNED,
  "distill.teachers": ON_POLICY | {"distill.teacher_column": "subject"},
  "distill.teacher_column": ON_POLICY | {"distill.teachers": {"math": "teacher"}},
  "data.shuffle_buffer": {"data.stream": True, "training.max_steps": 3},
  "data.weights_at": {"data.train": ["a", "b"], "data.weights": [0.5, 0.5]},
  "distill.teacher_dtype": {"distill.teacher": "t"},
  "algorithm.kl_corrected": {"algorithm.beta": 0.1},
  "algorithm.observation_weight": {"env": "pkg.mod:make"},
}
# Another key's name, a name of one value, or one that the algorithm fixes.
FIXED = {
  ("grpo", "rloo"): {"loss_algo", "loss_agg_mode", "kl_corrected"},
  ("grpo", "cispo"): {"loss_algo", "epsilon_c"},
  ("grpo", "sapo"): {"loss_algo", "epsilon_c"},
  ("grpo", "reinforce++"): {"kl_corrected", "advantage_estimator"},
  ("ppo", "ppo"): {"advantage_estimator", "kl_corrected"},
}
# Keys that a job has and refuses to set.
REFUSED = {"distill": ("data.stream", "data.shuffle_buffer"), "reward": ("eval.",)}

# Parts of a row of the jobs on preferences.
PARTS = "prompt", "response"


def leaves():
  """(job, algorithm or None, key) of all that can be set."""
  for name, job in JOBS.items():
    for dotted, chosen, key in keys.walk(job.settings):
      fixed = dotted.partition(".")[2] in FIXED.get((name, chosen), ())
      fixed |= dotted.startswith(REFUSED.get(name, ()))
      if section_of(key.hint) is None and dotted.count(".") < 2 and not fixed:
        yield name, chosen, dotted, key


def another(dotted, key):
  """A value that is not the default, made of the type."""
  if dotted in VALUES:
    return VALUES[dotted]
  kind = options(key.hint)[0]
  origin = typing.get_origin(kind)
  if origin is typing.Literal:
    return next(v for v in typing.get_args(kind) if v != key.default)
  if origin is not None:
    inner = typing.get_args(kind)
    if len(inner) == 2 and inner[1] is not ...:
      return {3: [0.25, 0.75]} if inner[0] is int else {"q_proj": 3}
    return {float: [1.0], int: [3]}.get(inner[0], ["q_proj"])
  default = 0 if key.default in (None, keys.REQUIRED) else key.default
  made = {bool: not default, str: "other", "float16": "float16"}
  if kind in made:
    return made[kind]
  return default + 2 if kind is int else default + 0.5 if kind is float else "float16"


def layer(values):
  nested = {}
  for dotted, value in values.items():
    section, _, name = dotted.rpartition(".")
    (nested.setdefault(section, {}) if section else nested)[name] = value
  return nested


def test_every_key_of_every_job_reaches_its_dataclass():
  seen = 0
  for job, chosen, dotted, key in leaves():
    if dotted == "job":
      continue
    value = another(dotted, key)
    values = {"job": job} | NEEDS.get(dotted, {}) | {dotted: value}
    if chosen is not None:
      values["algorithm.name"] = chosen
    if dotted.startswith("episode."):
      values |= {"env": "pkg.mod:make", "episode.isolation": "process", dotted: value}
    if dotted.startswith("eval.") and dotted != "eval.env":
      values["eval.env"] = "reasoning_gym:chain_sum"
    if dotted.startswith("lora.") and dotted != "lora.rank":
      values["lora.rank"] = 2
    config = config_lib.from_layers([("here", layer(values))])
    assert isinstance(config, JOBS[job].settings)
    found = keys.flatten(config)[dotted]
    assert found == plain(convert(value, key.hint, dotted)), (job, dotted)
    assert found != plain(key.default), (job, dotted)
    if chosen is not None:
      assert config.algorithm.__class__ is variants(job)[chosen]
    seen += 1
  assert seen > 400


def variants(job):
  kind = section_of(keys.of(JOBS[job].settings)["algorithm"].hint)
  assert isinstance(kind, Choice)
  return kind.classes


@pytest.mark.parametrize(
  ("job", "section", "kind"),
  [
    ("sft", "training", TrainingConfig),
    ("grpo", "rollout", RolloutConfig),
    ("grpo", "rl", PromptSizes),
  ],
)
def test_sections_are_what_the_library_is_given(job, section, kind, tmp_path):
  """Fields that both have are passed on as they are, all of them."""
  skipped = (
    *("checkpointing_options", "checkpoint_root_directory", "learning_rate"),
    *("data_sharding_axis", "pbar_description", "metrics_logging_options"),
    *("gradient_accumulation_steps", "seed"),
  )
  values = {"job": job, "training.eval_every_n_steps": 3, "data.eval": "e"}
  walked = keys.walk(JOBS[job].settings)
  for dotted, _, key in [(d, c, k) for d, c, k in walked if d.startswith(section)]:
    name = dotted.partition(".")[2]
    known = {f.name for f in dataclasses.fields(kind)}
    skip = name in ("engine_options", "learning_rate")
    if name in known and section_of(key.hint) is None and not skip:
      values[dotted] = another(dotted, key)
  if section == "rl":
    values["rl.mini_batch_size"], values["rl.train_micro_batch_size"] = 6, 2
  config = config_lib.from_layers([("here", layer(values))])
  given = {
    "training": lambda: training.training_options(config, tmp_path, 0.1),
    "rollout": lambda: vars(next(iter(rl.rollout_configs(config).values()))),
    "rl": lambda: shared_values(PromptSizes, config.rl),
  }[section]()
  asked = {f.name for f in dataclasses.fields(kind)} - set(skipped)
  wanted = shared_values(kind, getattr(config, section))
  assert {n: plain(given[n]) for n in asked} == {n: plain(wanted[n]) for n in asked}


def test_filters_are_of_draws_and_not_of_greedy_evaluations():
  values = {"job": "grpo", "rollout.top_k": 5, "rollout.top_p": 0.9}
  for temperature, top_k in ((0, None), (0.5, 5)):
    asked = layer(values | {"rollout.eval_temperature": temperature})
    modes = rl.rollout_configs(config_lib.from_layers([("here", asked)]))
    assert (modes[Mode.TRAIN].top_k, modes[Mode.TRAIN].top_p) == (5, 0.9)
    assert modes[Mode.EVAL].temperature == temperature
    assert modes[Mode.EVAL].top_k == top_k


@pytest.mark.parametrize("job", ["dpo", "orpo", "kto", "reward"])
def test_a_preference_trainer_is_given_its_section(job, tmp_path):
  config = config_lib.from_layers([("here", {"job": job})])
  options = training.training_options(config, tmp_path, 0.1)
  made = config.preference.trainer_config(**options)
  assert isinstance(made, TrainingConfig)
  assert made.checkpointing_options is config.checkpoint
  only_keys = {"unusable", "reference", "reference_logps"}
  for name in keys.of(type(config.preference)).keys() - only_keys:
    assert getattr(made, name) == getattr(config.preference, name)


# Files and folders of before.


@pytest.mark.parametrize("file", BEFORE, ids=lambda file: file.stem)
def test_files_of_before_load_to_the_same_values(file):
  old = yaml.safe_load(file.read_text())
  config = config_lib.load([str(file)])
  assert config.job == old["job"]
  now = keys.flatten(config)
  for section, values in old.items():
    for name, value in values.items() if isinstance(values, dict) else [("", values)]:
      dotted = f"{section}.{name}".rstrip(".")
      dotted = (spelling.ALIASES | spelling.RENAMED).get(dotted, dotted)
      if value not in (None, [], {}) and dotted in now:
        found = now[dotted]
        if dotted == "data.max_length" and "preference.unusable" in now:
          # It was a key of other jobs then.
          value = sum(old["preference"][f"max_{name}_length"] for name in PARTS)
        if isinstance(value, dict) and isinstance(found, dict):
          found = {key: found[key] for key in value}  # others have their defaults
        assert found == ([value] if found == [value] else value), dotted


def _without_empty(file):
  values = yaml.safe_load(file.read_text())
  sections = {name: s for name, s in values.items() if isinstance(s, dict)}
  left = {name: {k: v for k, v in s.items() if v != {}} for name, s in sections.items()}
  return values | left


# The file of all defaults is no settled configuration, which a folder holds.
@pytest.mark.parametrize(
  "file", [f for f in BEFORE if f.stem != "base_config"], ids=lambda file: file.stem
)
def test_folders_of_before_resume(file, tmp_path):
  """A folder's config.yaml, and what the same command gives now, differ in nothing."""
  folder = RunFolder(tmp_path)
  (tmp_path / "config.yaml").write_text(file.read_text())
  (tmp_path / "data.json").write_text('{"sha256": {}}')
  (tmp_path / "checkpoints" / "2").mkdir(parents=True)
  # The command left these sections out: its folder said `{}` of them, and a file that
  # says so now asks for their defaults.
  (tmp_path / "given.yaml").write_text(yaml.dump(_without_empty(file)))
  given = config_lib.load([str(tmp_path / "given.yaml")])
  config = settle_values(folder.with_former(given), None)
  folder.check_resume(config, {})
  # What is written now says the same as what was written before.
  (tmp_path / "now.yaml").write_text(config_lib.dump(config))
  again = config_lib.load([str(tmp_path / "now.yaml")])
  folder.check_resume(again, {})
  (tmp_path / "result.json").write_text('{"steps": 4}')
  assert folder.result(again) == {"steps": 4}
  other = config_lib.load([str(file), "--seed=99"])
  with pytest.raises(ValueError, match=r"seed was . and is 99"):
    folder.check_resume(other, {})


@pytest.mark.parametrize("old", sorted(spelling.RENAMED | spelling.ALIASES))
def test_old_spellings_are_taken_and_named(old, capsys):
  new = (spelling.RENAMED | spelling.ALIASES)[old]
  value, other = {
    "checkpoint": ("7", "8"),
    "lora": ("true", "false"),
    "dataset_name": ("a.jsonl", "b.jsonl"),
    "model": ("nf4", "int8"),
  }[old.partition(".")[0]]
  lora = ["--lora.rank=2"] if old.startswith(("lora", "model")) else []
  assert config_lib.load([*lora, f"--{old}={value}"]) == config_lib.load(
    [*lora, f"--{new}={value}"]
  )
  noted = f"tunix: note: --{old}: {old} is called {new} now\n"
  assert capsys.readouterr().err == (noted if old in spelling.RENAMED else "")
  with pytest.raises(ValueError, match=f"--{old}: {old} is .* and {new} .* two names"):
    config_lib.load([*lora, f"--{old}={value}", f"--{new}={other}"])


def test_null_below_an_algorithm_is_its_own_default():
  words = ["--job=grpo", "--algorithm.name=dapo", "--algorithm.epsilon_high=null"]
  assert config_lib.load(words).algorithm.epsilon_high == 0.28


def test_a_section_that_may_be_absent(tmp_path):
  assert config_lib.load([]).lora is None
  assert config_lib.load(["--lora.rank=null"]).lora is None
  profiled = config_lib.load(
    [
      "--training.profiler_options.log_dir=trace",
      "--training.profiler_options.skip_first_n_steps=1",
      "--training.profiler_options.profiler_steps=2",
    ]
  )
  assert profiled.training.profiler_options.profiler_steps == 2
  with pytest.raises(ValueError, match=r"set training\.profiler_options\.log_dir"):
    config_lib.load(["--training.profiler_options.profiler_steps=2"])


def lengths(*words, job="dpo"):
  """(tokens of a row, of a prompt, of a response) that the jobs on preferences read."""
  run = config_lib.load([f"--job={job}", *words])
  limits = run.preference
  return run.data.max_length, limits.max_prompt_length, limits.max_response_length


@pytest.mark.parametrize("job", ["dpo", "orpo", "kto", "reward"])
def test_one_key_sets_the_row_of_every_job_on_preferences(job):
  row, prompt, response = (
    "--data.max_length=65",
    "--preference.max_prompt_length=40",
    "--preference.max_response_length=16",
  )
  assert lengths(job=job) == (1024, 512, 512)
  assert lengths(row, job=job) == (65, 32, 33)
  assert lengths(row, prompt, job=job) == (65, 40, 25)
  assert lengths(row, response, job=job) == (65, 49, 16)
  # As before the key was there.
  assert lengths(prompt, job=job) == (552, 40, 512)
  assert lengths(prompt, response, job=job) == (56, 40, 16)
  run = config_lib.load([f"--job={job}", row, prompt])
  assert JOBS[job].length(run) == ("data.max_length", 65)
  assert run.row_keys(run.kind(training=True))["max_prompt_length"] == (
    "preference.max_prompt_length"
  )


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (
      {"data.max_length": 9, "preference.max_prompt_length": 9},
      r"preference.max_prompt_length is 9; expected at most 8, because data.max_length",
    ),
    (
      {"data.max_length": 9, "preference.max_response_length": 12},
      r"preference.max_response_length is 12; expected at most 8",
    ),
    (
      {
        "data.max_length": 9,
        "preference.max_prompt_length": 4,
        "preference.max_response_length": 4,
      },
      r"data.max_length is 9; expected 8, which is preference.max_prompt_length \+",
    ),
    ({"data.max_length": 1}, r"data.max_length is 1"),
  ],
  ids=str,
)
def test_lengths_that_contradict_each_other_are_refused(given, message):
  with pytest.raises(ValueError, match=message):
    lengths(*(f"--{key}={value}" for key, value in given.items()))


def test_keys_of_other_jobs_are_refused_unless_they_say_their_default():
  assert config_lib.load(["--rollout.max_prompt_length=256"]) == config_lib.load([])
  with pytest.raises(ValueError, match=r"--rollout.*it belongs to the jobs distill"):
    config_lib.load(["--rollout.max_prompt_length=9"])


# DAPO's default is true: in GRPO, which has no such thing, true is no default.
SAID_IN_VAIN = {
  "--algorithm.dynamic_sampling=true": ("grpo", "it belongs to the algorithm dapo"),
  "--algorithm.whiten_advantages=true": ("grpo", "it belongs to the job ppo"),
  "--algorithm.name=dapo": ("sft", "it belongs to the jobs grpo and ppo"),
  "--algorithm.beta=0.04": ("sft", "it belongs to the jobs grpo and ppo"),
}


@pytest.mark.parametrize("word", SAID_IN_VAIN)
def test_what_one_algorithm_has_is_no_default_of_another(word, tmp_path):
  job, remedy = SAID_IN_VAIN[word]
  key, _, value = word[2:].partition("=")
  section, _, name = key.partition(".")
  file = tmp_path / "mine.yaml"
  file.write_text(f"job: {job}\n{section}: {{{name}: {value}}}\n")
  for words in ([f"--job={job}", word], [str(file)]):
    with pytest.raises(ValueError, match=rf"{key} is .*{remedy}"):
      config_lib.load(words)
  config_lib.load([f"--job={job}", f"--{key}=null"])


@pytest.mark.parametrize("value", ["{x: 3}", "[sft]"])
def test_a_job_that_is_no_name_is_an_error_of_one_line(value):
  with pytest.raises(
    ValueError, match=r"--job: job is the .* expected one of sft, dpo"
  ):
    config_lib.load([f"--job={value}"])


def test_a_key_that_an_inner_section_has_not_is_unknown():
  words = [
    "--job=grpo",
    "--algorithm.name=dapo",
    "--algorithm.overlong_buffer={lon: 5}",
  ]
  with pytest.raises(
    ValueError, match=r"the key 'algorithm.overlong_buffer.lon' is un"
  ):
    config_lib.load(words)


def test_numbers_by_pattern_are_refused_by_their_own_key():
  for key in ("rank_pattern", "alpha_pattern"):
    with pytest.raises(ValueError, match=rf"--lora.{key}: lora.{key}.q_proj is 0"):
      config_lib.load(["--lora.rank=8", f"--lora.{key}={{q_proj: 0}}"])
  with pytest.raises(
    ValueError, match=r"lora.targets is empty: .*leave it out for all"
  ):
    config_lib.load(["--lora.rank=8", "--lora.targets=[]"])


def test_what_a_student_may_not_do_is_said_of_its_keys():
  words = ["--job=distill", "--distill.teacher=t", "--rollout.temperature=0"]
  with pytest.raises(ValueError, match=r"^rollout.temperature is 0.0: it must be a f"):
    JOBS["distill"].check(config_lib.load([*words, "--distill.on_policy_fraction=0.5"]))
  with pytest.raises(ValueError, match=r"distill.on_policy_fraction is not set: rows"):
    JOBS["distill"].check(config_lib.load(words))


def test_the_command_says_null_where_python_says_none():
  with pytest.raises(ValueError, match=r"training.max_steps is 0: .* or null$"):
    config_lib.load(["--training.max_steps=0"])


# What is told of the keys.


@pytest.mark.parametrize("job", JOBS)
def test_a_job_has_one_default_rate_for_each_kind_of_training(job, capsys):
  usual = rates.RATES[job]
  for words, rate in ([], usual.whole), (["--lora.rank=2"], usual.adapters):
    assert rate.low <= rate.default <= rate.high
    settled = settle_values(config_lib.load([f"--job={job}", *words]), 10)
    assert settled.training.learning_rate == rate.default
  for rank, rate in (8, usual.adapters), (None, usual.whole):
    made = init._values(job, {"lora.rank": rank})
    assert made["training.learning_rate"] == rate.default
  # Help, pages and `tunix init` show one table.
  assert f"Usual rates: {usual}." in " ".join(reference.describe_keys(job).split())
  written = init.configuration(job, "x").replace("#", "")
  assert f"Usual rates: {usual}." in " ".join(written.split())
  docs = runs.ROOT / "docs"
  row = f"| `training.learning_rate` | {usual}"
  assert row in (docs / "trainers" / f"{job}.md").read_text()
  row = f"| `{job}` | {usual.whole} | {usual.adapters} |"
  assert row in (docs / "guides" / "command.md").read_text()


def test_an_error_of_the_library_gets_the_key_of_the_command():
  config = config_lib.load(["--job=grpo"])
  for said, named in (
    ("mini_batch_size is 3: expected 4", "rl.mini_batch_size is 3: expected 4"),
    ("max_prompt_length is 3", "rollout.max_prompt_length is 3"),
    ("seed is 3", "seed is 3"),  # the run's, or that of the rollouts
    ("a prompt has 3 tokens", "a prompt has 3 tokens"),
    ("rl.mini_batch_size is 3", "rl.mini_batch_size is 3"),
  ):
    with pytest.raises(ValueError) as caught, keys.naming(config):
      raise ValueError(said)
    assert str(caught.value) == named
  with pytest.raises(UnicodeError), keys.naming(config):
    b"\xff".decode()


def test_batches_and_steps_are_in_words():
  load = lambda *words: config_lib.load([*words, "--data.packing=true"])
  whole, halves = load(), load("--training.micro_batch_size=4")
  assert JOBS["sft"].batch(whole).endswith("tokens, packed")
  assert JOBS["sft"].batch(halves).endswith("tokens, packed, in 2 micro-batches")
  assert "micro-batches" not in JOBS["dpo"].batch(config_lib.load(["--job=dpo"]))
  assert str(TrainResult(steps=1, ended_by="data")) == "1 step"
  assert str(TrainResult(steps=2, ended_by="data")) == "2 steps"


def test_groups_have_eight_completions_in_the_command_and_two_in_python():
  for words in [], ["--algorithm.name=dapo"], ["--algorithm.beta=0.1"]:
    config = config_lib.load(["--job=grpo", *words])
    assert config.algorithm.num_generations == 8
  one = ["--job=grpo", "--algorithm.num_generations=2"]
  assert config_lib.load(one).algorithm.num_generations == 2
  assert config_lib.load(["--job=ppo"]).algorithm.num_generations == 1
  assert GRPOConfig().num_generations == 2
  values = init._values("grpo", JOBS["grpo"].first_values)
  assert values["algorithm.num_generations"] == 8


def test_a_folder_of_before_keeps_the_defaults_that_have_changed():
  words = ["--job=grpo", "--lora.rank=2"]
  load = lambda *more: config_lib.load([*words, *more])
  before = load("--algorithm.num_generations=2", "--training.learning_rate=2e-4")
  written = keys.as_plain(settle_values(before, 10))
  del written["optimizer"]["decay_targets"], written["tokenizer"]
  former = former_lib.restore(load(), written)
  assert former.algorithm.num_generations == 2
  assert former.training.learning_rate == 2e-4
  written["rl"]["bucketed_lengths"] = False
  assert not former_lib.restore(load(), written).rl.bucketed_lengths
  del written["rl"]
  false = {key for key, value in spelling.FORMER_DEFAULTS.items() if value is False}
  assert former_lib._FORMERLY_FALSE.keys() == false  # files and folders agree
  pairs = {"preference": {"shared_prompt": False}}
  dpo = config_lib.load(["--job=dpo"])
  assert former_lib.restore(dpo, pairs).preference.shared_prompt is False
  assert former_lib.restore(dpo, {}).preference.shared_prompt is None
  assert former.optimizer.decay_targets == (".*",)
  written["algorithm"]["num_generations"] = None  # as older versions wrote it
  assert former_lib.restore(load(), written).algorithm.num_generations == 2
  schedule = "--schedule.name=cosine_decay_schedule"
  former = former_lib.restore(load(schedule), written)
  assert settle_values(former, 10).schedule.args["init_value"] == 2e-4
  # The first start of this version writes them down, and the second keeps them.
  written = keys.as_plain(settle_values(former, 10))
  assert former_lib.restore(load(schedule), written) == former
  # Values that are given, and folders of today, stay as they are.
  given = load(schedule, "--schedule.args.init_value=0.5")
  assert settle_values(former_lib.restore(given, written), 9).schedule.args == {
    "init_value": 0.5,
    "decay_steps": 9,
  }
  for values in (
    (),
    ("--algorithm.num_generations=2", "--training.learning_rate=2e-4"),
    ("--optimizer.decay_targets=[.*]", "--tokenizer.messages=given"),
  ):
    now = keys.as_plain(settle_values(load(*values), 10))
    assert former_lib.restore(load(), now) == load()


def test_a_folder_of_today_refuses_a_former_default_and_an_old_one_says_it(
  tmp_path, caplog
):
  folder, words = RunFolder(tmp_path), ["--job=grpo", "--lora.rank=2"]
  given = config_lib.load([*words, "--algorithm.num_generations=2"])
  (tmp_path / "checkpoints" / "2").mkdir(parents=True)
  folder.start(settle_values(given, 10), {}, {})
  now = folder.with_former(config_lib.load([*words, "--algorithm.num_generations=8"]))
  with pytest.raises(ValueError, match="num_generations was 2 and is 8"):
    folder.check_resume(settle_values(now, 10), {})
  assert not caplog.text
  old = yaml.safe_load(folder.config_file.read_text())
  del old["optimizer"]["decay_targets"]
  folder.config_file.write_text(yaml.safe_dump(old))
  folder.with_former(now)
  assert re.search("older version and .*algorithm.num_generations=2", caplog.text)


def test_base_config_is_what_the_dataclasses_say():
  assert yaml_text.BASE_PATH.read_text() == reference.base_config(), (
    "run python -m tunix.cli.reference"
  )


@pytest.mark.parametrize("job", JOBS)
def test_base_config_changes_nothing(job):
  words = ["--config=base_config.yaml", f"--job={job}"]
  assert config_lib.load(words) == config_lib.load([f"--job={job}"])


def test_every_key_has_a_meaning():
  bare = {
    dotted
    for job in JOBS.values()
    for dotted, _, key in keys.walk(job.settings)
    if not key.meaning and section_of(key.hint) is None
  }
  assert not bare


def test_help_tells_the_keys_of_the_job(capsys):
  assert runs.tunix("train", "--help", "--job=kto") == 0
  said = capsys.readouterr().out
  assert "--preference.desirable_weight=NUMBER  [1.0]" in said
  assert "Weights of the two labels in the loss" in said
  assert "--data.overlong=error|truncate|drop  [error]" in said
  assert "--preference.loss" not in said
  assert runs.tunix("train", "--help") == 0
  assert "Keys of the job sft" in capsys.readouterr().out


@pytest.mark.parametrize("job", JOBS)
def test_the_schema_takes_what_is_dumped_and_no_other_key(job, capsys):
  assert runs.tunix("train", "--schema", f"--job={job}") == 0
  schema = json.loads(capsys.readouterr().out)
  assert list(schema["properties"]) == list(keys.of(JOBS[job].settings))
  jsonschema.Draft202012Validator.check_schema(schema)
  check = jsonschema.Draft202012Validator(schema)
  written = yaml.safe_load(config_lib.dump(config_lib.load([f"--job={job}"])))
  assert not list(check.iter_errors(written))
  assert list(check.iter_errors(written | {"sed": 1}))
  assert list(check.iter_errors(written | {"seed": "one"}))
