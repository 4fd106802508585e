"""Tokens and passwords are in no output and in no file of a run."""

import json
import pathlib

import pytest

from tests.cli import runs
from tunix.cli.commands import serve
from tunix.cli.make import data_sources
from tunix.data.records import SFT
from tunix.serve.settings import ServeSettings
from tunix.tinker.settings import TinkerSettings

SECRETS = {
  "HF_TOKEN": "hf_NobodyMaySeeThisToken00000000000",
  "HUGGING_FACE_HUB_TOKEN": "hf_NorThisOlderNameOfIt000000000000",
  "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
}
PASSWORD = "pa55w0rd"


@pytest.fixture
def keys(tmp_path, monkeypatch):
  for name, value in SECRETS.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  return {
    "job": "sft",
    "model__path": runs.write_model(tmp_path / "model"),
    "data__train": runs.write_records(tmp_path / "train.jsonl"),
    "data__eval": runs.write_records(tmp_path / "eval.jsonl", 4, 20),
    "data__max_length": 64,
    "training__max_steps": 2,
    "output_dir": tmp_path / "out",
  }


def check_hidden(folder: pathlib.Path, *texts: str) -> set[str]:
  """Names of the files in the folder, none of which holds a secret."""
  found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
  files = {name: path for name, path in found.items() if path.is_file()}
  for secret in (*SECRETS.values(), PASSWORD):
    assert not any(secret in text for text in (*texts, *found))
    for name, path in files.items():
      assert secret.encode() not in path.read_bytes(), name
  return set(files)


def train(keys, *more):
  """The exit code of a run in a process of its own, its output and its errors."""
  process = runs.spawn("train", *runs.arguments(**keys), *more)
  written, errors = process.communicate(timeout=300)
  return process.returncode, written, errors


def test_a_run_hides_the_tokens_of_its_environment(keys, tmp_path):
  code, written, errors = train(keys)
  assert code == 0, errors
  files = check_hidden(tmp_path, written, errors)
  expected = {"about.json", "config.yaml", "report.html", "logs/metrics.jsonl"}
  assert {f"out/{name}" for name in expected} <= files
  assert len(json.loads((tmp_path / "out/about.json").read_text())) > 3


def test_a_run_that_fails_hides_them_as_well(keys, tmp_path):
  # Records can be scanned, and not be read once the run has begun to write.
  source = tmp_path / "records.py"
  source.write_text(
    "import os\n"
    "class Rows:\n"
    "  def __len__(self): return 16\n"
    "  def __getitem__(self, index):\n"
    "    token = os.environ['HF_TOKEN']\n"
    f"    if os.path.exists({str(tmp_path / 'out/about.json')!r}):\n"
    "      raise RuntimeError(f'no record, {len(token)}')\n"
    "    return {'prompt': 'how many', 'response': f'seven {index}'}\n"
    "def rows(): return Rows()\n"
  )
  keys["data__train"] = f"{source}:rows"
  code, written, errors = train(keys, "--debug")
  assert code != 0 and "Traceback" in errors and "no record, 35" in errors
  files = check_hidden(tmp_path, written, errors)
  assert {"out/failure.json", "out/report.html"} <= files


NAMES = [
  f"https://bob:{PASSWORD}@localhost:1/x.jsonl",
  f"https://{PASSWORD}@localhost:1/x.jsonl",
  f"s3://key:{PASSWORD}@bucket/x.jsonl",
  f"zip://x.jsonl::https://bob:{PASSWORD}@localhost:1/x.zip",
  f"https://localhost:1/x.jsonl?X-Amz-Date=1&X-Amz-Signature={PASSWORD}",
  f"https://localhost:1/x.jsonl?sv=2024&sig={PASSWORD}",
  f"https://localhost:1/x.jsonl?access_token={PASSWORD}",
  f"hf:org/name(split='train', token='{PASSWORD}')",
  f"file.py:rows('https://bob:{PASSWORD}@localhost:1/x.jsonl')",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_in_the_name_of_a_source_is_refused_and_not_shown(
  tmp_path, capsys, name
):
  for key in ("train", "eval"):
    keys = {"job": "sft", "model__path": "m", "data__train": "a.jsonl"}
    keys |= {f"data__{key}": json.dumps(["a.jsonl", name]), "output_dir": tmp_path}
    assert runs.tunix("train", *runs.arguments(**keys)) == 2
    written = capsys.readouterr()
    assert f"data.{key} holds a password, token or signature" in written.err
    check_hidden(tmp_path, written.out, written.err)
  with pytest.raises(ValueError, match="the name of a data source holds") as error:
    data_sources.open_records(name, SFT)
  assert PASSWORD not in str(error.value)
  # A wrong key in front of the address, and another command.
  assert runs.tunix("train", "--job=sft", f"--data.trian={name}") == 2
  assert runs.tunix("data", "scan", "--job=sft", f"--data.train={name}") == 2
  written = capsys.readouterr()
  check_hidden(tmp_path, written.out, written.err)


@pytest.mark.parametrize(
  "name",
  [
    "abfs://container@account.dfs.core.windows.net/x.jsonl",
    "gs://bucket/a:b@c.jsonl",
    "https://localhost:1/x.jsonl?page=2&significant=1",
    "file.py:rows(tokens=3, name='a@b')",
    "/home/bob@host:8/token=1.jsonl",
  ],
)
def test_names_without_secrets_are_taken(tmp_path, capsys, name):
  keys = {"job": "sft", "model__path": tmp_path / "no", "output_dir": tmp_path / "out"}
  assert runs.tunix("train", *runs.arguments(**keys, data__train=name)) == 2
  assert "holds a password" not in capsys.readouterr().err


def test_keys_of_a_server_are_in_files_and_not_shown(tmp_path, capsys):
  file, options, empty = tmp_path / "key", tmp_path / "serve.yaml", tmp_path / "none"
  file.write_text(f"ann tml-{PASSWORD}")
  options.write_text(f"model: m\napi_key_file: {file}\ntinker_keys: {file}\n")
  values = serve.parser().read([f"--config={options}"])
  built = [values.build(kind) for kind in (ServeSettings, TinkerSettings)]
  check_hidden(empty, repr(built), str(vars(values)))
  # The key itself is no value, in a file and as an argument.
  for line in (
    f"api_key: {PASSWORD}",
    f"api_key_file: [{PASSWORD}]",
    f"tinker_keys: {{ann: tml-{PASSWORD}}}",
  ):
    options.write_text(line)
    assert runs.tunix("serve", "m", f"--config={options}") == 2
  for words in ([f"--api_key={PASSWORD}"], ["--api_key", PASSWORD]):
    assert runs.tunix("serve", "--model=m", *words) == 2
  written = capsys.readouterr()
  assert written.err.count("api_key_file") == 4  # the remedy
  check_hidden(empty, written.out, written.err)
