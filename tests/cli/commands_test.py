"""The command itself, and `data`, `generate` and `export`."""

import errno
import gc
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import types

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tunix
from tests.cli import runs
from tests.models.checkpoints import GOLDEN
from tunix.cli import main as cli
from tunix.generate.base_sampler import BaseSampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel
from tunix.sft.loop.interrupts import Stopped
from tunix.utils import record_file


def refused(capsys, *argv, code=2):
  assert runs.tunix(*argv) == code
  error = capsys.readouterr().err
  assert error.startswith("tunix: error: ")
  assert error.count("\n") == 1
  return error


# The command.


def test_help_lists_the_commands(capsys):
  assert runs.tunix("--help") == 0
  text = capsys.readouterr().out
  assert all(name in text for name in cli.COMMANDS)
  assert runs.tunix() == 2


def test_version(capsys):
  assert runs.tunix("--version") == 0
  assert capsys.readouterr().out == f"tunix {tunix.__version__}\n"


def test_unknown_commands_name_the_nearest(capsys):
  assert "train?" in refused(capsys, "trian")
  assert "train, generate" in refused(capsys, "xyzzy")


def test_debug_lets_errors_through(capsys):
  with pytest.raises(ValueError, match="unknown"):
    runs.tunix("--debug", "data", "show", "--sed=1")
  assert "unknown" in refused(capsys, "data", "show", "--sed=1")


@pytest.mark.parametrize(
  ("raised", "code"),
  [
    (None, 0),
    (OSError("full"), 1),
    (RuntimeError("x"), 1),
    (record_file.damaged(pathlib.Path("journal-1"), 16), 1),
    (ValueError("x"), 2),
    (ImportError("x"), 2),
    (KeyboardInterrupt(), 130),
    (Stopped(signal.SIGINT, "stopped after step 3"), 130),
    (Stopped(signal.SIGTERM, "stopped after step 3"), 143),
  ],
)
def test_exit_codes(raised, code, monkeypatch, capsys):
  # Of processes that get the signals: tests/cli/train_test.py, and the quickstart's.
  def command(argv):
    if raised is not None:
      raise raised

  monkeypatch.setattr(cli, "_load", lambda name: types.SimpleNamespace(main=command))
  assert runs.tunix("any") == code
  assert capsys.readouterr().err.count("\n") == (code != 0)


def test_help_and_version_import_nothing_heavy():
  code = (
    "import sys; from tunix.cli.main import main; main(['--help'])\n"
    "print({'jax', 'numpy', 'yaml'} & set(sys.modules))"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert out.stdout.splitlines()[-1] == "set()", out.stderr


def test_a_reader_that_goes_away_is_no_error(settings, tmp_path):
  words = ["data", "show", *runs.arguments(**settings)]
  process = runs.spawn(*words)
  process.stdout.close()
  assert process.stderr.read() == ""
  assert process.wait(timeout=300) == 1


# tunix data.


def test_data_show_marks_what_is_trained(settings, tmp_path, capsys):
  file = tmp_path / "mine.yaml"
  file.write_text(f"model: {{path: {settings['model__path']}}}\n")
  keys = {"data__train": settings["data__train"], "data__shuffle": "false"}
  words = [*runs.arguments(**keys), "--rows", "2", "--data.max_length=64"]
  assert runs.tunix("data", "show", file, *words) == 0
  text = capsys.readouterr().out
  assert text.startswith("8 rows x 64 tokens")
  assert "How many days are in a week? 0" in text
  assert "«There are seven days in a week. 0<|im_end|>»" in text
  assert "... 6 more rows" in text


@pytest.mark.parametrize("action", ["show", "scan"])
def test_data_names_the_keys_that_the_job_has(action, settings, tmp_path, capsys):
  file = tmp_path / "empty.jsonl"
  settings = settings | {"data__train": file}
  del settings["data__max_length"]
  words = ["data", action, *runs.arguments(**settings)]
  file.write_text('{"prompt": "a", "completion": "", "label": true}\n')
  error = refused(capsys, *words, "--job=kto")
  assert "preference.unusable" in error
  file.write_text('{"prompt": "a", "response": ""}\n')
  on_policy = ["--distill.teacher=t", "--distill.on_policy_fraction=0.5"]
  error = refused(capsys, *words, "--job=distill", *on_policy)
  assert f"{file}:1: " in error and "preference" not in error


def test_data_show_refuses_bad_records_and_rows(settings, tmp_path, capsys):
  words = runs.arguments(**settings)
  assert "--rows is '0'" in refused(capsys, "data", "show", *words, "--rows=0")
  file = tmp_path / "bad.jsonl"
  file.write_text('{"prompt": 1}\n')
  error = refused(capsys, "data", "show", *words, f"--data.train={file}")
  assert f"{file}:1: " in error


def test_data_scan_counts(settings, eval_file, capsys):
  words = runs.arguments(**settings, data__eval=eval_file)
  assert runs.tunix("data", "scan", *words) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith("train: 16 records: 16 kept")
  assert lines[1].startswith("eval: 6 records: 6 kept")


def test_data_needs_a_known_action(capsys):
  assert "use show or scan" in refused(capsys, "data", "list")
  assert runs.tunix("data") == 0
  assert "tunix data show" in capsys.readouterr().out


# tunix export and generate.


@pytest.fixture(scope="module")
def run(model, train_file, tmp_path_factory):
  """A LoRA run of two steps with checkpoints of both."""
  out = tmp_path_factory.mktemp("run") / "out"
  words = runs.arguments(
    model__path=model,
    data__train=train_file,
    data__max_length=48,
    lora__rank=2,
    lora__targets="[q_proj, down_proj]",
    training__max_steps=2,
    training__global_batch_size=8,
    training__learning_rate=0.5,
    checkpoint__every_n_steps=1,
    logging__tensorboard="false",
    mesh="{fsdp: 2, cp: 4}",
    output_dir=out,
  )
  assert runs.tunix("train", *words) == 0
  return out


def kernel(model):
  return np.asarray(lora_modules.linears(model)["layers.attn.q_proj"].kernel[...])


def pair(model):
  return [
    np.asarray(x)
    for x in lora_modules.pair_of(lora_modules.adapted(model)["layers.attn.q_proj"])
  ]


def test_export_of_an_adapter_is_that_of_the_run(run, model, tmp_path, capsys):
  assert runs.tunix("export", "--run", run, "--to", tmp_path / "a") == 0
  assert "step 2" in capsys.readouterr().out
  base = AutoModel.from_pretrained(model)
  exported = pair(lora.load_adapter(base, tmp_path / "a"))
  ended = pair(lora.load_adapter(base, run / "export"))
  for a, b in zip(exported, ended):
    np.testing.assert_array_equal(a, b)


def test_export_of_a_step_or_checkpoint(run, model, tmp_path):
  base = AutoModel.from_pretrained(model)
  words = ["--to", tmp_path / "a", "--kind", "adapter"]
  assert runs.tunix("export", "--run", run, "--step", 1, *words) == 0
  first = pair(lora.load_adapter(base, tmp_path / "a"))
  words = ["--to", tmp_path / "b"]
  assert runs.tunix("export", "--checkpoint", run / "checkpoints" / "1", *words) == 0
  again = pair(lora.load_adapter(base, tmp_path / "b"))
  ended = pair(lora.load_adapter(base, run / "export"))
  np.testing.assert_array_equal(first[1], again[1])
  assert np.any(first[1] != ended[1])


def test_export_merged_adds_the_adapter_and_casts(run, model, tmp_path):
  words = ["--kind", "merged", "--dtype", "bfloat16", "--to", tmp_path / "m"]
  words.append("--checksums")
  assert runs.tunix("export", "--run", run, *words) == 0
  merged = AutoModel.from_pretrained(tmp_path / "m")
  assert merged.config.param_dtype == jnp.bfloat16
  base = AutoModel.from_pretrained(model)
  a, b = pair(lora.load_adapter(base, run / "export"))
  expected = kernel(base) + np.einsum("lir,lro->lio", a, b)
  found = np.asarray(kernel(merged), np.float32)
  np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)
  assert (tmp_path / "m" / "tokenizer.json").is_file()
  sums = (tmp_path / "m" / "SHA256SUMS").read_text()
  assert "  model.safetensors\n" in sums and "  tokenizer.json\n" in sums
  assert not (run / "export" / "SHA256SUMS").exists()


def test_export_refuses_what_is_not_there(run, tmp_path, capsys):
  to = ["--to", tmp_path / "x"]
  assert "config.yaml" in refused(capsys, "export", "--run", tmp_path, *to)
  error = refused(capsys, "export", "--run", run, "--step", 9, *to)
  assert "step 9" in error and "[1, 2]" in error
  error = refused(capsys, "export", "--run", run, "--kind", "full", *to)
  assert "'merged'" in error
  error = refused(capsys, "export", "--checkpoint", run, *to)
  assert "OUTPUT_DIR/checkpoints/STEP" in error
  assert "--run" in refused(capsys, "export", *to)
  assert not (tmp_path / "x").exists()


def test_export_to_gguf(run, model, tmp_path, monkeypatch, capsys):
  words = ["export", "--run", run, "--gguf", "f32"]
  assert runs.tunix(*words, "--to", tmp_path / "g") == 0
  assert "(merged)" in capsys.readouterr().out
  base = AutoModel.from_pretrained(model)
  a, b = pair(lora.load_adapter(base, run / "export"))
  back = kernel(AutoModel.from_pretrained(tmp_path / "g"))
  np.testing.assert_allclose(back, kernel(base) + a @ b, atol=1e-6)
  ours, theirs = map(TokenizerAdapter.from_pretrained, (model, tmp_path / "g"))
  chat = [{"role": "user", "content": "A\tday  of 12 weeks"}]
  want = ours.apply_chat_template(chat, tokenize=True)
  assert theirs.apply_chat_template(chat, tokenize=True) == want
  assert theirs.eos_id() == ours.eos_id()
  assert "FROM ./model-f32.gguf\n" in (tmp_path / "g" / "Modelfile").read_text()

  tunix.export(run, tmp_path / "a", step=1, kind="adapter", gguf="f16", checksums=True)
  text = (tmp_path / "a" / "Modelfile").read_text()
  assert f"FROM {model}\nADAPTER ./adapter-f16.gguf\n" in text
  assert "  adapter-f16.gguf\n" in (tmp_path / "a" / "SHA256SUMS").read_text()

  # A GGUF file is also a source.
  words = ["export", "--model", tmp_path / "g" / "model-f32.gguf"]
  assert runs.tunix(*words, "--to", tmp_path / "h") == 0
  np.testing.assert_array_equal(kernel(AutoModel.from_pretrained(tmp_path / "h")), back)

  def full(*_):
    raise OSError(errno.ENOSPC, "no space")

  monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
  error = refused(capsys, *words, "--gguf", "q8_0", "--to", tmp_path / "x", code=1)
  assert "no space" in error and not (tmp_path / "x").exists()


def test_export_to_gguf_refuses_before_the_weights_are_loaded(tmp_path, capsys, model):
  words = ["export", "--gguf", "f16", "--to", tmp_path / "x"]
  error = refused(capsys, *words, "--model", model, "--dtype", "float32")
  assert "dtype is 'float32' and gguf 'f16'" in error
  assert "omit --best" in refused(capsys, *words, "--model", model, "--best")
  assert "there is no folder" in refused(capsys, *words, "--model", tmp_path / "none")
  other = tmp_path / "other"
  other.mkdir()
  config = GOLDEN / "deepseek_v3" / "config.json"
  shutil.copy(config, other)
  assert "'deepseek_v3'" in refused(capsys, *words, "--model", other)


def test_python_export_refuses_an_unknown_kind(run, tmp_path):
  with pytest.raises(ValueError, match="kind is 'lora'; expected one of auto, full"):
    tunix.export(run, tmp_path / "x", kind="lora")
  with pytest.raises(ValueError, match="gguf is 'q4'; expected one of f32, f16"):
    tunix.export(run, tmp_path / "x", gguf="q4")


def generated(capsys, *words):
  assert runs.tunix("generate", *words) == 0
  return capsys.readouterr().out


def test_generate_continues_prompts(model, capsys):
  words = ["--model", model, "--max_new_tokens", 4]
  one = generated(capsys, *words, "--prompt", "How many")
  several = generated(capsys, *words, "--prompt", "How many", "The sea")
  assert several.startswith("--- How many\n" + one)
  assert "--- The sea\n" in several
  longer = generated(
    capsys, "--model", model, "--max_new_tokens", 12, "--prompt", "How"
  )
  shorter = generated(
    capsys, "--model", model, "--max_new_tokens", 2, "--prompt", "How"
  )
  assert len(longer) > len(shorter)


def test_generate_options_change_the_text(model, run, tmp_path, capsys):
  words = ["--model", model, "--max_new_tokens", 12, "--prompt", "How many days"]
  plain = generated(capsys, *words)
  assert generated(capsys, *words) == plain
  assert generated(capsys, *words, "--chat") != plain
  drawn = generated(capsys, *words, "--temperature", 1.0, "--seed", 1)
  assert generated(capsys, *words, "--temperature", 1.0, "--seed", 1) == drawn
  assert generated(capsys, *words, "--temperature", 1.0, "--seed", 2) != drawn
  assert drawn != plain
  assert generated(capsys, *words, "--adapter", run / "export") != plain


def test_generate_hands_options_to_the_sampler(model, capsys, monkeypatch):
  seen = []

  def draw(sampler, prompts, **options):
    seen.append(options)
    rows = len(prompts) * options.get("num_samples", 1)
    return types.SimpleNamespace(text=[f"row {i}" for i in range(rows)])

  monkeypatch.setattr(BaseSampler, "__call__", draw)
  words = ["--model", model, "--max_new_tokens", 12, "--prompt", "a", "b"]
  generated(capsys, *words)
  assert seen.pop() == {"max_generation_steps": 12, "temperature": 0.0}
  draw_words = ["--temperature", 3.0, "--seed", 1, "--top_k", 5, "--top_p", 0.9]
  more = ["--min_p", 0.1, "--num_samples", 2, "--stop", "x", "y"]
  shown = generated(capsys, *words, *draw_words, *more)
  assert shown == "--- a\nrow 0\n--- a\nrow 1\n--- b\nrow 2\n--- b\nrow 3\n"
  assert seen.pop() == {
    "max_generation_steps": 12,
    "temperature": 3.0,
    "seed": 1,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "num_samples": 2,
    "stop_strings": ("x", "y"),
  }
  generated(capsys, *words, "--beam_size", 3, "--length_penalty", 2.0)
  assert (seen[0]["beam_size"], seen[0]["length_penalty"]) == (3, 2.0)


def test_generate_streams(model, capsys):
  words = ["--model", model, "--max_new_tokens", 12, "--prompt", "How many days"]
  plain = generated(capsys, *words)
  assert generated(capsys, *words, "--stream") == plain
  stop = plain.strip()[3:5]
  cut = generated(capsys, *words, "--stream", "--stop", stop)
  assert cut == plain[: plain.index(stop)] + "\n"


def test_generate_takes_another_tokenizer_and_dtype(
  model, tmp_path, capsys, monkeypatch
):
  bare = tmp_path / "bare"
  bare.mkdir()
  for name in ("config.json", "model.safetensors"):
    (bare / name).write_bytes((model / name).read_bytes())
  words = ["--prompt", "How many", "--max_new_tokens", 4]
  expected = generated(capsys, "--model", model, *words)
  assert generated(capsys, "--model", bare, "--tokenizer", model, *words) == expected
  seen = []
  load = AutoModel.from_pretrained

  def spy(*args, **options):
    seen.append(load(*args, **options))
    return seen[-1]

  monkeypatch.setattr(AutoModel, "from_pretrained", spy)
  generated(capsys, "--model", model, "--dtype", "bfloat16", *words)
  assert nnx.state(seen[0])["embed_tokens"]["embedding"][...].dtype == jnp.bfloat16


TEMPLATE = "{% for m in messages %}[{{ m.content }}]<|im_end|>{% endfor %}"


@pytest.fixture
def with_tokenizer(run, model, tmp_path):
  """The run's adapter, exported again as if trained with a template of its own."""
  copy = tmp_path / "run"
  shutil.copytree(run, copy)
  (tmp_path / "mine.jinja").write_text(TEMPLATE)
  file = copy / "config.yaml"
  settings = file.read_text()
  old = "chat_template: null"
  assert old in settings
  file.write_text(settings.replace(old, f"chat_template: {tmp_path / 'mine.jinja'}"))
  assert runs.tunix("export", "--run", copy, "--to", tmp_path / "a") == 0
  return tmp_path / "a"


def test_an_adapter_brings_tokenizer_and_template(run, model, with_tokenizer):
  turn = [{"role": "user", "content": "hi"}]
  own = TokenizerAdapter.from_pretrained(with_tokenizer)
  assert own.apply_chat_template(turn) == "[hi]<|im_end|>"
  plain = TokenizerAdapter.from_pretrained(run / "export")
  base = TokenizerAdapter.from_pretrained(model)
  assert plain.apply_chat_template(turn) == base.apply_chat_template(turn)
  assert plain.encode("How many days") == base.encode("How many days")


def test_generate_takes_the_adapters_tokenizer_first(
  run, model, with_tokenizer, tmp_path, capsys, monkeypatch
):
  base = tmp_path / "model"
  shutil.copytree(model, base)
  ends = {"eos_token_id": [7, 11]}
  (base / "generation_config.json").write_text(json.dumps(ends))
  seen = []

  def draw(sampler, prompts, **_):
    texts = [sampler.tokenizer.decode(prompt) for prompt in prompts]
    seen.append((texts, sampler.tokenizer.eos_ids()))
    return types.SimpleNamespace(text=texts)

  monkeypatch.setattr(BaseSampler, "__call__", draw)
  words = ["--model", base, "--prompt", "hi", "--chat"]
  adapter = ["--adapter", with_tokenizer]
  bare = tmp_path / "bare"
  shutil.copytree(with_tokenizer, bare)
  for file in (bare / "tokenizer.json", bare / "chat_template.jinja"):
    file.unlink()
  for more in (adapter, ["--adapter", bare], [*adapter, "--tokenizer", base], []):
    generated(capsys, *words, *more)
  (own, own_ends), *others = seen
  assert own == ["[hi]"]
  assert len({str(other) for other in others}) == 1
  assert others[0][0] != own
  # Where the model says that more tokens end a text, they do with an adapter too.
  assert own_ends == others[0][1]
  assert {7, 11} <= set(own_ends)


def test_peft_loads_an_adapter_with_its_tokenizer(run, model):
  peft = pytest.importorskip("peft")
  transformers = pytest.importorskip("transformers")
  base = transformers.AutoModelForCausalLM.from_pretrained(model)
  adapted = peft.PeftModel.from_pretrained(base, run / "export")
  a, _ = pair(lora.load_adapter(AutoModel.from_pretrained(model), run / "export"))
  state = peft.get_peft_model_state_dict(adapted)
  key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
  np.testing.assert_array_equal(state[key].numpy().T, a[1])
  assert transformers.AutoTokenizer.from_pretrained(run / "export").chat_template


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--max_new_tokens", "0"], "--max_new_tokens is 0"),
    (["--temperature", "-1"], "--temperature is -1.0"),
    (["--seed", "1"], "--seed is 1"),
    (
      ["--max_new_tokens", "many"],
      "--max_new_tokens is the text 'many', expected a whole number",
    ),
    (["--adapter", "/no/such"], "/no/such lacks"),
    (["--top_k", "3"], "--top_k is 3"),
    (["--length_penalty", "2"], "--length_penalty is 2.0"),
    (["--stream", "--num_samples", "2"], "--stream "),
    (["--stream", "--beam_size", "2"], "--beam_size"),
  ],
)
def test_generate_refuses_nonsense(model, capsys, words, message):
  words = ["generate", "--model", model, "--prompt", "hi", *words]
  assert message in refused(capsys, *words)
  assert "/no/such/model" in refused(
    capsys,
    "generate",
    "--model",
    "/no/such/model",
    "--tokenizer",
    model,
    "--prompt",
    "x",
  )


def test_the_command_looks_for_garbage_less_often(monkeypatch):
  before = gc.get_threshold()
  try:
    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr(sys, "argv", ["tunix", "--version"])
    assert cli.main() == 0
    assert gc.get_threshold()[0] > 700
  finally:
    gc.set_threshold(*before)
