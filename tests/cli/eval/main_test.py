"""`tunix eval`: what it finds is what the parts say, and mistakes are one line."""

import csv
import functools
import json
import math
import shutil

import numpy as np
import pytest
from flax import nnx

from tests import toys_text
from tests.cli import runs
from tunix.cli.make import model_folders
from tunix.data import chat
from tunix.models import heads, safetensors_saver
from tunix.models.automodel import AutoModel

PAIRS = [
  {"prompt": "How many days", "chosen": "seven", "rejected": "five of them"},
  {"prompt": "Who runs", "chosen": "The river runs slowly", "rejected": "a sea"},
  {"prompt": "Who", "chosen": "the miller", "rejected": "the miller"},
]


def write(path, records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
  folder = tmp_path_factory.mktemp("eval")
  reward = heads.with_scores(AutoModel.from_pretrained(model), 1, seed=5)
  safetensors_saver.save_pretrained(reward, folder / "reward")
  toys_text.chat_tokenizer("chatml").save(folder / "reward")
  write(folder / "pairs.jsonl", PAIRS)
  prompts = [{"prompt": f"How many days {i}", "answer": "7"} for i in range(3)]
  write(folder / "prompts.jsonl", prompts)
  (folder / "fns.py").write_text(
    "def even(completions):\n  return [float(len(c) % 2 == 0) for c in completions]\n"
    "def broken(prompts, completions):\n"
    "  return [float('nan') if '1' in p else 1.0 for p in prompts]\n"
  )
  return folder


def results(folder, section=0):
  read = json.loads((folder / "results.json").read_text())
  return read["results"][section]["metrics"]


def lines(folder):
  return [json.loads(line) for line in (folder / "records.jsonl").open()]


@functools.lru_cache(maxsize=2)
def loaded(folder):
  """Model, compiled for rows of 64 tokens, and tokenizer."""
  call = nnx.jit(lambda model, tokens: model(tokens)[0])
  model = model_folders.load_model(str(folder))
  return lambda tokens: call(model, tokens), model_folders.load_tokenizer(str(folder))


def run_alone(folder, prompt, response):
  """What a model gives for a row by itself (padding behind it is not seen), and the
  tokens and mask of the row."""
  model, tokenizer = loaded(folder)
  example = chat.render({"prompt": prompt, "response": response}, tokenizer)
  tokens = np.pad(example.tokens, (0, 64 - len(example)))
  return np.asarray(model(tokens[None])[0], np.float64), example


def logp(folder, prompt, response):
  """Log-probability of a response and its tokens."""
  logits, example = run_alone(folder, prompt, response)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  at = np.flatnonzero(example.mask)
  return sum(logits[i - 1, example.tokens[i]] for i in at), len(at)


def test_log_likelihood(model, files, tmp_path, capsys):
  records = [{"prompt": p["prompt"], "response": p["chosen"]} for p in PAIRS]
  data = write(tmp_path / "data.jsonl", records)
  out = tmp_path / "out"
  assert runs.tunix("eval", model, "--data", data, "--out", out) == 0
  single = [logp(model, r["prompt"], r["response"]) for r in records]
  total, count = (sum(column) for column in zip(*single))
  found = results(out)
  assert found["tokens"]["value"] == count
  assert found["nats per token"]["value"] == pytest.approx(-total / count, rel=1e-5)
  assert found["perplexity"]["value"] == pytest.approx(
    math.exp(-total / count), rel=1e-4
  )
  by_record = [(line["logp"], line["tokens"]) for line in lines(out)]
  np.testing.assert_allclose(by_record, single, rtol=1e-5)
  shown = capsys.readouterr().out
  assert f"{-total / count:.4f}" in shown and "samples.html" in shown
  table = list(csv.reader((out / "table.csv").open()))
  assert table[0] == ["data", "metric", "value", "standard error"]
  assert [str(data), "tokens", str(count), ""] in table
  assert "| nats per token |" in (out / "table.md").read_text()
  assert "nats per token" in (out / "samples.html").read_text()


def test_csv_files_and_folders_of_runs_are_read(model, tmp_path):
  records = [{"prompt": "How many days", "response": "seven"}]
  with (tmp_path / "chat.csv").open("w", newline="") as file:
    writer = csv.DictWriter(file, ["prompt", "response"])
    writer.writeheader()
    writer.writerows(records)
  run = tmp_path / "run"
  shutil.copytree(model, run / "export")
  (run / "config.yaml").write_text("job: sft\n")
  found = []
  for folder, name in ((model, "chat.jsonl"), (model, "chat.csv"), (run, "chat.csv")):
    write(tmp_path / "chat.jsonl", records)
    out = tmp_path / f"out{len(found)}"
    assert runs.tunix("eval", folder, "--data", tmp_path / name, "--out", out) == 0
    found.append(results(out))
  assert found[0] == found[1] == found[2]


def test_long_records_are_cut_and_counted(model, train_file, tmp_path, capsys):
  assert (
    runs.tunix("eval", "--model", model, "--data", train_file, "--max_length", 20) == 0
  )
  assert "records cut at 20 tokens" in capsys.readouterr().out


def test_pairs_of_a_policy(model, files, tmp_path, capsys):
  out = tmp_path / "out"
  pairs = files / "pairs.jsonl"
  assert runs.tunix("eval", model, "--pairs", pairs, "--out", out) == 0
  expected = [
    [logp(model, p["prompt"], p[name])[0] for name in ("chosen", "rejected")]
    for p in PAIRS
  ]
  found = [[line["chosen"], line["rejected"]] for line in lines(out)]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  right = [c > r for c, r in expected[:2]]
  assert results(out)["accuracy"]["value"] == np.mean(right)
  assert results(out)["pairs"]["value"] == 2
  assert "1 pair of equal responses ignored" in capsys.readouterr().out


def test_pairs_per_token_and_above_a_reference(model, files, tmp_path):
  out, pairs = tmp_path / "out", files / "pairs.jsonl"
  runs.tunix("eval", model, "--pairs", pairs, "--out", out, "--per_token")
  for line, pair in zip(lines(out), PAIRS):
    total, count = logp(model, pair["prompt"], pair["chosen"])
    assert line["chosen"] == pytest.approx(total / count, rel=1e-5)
  runs.tunix("eval", model, "--pairs", pairs, "--out", out, "--reference", model)
  assert all(abs(line["chosen"]) < 1e-5 for line in lines(out))
  assert results(out)["ties"]["value"] == 2
  assert results(out)["accuracy"]["value"] == 0.5


def test_pairs_of_a_reward_model(files, tmp_path):
  out = tmp_path / "out"
  pairs = files / "pairs.jsonl"
  assert runs.tunix("eval", files / "reward", "--pairs", pairs, "--out", out) == 0
  for line, pair in zip(lines(out), PAIRS):
    scores, example = run_alone(files / "reward", pair["prompt"], pair["chosen"])
    last = np.flatnonzero(example.mask)[-1]  # the template writes "\n" behind it
    assert line["chosen"] == pytest.approx(scores[last, 0], rel=1e-4, abs=1e-5)


def test_generation_with_pass_at_k(model, files, tmp_path, capsys):
  out, prompts = tmp_path / "out", files / "prompts.jsonl"
  arguments = ["--prompts", prompts, "--reward", f"{files}/fns.py:even", "--out", out]
  arguments += ["--num_samples", 4, "--temperature", 1.0, "--seed", 3]
  arguments += ["--max_new_tokens", 4, "--batch_size", 2]
  assert runs.tunix("eval", model, *arguments) == 0
  groups = lines(out)
  rewards = np.asarray([[c["reward"] for c in g["completions"]] for g in groups])
  assert rewards.shape == (3, 4)
  for group in groups:
    for row in group["completions"]:
      assert row["reward"] == float(len(row["text"]) % 2 == 0)
  found = results(out)
  assert found["reward"]["value"] == pytest.approx(rewards.mean())
  assert found["pass@1"]["value"] == pytest.approx(rewards.mean())
  assert found["pass@4"]["value"] == rewards.max(1).mean()
  assert set(found) >= {"pass@2", "tokens"} and "pass@3" not in found
  assert "pass@4" in capsys.readouterr().out
  said = lambda groups: [[c["text"] for c in g["completions"]] for g in groups]
  arguments += ["--pass_at", 3, "--threshold", 0, "--batch_size", 3]
  assert runs.tunix("eval", model, *arguments) == 0
  assert said(groups) == said(lines(out))  # the seed's, however they are batched
  again = results(out)
  assert again["pass@3"]["value"] == 1.0 and "pass@1" not in again


def test_prompts_that_lost_their_reward_are_left_out(model, files, tmp_path, capsys):
  out = tmp_path / "out"
  functions = [f"{files}/fns.py:broken", "exact_match"]
  runs.tunix(
    *("eval", model, "--prompts", files / "prompts.jsonl", "--out", out),
    *("--reward", *functions, "--weights", 2.0, 1.0, "--max_new_tokens", 2),
  )
  found = results(out)
  assert found["prompts without reward"]["value"] == 1
  assert found["reward"]["value"] == 2.0
  assert found["reward, broken"]["value"] == 1.0
  assert "note: broken: row 1" in capsys.readouterr().out


def test_generation_without_functions(model, files, tmp_path):
  out = tmp_path / "out"
  prompts = files / "prompts.jsonl"
  runs.tunix("eval", model, "--prompts", prompts, "--out", out, "--max_new_tokens", 2)
  assert "reward" not in results(out)
  assert lines(out)[0]["completions"][0]["reward"] is None


def test_several_files_in_one_run(model, files, train_file, tmp_path):
  out = tmp_path / "out"
  pairs = files / "pairs.jsonl"
  runs.tunix("eval", model, "--data", train_file, "--pairs", pairs, "--out", out)
  read = json.loads((out / "results.json").read_text())
  assert [r["kind"] for r in read["results"]] == ["log-likelihood", "pairwise accuracy"]
  assert set(read["about"]["sha256"]) == {"data", "pairs"}
  assert {line["data"] for line in lines(out)} == {str(train_file), str(pairs)}


def test_the_number_of_records_on_the_page(model, train_file, tmp_path):
  sizes = []
  for count in (1, 9):
    runs.tunix(
      *("eval", model, "--data", train_file, "--out", tmp_path, "--show", count)
    )
    sizes.append((tmp_path / "samples.html").read_text().count('"prompt":'))
    assert len(lines(tmp_path)) == 16
  assert sizes == [1, 9]


def test_results_do_not_depend_on_the_batches(model, train_file, tmp_path):
  found = []
  for size in (1, 7):
    runs.tunix(
      *("eval", model, "--data", train_file, "--out", tmp_path, "--batch_size", size)
    )
    found.append([line["logp"] for line in lines(tmp_path)])
  np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "give --data, --pairs or --prompts"),
    (["--pairs", "{f}/none.jsonl"], "no such file"),
    (["--pairs", "{f}/prompts.jsonl"], "prompts.jsonl:1: found fields 'prompt', 'ans"),
    (["--data", "{f}/pairs.jsonl"], "pairs.jsonl:1: "),
    (["--pairs", "{f}/pairs.jsonl", "--reward", "exact_match"], "without --prompts"),
    (["--prompts", "{f}/prompts.jsonl", "--per_token"], "without --pairs"),
    (["--prompts", "{f}/prompts.jsonl", "--pass_at", "1"], "without --reward"),
    (
      ["--prompts", "{f}/prompts.jsonl", "--reward", "exact_match", "--pass_at", "2"],
      "--pass_at is 2",
    ),
    (["--prompts", "{f}/prompts.jsonl", "--reward", "exactmatch"], "did you mean"),
    (["--prompts", "{f}/prompts.jsonl", "--num_samples", "2"], "--num_samples is 2"),
    (["--pairs", "{f}/pairs.jsonl", "--batch_size", "0"], "--batch_size is 0"),
    (["--pairs", "{f}/pairs.jsonl", "--max_length", "1"], "--max_length is 1"),
    (
      ["--pairs", "{f}/pairs.jsonl", "--template_args", "[]"],
      "--template_args is the list []",
    ),
    (
      ["--prompts", "{f}/prompts.jsonl", "--max_length", "9"],
      "--max_length has no effect",
    ),
  ],
)
def test_mistakes_are_one_line(model, files, arguments, message, capsys):
  given = [text.format(f=files) for text in arguments]
  assert runs.tunix("eval", model, *given) == 2
  error = capsys.readouterr().err
  assert error.startswith("tunix: error: ") and error.count("\n") == 1
  assert message in error


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--prompts", "{f}/prompts.jsonl"], "--prompts needs a language model"),
    (["--pairs", "{f}/pairs.jsonl", "--per_token"], "--per_token needs"),
  ],
)
def test_a_reward_model_writes_nothing(files, arguments, message, capsys):
  given = [text.format(f=files) for text in arguments]
  assert runs.tunix("eval", files / "reward", *given) == 2
  assert message in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_as_out_is_refused_before_the_model_is_read(below, train_file, capsys):
  out = train_file / below
  assert runs.tunix("eval", "/no/such", "--data", train_file, "--out", out) == 2
  error = capsys.readouterr().err
  assert f"--out is '{out}', and {train_file} is a file: name a folder" in error
