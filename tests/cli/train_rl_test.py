"""`tunix train` with the jobs grpo and ppo, from end to end, and what it refuses."""

import json
import pathlib

import jax
import pytest

from tests.cli import runs
from tests.perf import traces
from tunix.cli import config as config_lib
from tunix.cli.make import data as build_data, loading
from tunix.cli.run import settle
from tunix.models.automodel import AutoModel
from tunix.rl import algorithms

REWARD = """
def short(prompts, completions, **columns):
  assert set(columns) == {"answer"}
  return [1.0 / (1 + len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Prompts, of texts and of messages, and a reward function."""
  folder = tmp_path_factory.mktemp("rl")
  lines = []
  for i in range(9):
    prompt = f"How many days are in {i} weeks?"
    chat = [{"role": "user", "content": prompt}]
    lines.append({"prompt": chat if i % 2 else prompt, "answer": str(7 * i)})
  (folder / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
  (folder / "short_reward.py").write_text(REWARD)
  return folder


@pytest.fixture
def keys(files, model, tmp_path):
  """Settings of a short run."""
  return {
    "job": "grpo",
    "model__path": model,
    "data__train": files / "prompts.jsonl",
    "reward__functions": f"{files}/short_reward.py:short",
    "rollout__max_prompt_length": 40,
    "rollout__max_tokens_to_generate": 4,
    "training__global_batch_size": 4,
    "training__max_steps": 4,
    "training__learning_rate": 0.01,
    "algorithm__beta": 0.1,
    "algorithm__num_generations": 2,
    "samples__every_n_rollouts": 2,
    "logging__tensorboard": "false",
    "output_dir": tmp_path / "out",
  }


def train(keys, **more):
  return runs.tunix("train", *runs.arguments(**(keys | more)))


def loaded(keys, **more):
  return config_lib.load(runs.arguments(**(keys | more)))


def everything(folder):
  """Bytes of what a run leaves, by name."""
  names = ["logs/metrics.jsonl", "export/model.safetensors"]
  found = [folder / name for name in names] + sorted((folder / "samples").iterdir())
  return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def test_a_run_trains_shows_and_exports(keys, files, model, capsys):
  assert (
    train(keys, data__eval=files / "prompts.jsonl", algorithm__pass_threshold=1) == 0
  )
  said = capsys.readouterr().out
  out = keys["output_dir"]
  assert (
    "9 prompts: 9 kept; the longest prompt has" in said and "columns answer" in said
  )
  assert "grpo: 4 prompts x 2 completions of at most 4 tokens, rewarded by" in said
  steps, held_out = runs.metrics(out), runs.metrics(out, "eval")
  assert sorted(steps) == [1, 2, 3, 4] and sorted(held_out) == [0, 4]
  first, last = (steps[i]["rewards/score/mean"] for i in (1, 4))
  assert f"train reward {first:.4f} -> {last:.4f}" in said
  assert {"actor/kl", "actor/loss", "rewards/short"} <= steps[1].keys()
  assert "pass@1" in held_out[0]
  page = (out / "samples" / "index.html").read_text()
  assert "|im_start|>user" in page
  before, after = (
    AutoModel.from_pretrained(model),
    AutoModel.from_pretrained(out / "export"),
  )
  assert before.config == after.config
  leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after))
  assert all((a != b).any() for a, b in leaves)
  assert (
    train(keys, data__eval=files / "prompts.jsonl", algorithm__pass_threshold=1) == 0
  )
  assert "this run is finished: 4 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("job", "more"),
  [
    ("grpo", {}),
    pytest.param("ppo", {}, marks=pytest.mark.slow),
    pytest.param(
      "grpo",
      {"algorithm__name": "sdpo", "algorithm__success_threshold": 0.1},
      marks=pytest.mark.slow,
    ),
    # The rollouts have devices of their own.
    (
      "grpo",
      {"rl__schedule": "lagged", "mesh": "{fsdp: 2}", "rl__rollout_mesh": "{tp: 6}"},
    ),
  ],
)
def test_a_run_that_is_resumed_is_the_same(keys, job, more, tmp_path, capsys):
  keys = keys | {"job": job, "rl__mini_batch_size": 2, "rl__shuffle_seed": 1} | more
  assert train(keys, output_dir=tmp_path / "whole") == 0
  assert train(keys, training__max_steps=2) == 0
  assert train(keys) == 0
  assert "resuming after step 2" in capsys.readouterr().out
  assert everything(tmp_path / "whole") == everything(keys["output_dir"])


@pytest.mark.slow
@pytest.mark.ci
def test_a_greedy_run_is_replayed(keys, tmp_path, capsys):
  keys = keys | {"rl__schedule": "greedy", "rl__shuffle_seed": 1}
  out = keys["output_dir"]
  assert train(keys, training__max_steps=2) == 0
  assert train(keys) == 0
  with (out / "logs" / "metrics.jsonl").open("a") as file:
    file.write('{"step": 5, "mo')  # as a kill leaves it
  assert runs.tunix("replay", str(out)) == 0
  assert "is equal: step 4, weights" in capsys.readouterr().out
  lines = (out / "logs" / "metrics.jsonl").read_text()
  (out / "logs" / "metrics.jsonl").write_text(lines.replace("rewards/short", "x", 1))
  assert runs.tunix("replay", str(out), "--to", str(tmp_path / "again")) == 1
  assert "train metric x of step 1 is None" in capsys.readouterr().err
  assert runs.tunix("replay", str(out), "--to", str(tmp_path / "again")) == 2


def test_a_replay_of_several_processes_needs_their_numbers(tmp_path, capsys):
  text = "job: grpo\ndistributed: {coordinator: 'host:1', num_processes: 2}\n"
  (tmp_path / "config.yaml").write_text(text)
  for more in ([], ["--distributed.process_id=0"], [f"--to={tmp_path}/again"]):
    assert runs.tunix("replay", str(tmp_path), *more) == 2
    error = capsys.readouterr().err
    assert "several processes (distributed.coordinator is 'host:1')" in error
    assert "with one --to=FOLDER that all of them see" in error


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_is_traced_and_profiled(keys, tmp_path):
  profile = {"log_dir": tmp_path / "profile", "skip_first_n_steps": 1}
  more = {f"training__profiler_options__{k}": v for k, v in profile.items()}
  more["training__profiler_options__profiler_steps"] = 1
  more["training__perf_metrics_options__enable_perf_v1"] = "true"
  assert train(keys, training__max_steps=2, **more) == 0
  events = traces.events(keys["output_dir"] / "logs")
  assert {"host", "rollout", "actor", "reference"} <= set(events)
  assert len(list((tmp_path / "profile").rglob("*.trace.json.gz"))) == 1


def test_any_checkpoint_can_be_exported(keys, tmp_path, capsys):
  assert train(keys, job="ppo", checkpoint__every_n_steps=2) == 0
  out = keys["output_dir"]
  assert runs.tunix("export", f"--run={out}", f"--to={tmp_path / 'last'}") == 0
  assert "step 4 of" in capsys.readouterr().out
  file = "model.safetensors"
  last = (tmp_path / "last" / file).read_bytes()
  assert last == (out / "export" / file).read_bytes()
  argv = [f"--checkpoint={out}/checkpoints/2", f"--to={tmp_path / 'early'}"]
  assert runs.tunix("export", *argv) == 0
  assert last != (tmp_path / "early" / file).read_bytes()


def test_prompts_can_be_looked_at(keys, capsys):
  argv = runs.arguments(**keys, data__shuffle="false")
  assert runs.tunix("data", "show", *argv, "--rows=2") == 0
  shown = capsys.readouterr().out
  assert shown.count("<|im_start|>user") == 2 and "answer: 7\n" in shown
  assert runs.tunix("data", "scan", *argv) == 0
  assert "train: 9 prompts: 9 kept" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ci
def test_adapters_are_trained_and_exported(keys):
  assert train(keys, lora__rank=2, training__max_steps=1) == 0
  assert (keys["output_dir"] / "export" / "adapter_config.json").exists()


def test_another_reward_or_other_prompts_cannot_resume(keys, files, tmp_path, capsys):
  own = {name: tmp_path / name for name in ("mine_reward.py", "prompts.jsonl")}
  own["mine_reward.py"].write_text(REWARD)
  own["prompts.jsonl"].write_text((files / "prompts.jsonl").read_text())
  keys = keys | {
    "data__train": own["prompts.jsonl"],
    "reward__functions": f"{own['mine_reward.py']}:short",
    "training__max_steps": 1,
  }
  assert train(keys) == 0
  for name, what in (
    ("mine_reward.py", "reward.functions"),
    ("prompts.jsonl", "data.train"),
  ):
    text = own[name].read_text()
    own[name].write_text(text + "\n")
    assert train(keys, training__max_steps=2) == 2
    assert what in capsys.readouterr().err
    own[name].write_text(text)
  assert train(keys, training__max_steps=2, algorithm__beta=0.2) == 2
  assert "algorithm.beta was 0.1 and is 0.2" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"algorithm__betta": 1}, "did you mean algorithm.beta?"),
    ({"rollout__temprature": 1}, "did you mean rollout.temperature?"),
    ({"mini_batch_size": 1}, "did you mean rl.mini_batch_size?"),
    (
      {"algorithm__gamma": 0.9},
      "algorithm.gamma is 0.9, and the job 'grpo' does not read it",
    ),
    (
      {"algorithm__name": "sdpo", "algorithm__feedback": "note"},
      "algorithm.feedback is 'note', which is no column of the data",
    ),
    ({"algorithm__max_refills": 3}, "it belongs to the algorithm dapo"),
    ({"algorithm__epsilon_c": 0.5}, "algorithm.epsilon_c is 0.5"),
    (
      {"algorithm__rollout_correction": "{kin: mask}"},
      "did you mean algorithm.rollout_correction.kind?",
    ),
    ({"algorithm__rollout_correction": "{kind: cut}"}, "kind is 'cut'"),
    ({"algorithm__name": "ppo"}, "algorithm.name is the text 'ppo', expected one of"),
    ({"job": "ppo", "algorithm__name": "dapo"}, "expected one of ppo"),
    ({"rl__critic": "actor"}, "it belongs to the job ppo"),
    ({"data__packing": "true"}, "data.packing is True, and the job 'grpo' does not"),
    ({"training__micro_batch_size": 2}, "use rl.train_micro_batch_size"),
    ({"data__overlong": "truncate"}, "expected one of error, drop"),
    (
      {"rollout__temperature": 0},
      "rollout.temperature is 0: greedy rollouts do not explore",
    ),
    ({"rollout__max_prompt_length": 4}, "rollout.max_prompt_length is 4"),
    ({"rollout__engine_options": "{a: 1}"}, "engine_options"),
    ({"rl__mini_batch_size": 0}, "rl.mini_batch_size is 0: it must be a whole number"),
    ({"rl__reference": "x", "algorithm__beta": 0}, "rl.reference is 'x'"),
    ({"reward__functions": "[]"}, "reward.functions is empty"),
    ({"reward__functions": "exact_mach"}, "did you mean exact_match?"),
    ({"reward__functions": "exact_match(colum=1)"}, "unexpected keyword argument"),
    ({"reward__functions": "/no/such.py:f"}, "no such file"),
    ({"reward__functions": "no_such_module:f"}, "No module named"),
    ({"reward__functions": "json:nothing"}, "json has no function 'nothing'"),
    ({"reward__weights": "[1, 2]"}, "reward.weights has 2 numbers"),
    ({"reward__weights": "[a]"}, "expected a list of numbers or null"),
    ({"reward__timeout_s": 2}, "reward.timeout_s is 2.0"),
    ({"job": "sft"}, "it belongs to the jobs grpo and ppo"),
    ({"samples__max_groups": 0}, "samples.max_groups is 0"),
    (
      {"algorithm__num_generations": 10**9},
      "algorithm.num_generations is 1000000000: ",
    ),
    (
      {"rollout__max_tokens_to_generate": 10**6},
      "the model has 256 positions, so that at most 2",
    ),
  ],
  ids=str,
)
def test_bad_settings_are_one_line(keys, capsys, changed, message):
  assert train(keys, **changed) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
  ("name", "source", "message"),
  [
    ("syntax", "def f(prompts\n", "faulty_syntax.py cannot be imported (SyntaxError"),
    ("raises", "1 / 0\n", "faulty_raises.py cannot be imported (ZeroDivisionError"),
    (
      "column",
      "def f(prompts, completions, nowhere):\n  return [0.0] * len(prompts)\n",
      "the reward function f needs 'nowhere', which is no column of this dataset",
    ),
  ],
)
def test_a_users_file_is_judged_before_a_model_is_loaded(
  keys, tmp_path, capsys, monkeypatch, name, source, message
):
  file = tmp_path / f"faulty_{name}.py"
  file.write_text(source)
  monkeypatch.delattr(loading.ModelLoader, "model")
  assert train(keys, reward__functions=f"{file}:f") == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_prompts_that_are_too_long_can_be_dropped(keys, files, tmp_path):
  file = tmp_path / "p.jsonl"
  file.write_text('{"prompt": "How"}\n' + json.dumps({"prompt": "days " * 90}) + "\n")
  config = loaded(keys, data__train=file, data__overlong="drop")
  data = build_data.build_data(config, loading.ModelLoader(config).tokenizer())
  assert str(data.reports["train"]).startswith("2 prompts")
  assert "1 dropped" in str(data.reports["train"])


def test_prompts_of_several_files_are_mixed(keys, tmp_path):
  for name, count in (("a", 6), ("b", 2)):
    records = [{"prompt": f"{name} {i}", "who": name} for i in range(count)]
    records.append({"prompt": "days " * 90, "who": name})  # left out
    lines = "\n".join(map(json.dumps, records))
    (tmp_path / f"{name}.jsonl").write_text(lines)
  files = json.dumps([f"{tmp_path}/{name}.jsonl" for name in "aab"])
  mixed = {
    "data__weights": "[1, 0, 3]",
    "data__overlong": "drop",
    "data__num_epochs": 4,
  }
  config = loaded(keys, data__train=files, **mixed)
  data = build_data.build_data(config, loading.ModelLoader(config).tokenizer())
  assert "75.0% from" in str(data.reports["train"])
  assert data.train.sizes == (6, 2)
  who = [name for batch in data.train for name in batch["who"]]
  assert (who.count("a"), who.count("b")) == (8, 24)


@pytest.mark.parametrize("name", list(algorithms.configs(uses_critic=False)))
def test_every_variant_has_its_learner(keys, name):
  config = loaded(keys, algorithm__name=name)
  made = config.algorithm
  assert made.beta == 0.1
  expected = {loss: loss for loss in ("gspo", "cispo", "sapo", "rloo")}
  assert made.loss_algo == expected.get(name, "grpo")


@pytest.mark.parametrize(
  ("more", "steps"),
  [
    ({}, 3),  # batches of 4, 4 and 1
    ({"rl__mini_batch_size": 2}, 5),
    ({"algorithm__num_iterations": 2}, 6),
    ({"data__num_epochs": 2}, 6),
    ({"training__max_steps": 2}, 2),
    ({"algorithm__name": "dapo"}, None),
  ],
  ids=str,
)
def test_the_number_of_steps_is_known(keys, more, steps):
  keys = keys | {"training__max_steps": "null"}
  config = loaded(keys, **more)
  data = build_data.build_data(config, loading.ModelLoader(config).tokenizer())
  assert data.num_steps == steps


def test_a_relative_reward_file_becomes_absolute(files, monkeypatch):
  monkeypatch.chdir(files)
  keys = {
    "job": "grpo",
    "reward__functions": "[short_reward.py:short,length(maximum=3)]",
  }
  config = settle.absolute_paths(config_lib.load(runs.arguments(**keys)))
  assert config.reward.entries == (
    f"{pathlib.Path(files)}/short_reward.py:short",
    "length(maximum=3)",
  )


def test_equal_rewards_are_said_at_the_end_and_on_the_page(keys, files, capsys):
  (files / "equal.py").write_text(
    "def f(completions):\n  return [1.0] * len(completions)"
  )
  more = {"reward__functions": f"{files / 'equal.py'}:f", "algorithm__beta": 0.0}
  assert train(keys, **more, training__max_steps=1) == 0
  note = "nothing was learned: the gradient was 0 in 1 step"
  assert note in capsys.readouterr().out
  out = keys["output_dir"]
  assert note in json.loads((out / "result.json").read_text())["notes"][0]
  assert note in (out / "report.html").read_text()
