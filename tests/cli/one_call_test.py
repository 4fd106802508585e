"""The jobs as Python functions: `tunix.sft(...)` does what `tunix train` does."""

import importlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
from flax import nnx

import tunix
from tests import optimizers
from tests.cli import runs
from tunix.cli import one_call
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import rewards
from tunix.models import lora
from tunix.rl.reward import functions as reward_fns
from tunix.sft.peft_trainer import PeftTrainer
from tunix.utils.mesh import create_mesh

QUIET = {"progress_bar": False}


@pytest.fixture
def records(train_file):
  return [json.loads(line) for line in train_file.read_text().splitlines()]


@pytest.fixture
def short(tmp_path):
  """Keywords of a short run of sft."""
  return {"max_length": 48, "max_steps": 2, "global_batch_size": 4, "lora": 4}


@pytest.fixture
def prompts():
  return [{"prompt": f"How many days are in {i} weeks?", "answer": i} for i in range(8)]


def shortness(prompts, completions, answer):
  assert len(answer) == len(prompts)
  return [1.0 / (1 + len(text)) for text in completions]


@pytest.fixture
def rollouts():
  """Keywords of a short run of grpo."""
  return {
    "rewards": shortness,
    "max_prompt_length": 40,
    "max_tokens_to_generate": 4,
    "num_generations": 2,
    "global_batch_size": 4,
    "max_steps": 2,
  }


def loaded(folder):
  return tunix.AutoModel.from_pretrained(folder)


def parameters(model):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def test_every_job_of_the_command_is_a_function():
  for job in JOBS:
    assert callable(getattr(tunix, job)) and job in tunix.__all__, job
    assert JOBS[job].summary in getattr(one_call, job).__doc__
  assert isinstance(importlib.import_module("tunix.sft"), type(tunix.sft))
  assert {"model", "data"} <= set(inspect.signature(tunix.sft).parameters)


def test_a_call_writes_the_bytes_of_the_command(model, train_file, short, tmp_path):
  out = tmp_path / "python"
  result = tunix.sft(model=model, data=train_file, output_dir=out, **short)
  keys = ["max_length", "max_steps", "global_batch_size"]
  sections = dict(zip(keys, ("data", "training", "training")))
  words = [f"--{section}.{key}={short[key]}" for key, section in sections.items()]
  words += [f"--model.path={model}", f"--data.train={train_file}", "--lora.rank=4"]
  assert runs.tunix("train", *words, f"--output_dir={tmp_path / 'command'}") == 0
  for name in ("logs/metrics.jsonl", "export/adapter_model.safetensors"):
    same = [(tmp_path / who / name).read_bytes() for who in ("python", "command")]
    assert same[0] == same[1], name
  assert result.export == str(out / "export")
  assert result.steps == 2 and result.output_dir == str(out)


def test_objects_train_as_their_files_do(model, train_file, records, short):
  of_files = tunix.sft(model=model, data=train_file, **short)
  tokenizer = tunix.TokenizerAdapter.from_pretrained(model)
  of_objects = tunix.sft(
    model=loaded(model), data=records, tokenizer=tokenizer, **short
  )
  one, two = (r.history["train/loss"] for r in (of_files, of_objects))
  assert one.values.tolist() == two.values.tolist()
  assert one.steps.tolist() == [1, 2]
  assert of_objects.metrics["train_loss"] == (one.values[0], one.values[-1])


def test_without_a_folder_nothing_stays(
  model, train_file, eval_file, short, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  monkeypatch.chdir(tmp_path)
  result = tunix.sft(
    model=model, data=train_file, eval_data=eval_file, logging=QUIET, **short
  )
  assert not list(tmp_path.iterdir())
  assert result.export is None and result.output_dir is None
  assert {"train/loss", "eval/loss"} <= set(result.history)
  assert "nothing is written" in capsys.readouterr().out


def test_a_model_is_trained_in_place_and_kept_below_adapters(
  model, train_file, short, tmp_path
):
  policy = loaded(model)
  before = parameters(policy)
  options = {"data": train_file, "tokenizer": model} | short
  adapted = tunix.sft(model=policy, **options)
  assert all(map(np.array_equal, before, parameters(policy)))
  assert adapted.model is not policy
  whole = tunix.sft(model=policy, **options | {"lora": None, "learning_rate": 0.01})
  assert whole.model is policy
  assert not all(map(np.array_equal, before, parameters(policy)))


def test_the_reference_of_a_model_is_a_copy(model, tmp_path):
  pairs = [
    {"prompt": f"{i}?", "chosen": "It is five.", "rejected": "No."} for i in "ab"
  ]
  result = tunix.dpo(
    model=loaded(model),
    data=pairs,
    tokenizer=model,
    max_prompt_length=16,
    max_response_length=16,
    global_batch_size=2,
    max_steps=3,
    learning_rate=0.05,
    lora=None,
  )
  margins = result.history["train/rewards/margin"].values
  assert (
    margins[0] == 0 and abs(margins[-1]) > 0.1
  )  # 0 throughout if both were one model


def test_the_mesh_of_a_model_is_the_mesh_of_the_run(model, train_file, short):
  mesh = create_mesh({"fsdp": 2}, devices=jax.devices()[:2])
  policy = tunix.AutoModel.from_pretrained(model, mesh)
  config = one_call.sft.settings
  with one_call.objects.holding():
    assert config(model=policy, data=train_file, **short).mesh == {"fsdp": 2}
    assert config(model=str(model), data=train_file, **short).mesh == {}
    given = config(model=policy, data=train_file, mesh={"dp": 2}, **short)
    assert given.mesh == {"dp": 2}


def test_rewards_are_functions_and_names(model, prompts, rollouts):
  result = tunix.grpo(
    model=model,
    data=prompts,
    **rollouts | {"rewards": [shortness, "exact_match"]},
    algorithm="drgrpo",
    rollout=tunix.RolloutConfig(temperature=0.7, max_tokens_to_generate=4),
  )
  rewards = result.history["train/rewards/shortness"].values
  assert len(rewards) == 2 and (rewards > 0).all()
  assert result.metrics["train_reward"][0] >= rewards[0]
  assert type(result.trainer) is tunix.DrGRPOLearner
  config = result.trainer.rl_cluster.cluster_config.rollout_config
  assert {options.temperature for options in config.values()} == {0.7}


def test_a_changed_reward_is_not_resumed(model, prompts, rollouts, tmp_path):
  keywords = rollouts | {"output_dir": tmp_path / "out", "export": "none"}
  keywords["checkpoint"] = {"save_every_n_steps": 1}
  tunix.grpo(model=model, data=prompts, **keywords)

  def shortness(prompts, completions, answer):
    return [2.0 for _ in completions]

  keywords |= {"rewards": shortness, "max_steps": 3}
  with pytest.raises(ValueError, match=r"reward\.functions has changed"):
    tunix.grpo(model=model, data=prompts, **keywords)


def test_a_finished_run_is_returned_with_its_model(model, train_file, short, tmp_path):
  keywords = {"model": model, "data": train_file, "output_dir": tmp_path / "out"}
  first = tunix.sft(**keywords, **short)
  again = tunix.sft(**keywords, **short)
  assert again.trainer is None and again.steps == first.steps
  assert again.history["train/loss"].values.tolist() == (
    first.history["train/loss"].values.tolist()
  )
  assert again.model.config.num_layers == first.model.config.num_layers


def test_keywords_are_keys_of_the_command(model, train_file):
  def settings(job="sft", **keywords):
    with one_call.objects.holding():
      call = getattr(one_call, job).settings
      return call(model=model, data=train_file, **keywords)

  config = settings(lora=tunix.LoraConfig(rank=3), seed=5, learning_rate=1e-3)
  assert config.lora.rank == 3 and config.seed == 5
  assert config.training.learning_rate == 1e-3
  assert settings(lora={"rank": 2, "alpha": 4.0}).lora.alpha == 4.0
  assert settings(optimizer="sgd").optimizer.name == "sgd"
  dapo = settings("grpo", algorithm=tunix.DAPOConfig(num_generations=4))
  assert type(dapo.algorithm) is tunix.DAPOConfig
  assert dapo.algorithm.num_generations == 4
  assert settings("grpo", num_generations=6).algorithm.num_generations == 6


@pytest.mark.parametrize(
  ("keywords", "error", "text"),
  [
    ({"max_stps": 3}, ValueError, "max_steps"),
    ({"path": "x"}, TypeError, "model=dict"),
    ({"export": "merged"}, ValueError, "output_dir"),
    ({"save_every_n_steps": 1}, ValueError, "checkpoint.save_every_n_steps"),
    ({"tensorboard": True}, ValueError, "logging.tensorboard"),
    ({"optimizer": optimizers.adamw(1e-3)}, TypeError, "optimizer"),
    (
      {"training": {"max_steps": 3}, "max_steps": 1},
      TypeError,
      "both set training.max_steps",
    ),
    ({"distributed": {"coordinator": "auto"}}, ValueError, "output_dir"),
    ({"max_steps": "many"}, ValueError, "max_steps"),
    ({"model": {"path": "x", "dtyp": "float32"}}, ValueError, "model.dtype"),
    ({"data": []}, ValueError, "empty"),
    ({"data": [1, 2]}, ValueError, "data.train"),
  ],
)
def test_wrong_calls_are_refused(model, train_file, keywords, error, text):
  with pytest.raises(error, match=text):
    tunix.sft(**{"model": model, "data": train_file} | keywords)


def test_an_error_of_the_training_keeps_its_text(model, train_file, short, monkeypatch):
  def train(*_):
    raise ValueError("remat is busy")  # as a function of the user may say

  monkeypatch.setattr(PeftTrainer, "train", train)
  with pytest.raises(ValueError, match=r"^remat is busy$"):
    tunix.sft(model=model, data=train_file, **short)


def test_wrong_objects_are_refused(model, train_file):
  class Mine(nnx.Module):
    pass

  options = {"data": train_file, "max_steps": 1}
  with pytest.raises(ValueError, match="PeftTrainer"):
    tunix.sft(model=Mine(), tokenizer=model, **options)
  with pytest.raises(ValueError, match=r"tokenizer\.path"):
    tunix.sft(model=loaded(model), **options)
  with pytest.raises(ValueError, match="num_scores"):
    tunix.reward(model=loaded(model), tokenizer=model, **options)
  with pytest.raises(ValueError, match=r"model\.remat"):
    tunix.sft(
      model={"path": loaded(model), "remat": "block"}, tokenizer=model, **options
    )


def test_the_command_names_an_object_that_is_gone(model, records, short, tmp_path):
  out = tmp_path / "out"
  tokenizer = tunix.TokenizerAdapter.from_pretrained(model)
  tunix.sft(
    model=loaded(model), data=records, tokenizer=tokenizer, output_dir=out, **short
  )
  saved = pathlib.Path(out / "config.yaml")
  problem = runs.spawn("train", saved, f"--output_dir={tmp_path / 'other'}")
  _, error = problem.communicate()
  assert problem.returncode == 2 and "object of a Python program" in error


def test_a_list_holds_records_or_sources(train_file, records):
  with one_call.objects.holding():
    name = one_call._objects("data.train", records)
    assert one_call.objects.get(name) is records
    mixed = one_call._objects("data.train", [train_file, records[:3]])
    assert mixed[0] == str(train_file)
    assert one_call.objects.get(mixed[1]) == records[:3]


def test_a_model_with_adapters_trains_them(model, train_file, short, tmp_path, capsys):
  first = tunix.sft(model=model, data=train_file, **short)
  keywords = short | {"lora": None, "tokenizer": model, "output_dir": tmp_path / "out"}
  best = {"metric": "loss", "greater_is_better": False}
  capsys.readouterr()
  again = tunix.sft(
    model=first.model,
    data=train_file,
    eval_data=train_file,
    export={"checkpoint": "best"},
    training={"best": best, "eval_every_n_steps": 1},
    checkpoint={"save_every_n_steps": 1},
    **keywords,
  )
  assert "rank 4" in capsys.readouterr().out
  assert again.model is first.model
  assert (tmp_path / "out" / "export" / "adapter_model.safetensors").is_file()
  assert again.trainer.training_config.learning_rate == 2e-4  # the default of adapters
  with pytest.raises(ValueError, match=r"lora\.merge"):
    tunix.sft(model=first.model, data=train_file, tokenizer=model, **short)


@pytest.mark.parametrize(
  "config",
  [
    tunix.LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "up_proj"), dropout=0.1),
    tunix.LoraConfig(rank=4, use_dora=True, use_rslora=True),
    tunix.LoraConfig(rank=2, rank_pattern={"k_proj": 5}, alpha_pattern={"k_proj": 1.0}),
  ],
)
def test_adapters_give_their_configuration(model, config):
  base = loaded(model)
  again = lora.apply(base, lora.config_of(lora.apply(base, config)))
  adapted, expected = (lora.describe(x) for x in (again, lora.apply(base, config)))
  assert adapted == expected
  assert lora.config_of(again) == lora.config_of(lora.apply(base, config))
  assert lora.config_of(base) is None


def test_a_finished_run_of_an_object_is_returned_with_its_adapter(
  model, train_file, short, tmp_path
):
  keywords = {"model": loaded(model), "tokenizer": model, "data": train_file}
  keywords |= short | {"output_dir": tmp_path / "out"}
  first, again = tunix.sft(**keywords), tunix.sft(**keywords)
  state = [nnx.state(x.model, nnx.LoRAParam) for x in (first, again)]
  jax.tree.map(np.testing.assert_array_equal, *state)


def test_a_model_that_was_trained_since_does_not_resume(
  model, train_file, short, tmp_path
):
  keywords = {"model": loaded(model), "tokenizer": model, "data": train_file}
  keywords |= short | {"lora": None, "output_dir": tmp_path / "out", "export": "none"}
  tunix.sft(**keywords)
  with pytest.raises(ValueError, match="load it again"):
    tunix.sft(**keywords | {"max_steps": 3})


def test_a_column_of_ids_is_refused(model, rollouts):
  data = [{"prompt": "a", "answer": 1, "prompt_token_ids": [5]}]
  with pytest.raises(ValueError, match="prompt_token_ids"):
    tunix.grpo(model=model, data=data, **rollouts)


def digest(function):
  with one_call.objects.holding():
    name = one_call.objects.name_of(function, "reward.functions")
    return rewards.digest(rewards.RewardSettings(functions=(name,)))


def test_the_digest_of_a_reward_covers_its_code():
  make = lambda scale: lambda completions: [scale * len(c) for c in completions]
  other = lambda completions: [len(c) - 1 for c in completions]
  same = [make(1), make(1)]
  digests = [digest(f) for f in (*same, make(2), other, reward_fns.length(maximum=3))]
  assert digests[0] == digests[1] and len(set(digests)) == 4
  matches = [rewards.function(f"exact_match(column={name})") for name in "ab"]
  assert digest(matches[0]) != digest(matches[1])


def test_the_digest_of_a_reward_is_that_of_another_process():
  program = """
from tests.cli.one_call_test import digest
print(digest(lambda completions: [float(c in {"a", "b", "c"}) for c in completions]))
"""
  found = set()
  for seed in "12":
    env = os.environ | {"PYTHONHASHSEED": seed}
    out = subprocess.run(
      [sys.executable, "-c", program],
      env=env,
      capture_output=True,
      text=True,
      cwd=runs.ROOT,
    )
    assert out.returncode == 0, out.stderr
    found.add(out.stdout)
  assert len(found) == 1


def test_the_earlier_name_of_quantize_is_taken():
  call = {"model": "m", "data": "d.jsonl", "output_dir": "out", "lora": 2}
  names = ("quantize", "quantise")
  made = [one_call.sft.settings(**call, **{name: "int8"}) for name in names]
  assert made[0] == made[1] and made[0].model.quantize == "int8"
