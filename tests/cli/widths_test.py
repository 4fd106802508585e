"""The widths of rows in every job that trains on given records."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.commands import train
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import loading

PAIR = {"prompt": "How many days?", "chosen": "Seven.", "rejected": "Five."}
LABELLED = [
  {"prompt": "How many days?", "completion": "Seven days.", "label": label}
  for label in (True, False)
]


def built(settings, **more):
  """The data of a run."""
  keys = settings | {"training__max_steps": "null"} | more
  config = config_lib.load(runs.arguments(**keys))
  tokenizer = loading.ModelLoader(config).tokenizer()
  return JOBS[config.job].data(config, tokenizer)


def shapes(batches):
  return {
    name: x.shape for batch in batches for name, x in batch.items() if x.ndim == 2
  }


@pytest.fixture
def long(settings, eval_file):
  """Short records below limits that are far from them."""
  return settings | {"data__max_length": 1024, "data__eval": eval_file}


@pytest.mark.parametrize("job", ["sft", "distill"])
def test_rows_follow_the_longest_record(long, job):
  keys = long | {"job": job}
  if job == "distill":
    keys["distill__teacher"] = keys["model__path"]
  data = built(keys)
  for part in (data.train, data.eval):
    assert set(shapes(part).values()) == {(4, 64)}
  assert str(data.widths["train"]).startswith("64 tokens, about ")
  assert data.widths["eval"].lengths == (64,)
  assert built(keys, data__pad_to="max_length").widths == {}
  for fixed in ({"data__pad_to": "max_length"}, {"data__packing": "true"}):
    data = built(keys, **fixed)
    for part in (data.train, data.eval):
      assert set(shapes(part).values()) == {(4, 1024)}


@pytest.mark.parametrize("job", ["dpo", "orpo", "reward", "kto"])
def test_both_sides_of_completions_follow_theirs(long, tmp_path, job):
  records = LABELLED if job == "kto" else [PAIR]
  names = ["completion"] if job == "kto" else ["chosen", "rejected"]
  file = tmp_path / "records.jsonl"
  file.write_text("".join(json.dumps(record) + "\n" for record in records * 4))
  keys = long | {"job": job, "data__train": file, "data__eval": file}
  keys["data__pad_to"] = "longest" if job in ("dpo", "orpo") else "shared"
  fields = [f"{n}_{part}" for n in ("prompt", *names) for part in ("ids", "mask")]
  data = built(keys)
  for part in (data.train, data.eval):
    assert shapes(part) == dict.fromkeys(fields, (4, 64))
  said = str(data.widths["train"])
  assert said == "64 tokens for the prompt and 64 for a completion"
  data = built(keys, data__pad_to="max_length")
  assert shapes(data.train) == dict.fromkeys(fields, (4, 512))


@pytest.mark.parametrize(
  ("job", "own", "rows"),
  [
    ("dpo", {}, 1),
    ("orpo", {}, 1),
    ("dpo", {"preference__shared_prompt": "true"}, None),
    ("orpo", {"preference__shared_prompt": "true"}, None),
    ("dpo", {"preference__reference_logps": "logps"}, None),
    ("dpo", {"mesh": "{fsdp: -1}", "training__global_batch_size": 8}, 8),
    ("reward", {}, None),
  ],
)
def test_pairs_share_rows(long, tmp_path, job, own, rows):
  file = tmp_path / "records.jsonl"
  file.write_text((json.dumps(PAIR) + "\n") * 4)
  keys = long | {"job": job, "data__train": file, "data__eval": file} | own
  data = built(keys)
  assert [each.rows for each in data.widths.values()] == [rows, rows]
  for part in (data.train, data.eval):
    for batch in part:
      assert rows == (batch["input_tokens"].shape[0] if rows else None)


ROLLOUTS = {"rollout__max_tokens_to_generate": 7, "data__max_length": None}
WRITING = {
  "grpo": {"reward__functions": "[exact_match]"},
  "ppo": {"reward__functions": "[exact_match]"},
  "distill": {"distill__on_policy_fraction": 0.5},
}


@pytest.fixture(params=WRITING)
def rollouts(settings, tmp_path, request):
  """Settings of a job whose model writes, with short prompts but one."""
  own = WRITING[request.param] | ROLLOUTS | {"job": request.param}
  if request.param == "distill":
    own["distill__teacher"] = settings["model__path"]
  answer = "completion" if request.param == "distill" else "answer"
  for name, words in (("train", 1), ("eval", 70)):
    file = tmp_path / f"{name}.jsonl"
    record = {"prompt": "sea " * words, answer: "Two."}
    file.write_text(json.dumps(record) + "\n")
    own[f"data__{name}"] = file
  both = settings | {"training__global_batch_size": 1} | own
  return {name: value for name, value in both.items() if value is not None}


def test_prompts_of_rollouts_have_the_length_of_the_longest(rollouts, monkeypatch):
  def limit(**more):
    sizes = []
    monkeypatch.setattr(train, "Loaded", lambda **x: sizes.append(x["config"].rollout))
    with pytest.raises(AttributeError):  # no trainer is made of None
      train.run(config_lib.load(runs.arguments(**rollouts | more)))
    return sizes[0].max_prompt_length

  alone = {"data__eval": "null"}
  assert limit(**alone) == 64 and limit() == 96
  assert limit(**alone, data__pad_to="max_length") == 256
  assert limit(**alone, rollout__max_prompt_length=40) == 40
  data = built(rollouts | alone)
  assert str(data.widths["train"]) == (
    "64 tokens for the prompt and 7 for a completion"
  )


def test_prompts_divide_over_the_shards_of_their_tokens(rollouts):
  """If the completions do not, prompts keep the limit, with which rows do."""
  alone = rollouts | {"data__eval": "null", "mesh": "{cp: 6}"}

  def widths(prompt, completion):
    limits = {
      "rollout__max_prompt_length": prompt,
      "rollout__max_tokens_to_generate": completion,
    }
    return dataclasses.astuple(built(alone | limits).widths["train"].layout)

  assert widths(600, 12)[:2] == (192, 12) and widths(599, 13)[:2] == (599, 13)


def test_prompts_of_environments_have_no_known_length(settings):
  env = {"env": "tunix.rl.env:GuessNumber", "job": "grpo"}
  keys = settings | env | WRITING["grpo"] | {"data__pad_to": "longest"}
  del keys["data__max_length"]
  with pytest.raises(ValueError, match=r"env is set and data.pad_to is 'longest'"):
    config_lib.load(runs.arguments(**keys))


def test_rows_have_the_limit_where_records_were_not_scanned(long):
  assert set(shapes(built(long, data__scan_limit=3).train).values()) == {(4, 1024)}


def test_rows_of_a_cache_do_not_depend_on_other_records(long, tmp_path):
  keys = long | {"job": "distill", "distill__teacher": long["model__path"]}
  data = built(keys, distill__cache=tmp_path / "cache", distill__top_k=2)
  assert set(shapes(data.train).values()) == {(4, 1024)} and data.widths == {}


def test_rows_divide_over_the_shards_of_their_tokens(long):
  long = long | {"data__pad_to": "longest"}
  data = built(long, mesh="{cp: 6}")
  assert set(shapes(data.train).values()) == {(4, 192)}
  assert set(shapes(built(long, mesh="{cp: -1}").train).values()) == {(4, 64)}


@pytest.fixture
def ragged(long, tmp_path):
  """One long record with three short ones, again and again."""
  file = tmp_path / "ragged.jsonl"
  words = [60, 1, 1, 1] * 4
  lines = [json.dumps({"prompt": "a", "response": " sea" * n}) for n in words]
  file.write_text("\n".join(lines))
  own = {"data__train": file, "data__eval": file, "data__shuffle": "false"}
  return long | own


def test_the_first_batch_of_pairs_names_their_sequences(long, tmp_path, capsys):
  file = tmp_path / "records.jsonl"
  file.write_text((json.dumps(PAIR) + "\n") * 4)
  keys = long | {"job": "dpo", "data__train": file, "data__eval": file}
  assert runs.tunix("data", "show", *runs.arguments(**keys)) == 0
  said = capsys.readouterr().out
  assert "pair 3, rejected: " in said and "pair 0, chosen: " in said


@pytest.mark.parametrize("job", ["sft", "distill"])
def test_short_records_share_rows(ragged, job):
  keys = ragged | {"job": job}
  if job == "distill":
    keys["distill__teacher"] = keys["model__path"]
  data = built(keys)
  for part in (data.train, data.eval):
    assert {batch["input_tokens"].shape[0] for batch in part} == {1}
  assert str(data.widths["train"]).startswith("1 in a batch, shared by short records")
  alone = built(keys, data__pad_to="longest")
  assert {batch["input_tokens"].shape[0] for batch in alone.train} == {4}
  for mesh, rows in (("{dp: 2}", 2), ("{fsdp: -1}", 8)):
    data = built(keys, mesh=mesh, training__global_batch_size=8)
    assert {batch["input_tokens"].shape[0] for batch in data.train} == {rows}


def test_the_start_of_a_run_and_the_first_batch_say_the_width(long, capsys):
  assert runs.tunix("train", "--dry-run", *runs.arguments(**long)) == 0
  said = capsys.readouterr().out
  assert "4 records of at most 1,024 tokens" in said
  assert "train rows: 64 tokens" in said
  first = next(line for line in said.splitlines() if line.startswith("4 rows x 64 "))
  assert runs.tunix("data", "show", *runs.arguments(**long)) == 0
  assert capsys.readouterr().out.splitlines()[0] == first


def test_a_mixture_in_several_widths_goes_on_exactly(long, tmp_path):
  """The last loss of a run cut in two is, bit by bit, that of one run."""
  text = "The sea is wide. " * 20
  small = tmp_path / "small.jsonl"
  small.write_text(json.dumps({"text": text}) + "\n")
  keys = long | {
    "data__train": json.dumps([str(long["data__train"]), str(small)]),
    "data__weights": "[7, 1]",
    "data__max_length": 256,
    "training__micro_batch_size": 2,
  }
  data = built(keys, training__max_steps=4)
  assert len(data.widths["train"].lengths) > 1
  first = [batch["input_tokens"].shape[1] for batch in itertools.islice(data.train, 8)]
  assert first[::2] == first[1::2] and len(set(first)) > 1

  def train(folder, **more):
    made = keys | {"output_dir": tmp_path / folder} | more
    assert runs.tunix("train", *runs.arguments(**made)) == 0
    return runs.metrics(tmp_path / folder)

  whole = train("whole")
  train("parts", training__max_steps=2)
  assert train("parts")[4] == whole[4]


def test_shared_rows_train_as_records_alone_do(ragged, tmp_path):
  """Gradients and losses agree but for the last bits."""

  def losses(pad_to):
    out = tmp_path / pad_to
    made = ragged | {"data__pad_to": pad_to, "output_dir": out}
    made |= {"training__eval_every_n_steps": 2, "training__global_batch_size": 8}
    made |= {"training__micro_batch_size": 4}
    assert runs.tunix("train", *runs.arguments(**made)) == 0
    parts = {"train": ("loss", "grad_norm"), "eval": ("loss",)}
    return {
      (mode, name): [row[name] for row in runs.metrics(out, mode).values()]
      for mode, names in parts.items()
      for name in names
    }

  alone, shared = losses("longest"), losses("shared")
  assert len(shared["train", "loss"]) == 4 and len(shared["eval", "loss"]) >= 2
  for name, values in alone.items():
    np.testing.assert_allclose(values, shared[name], rtol=2e-5)


def test_short_rows_fit_the_positions_whatever_the_limit_is(long, capsys):
  assert runs.tunix("train", "--dry-run", *runs.arguments(**long)) == 0
  assert "is beyond" not in capsys.readouterr().out
  fixed = long | {"data__pad_to": "max_length"}
  assert runs.tunix("train", "--dry-run", *runs.arguments(**fixed)) == 0
  assert "a row of 1024 tokens (data.max_length) is beyond the 256 pos" in (
    capsys.readouterr().out
  )
