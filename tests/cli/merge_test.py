"""`tunix merge` in this process, on the committed folders and copies of them."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as st

import tunix
from tests import toys_text
from tests.cli import runs
from tests.models import checkpoints
from tunix.models import lora, safetensors_saver
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel
from tunix.models.files import tensor_files

GOLDEN = checkpoints.GOLDEN / "llama3p1"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """A model in bfloat16 and float32, and two models near it, one of them in shards."""
  folder = tmp_path_factory.mktemp("merge")
  base = checkpoints.tensors(GOLDEN)
  for i, name in enumerate(("base", "a", "b")):
    checkpoints.copy("llama3p1", folder / name)
    if name == "b":
      (folder / name / "chat_template.jinja").write_text("template of b")
      continue
    for file in (folder / name).glob("model*"):
      file.unlink()
    rng = np.random.default_rng(i)
    values = {
      key: (x + i * 0.1 * rng.normal(size=x.shape)).astype(
        ml_dtypes.bfloat16 if key.endswith("norm.weight") and i else np.float32
      )
      for key, x in base.items()
    }
    st.save_file(values, folder / name / "model.safetensors")
    toys_text.chat_tokenizer("chatml").save(folder / name)
    (folder / name / "chat_template.jinja").write_text(f"template of {name}")
  return folder


def refused(capsys, *words):
  assert runs.tunix("merge", *words) == 2
  return capsys.readouterr().err


def test_a_merged_folder_is_read_back(models, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(safetensors_saver, "MAX_SHARD_BYTES", 4000)
  words = [models / "a", models / "b", "--weights", 0.25, 0.75]
  assert runs.tunix("merge", *words, "-o", tmp_path / "m") == 0
  assert "2 models are merged into" in capsys.readouterr().out
  merged = checkpoints.tensors(tmp_path / "m")
  a, b = (checkpoints.tensors(models / name) for name in "ab")
  assert list(tmp_path.iterdir()) == [tmp_path / "m"]
  assert len(list((tmp_path / "m").glob("model-0*"))) > 3
  assert {x.dtype.name for x in merged.values()} == {"bfloat16", "float32"}
  for key, value in merged.items():
    expected = 0.25 * np.float32(a[key]) + 0.75 * np.float32(b[key])
    np.testing.assert_array_equal(value, expected.astype(a[key].dtype))
  for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
    assert (tmp_path / "m" / name).read_text() == (models / "a" / name).read_text()
  model = AutoModel.from_pretrained(tmp_path / "m", dtype=jnp.float32)
  table = np.asarray(model.embed_tokens.embedding[...])
  np.testing.assert_array_equal(table, merged["model.embed_tokens.weight"])


def test_a_run_means_its_export(models, tmp_path):
  run = tmp_path / "run"
  run.mkdir()
  (run / "config.yaml").write_text("job: sft\n")
  (run / "export").symlink_to(models / "a")
  tunix.merge([run, models / "b"], tmp_path / "m", weights=[1, 0])
  merged, a = (checkpoints.tensors(x) for x in (tmp_path / "m", models / "a"))
  assert all(merged[key].tobytes() == a[key].tobytes() for key in a)
  (run / "export").unlink()
  (run / "export").symlink_to(GOLDEN / "adapter")
  (run / "config.yaml").write_text(f"job: sft\nmodel:\n  path: {GOLDEN}\n")
  tunix.merge([run, GOLDEN / "adapter"], tmp_path / "adapter")
  assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_differences_are_added_to_the_base(method, models, tmp_path):
  """With one model in effect and a density of 1, the merge is this model."""
  options = {"base": models / "base", "weights": [0, 1], "density": 1.0}
  pair = [models / "b", models / "a"]
  tunix.merge(pair, tmp_path / "m", method=method, **options)
  merged, a = (checkpoints.tensors(x) for x in (tmp_path / "m", models / "a"))
  for key, value in merged.items():
    np.testing.assert_allclose(value, np.float32(a[key]), atol=1e-6)


def test_dare_is_repeatable_and_draws_for_each_tensor(models, tmp_path):
  pair, base = [models / "a", models / "a"], models / "base"
  for name, seed in (("m", None), ("n", 0), ("o", 1)):
    tunix.merge(pair, tmp_path / name, method="dare", base=base, seed=seed)
  m, n, o = (checkpoints.tensors(tmp_path / name) for name in "mno")
  start = checkpoints.tensors(base)
  key = "model.layers.{}.self_attn.q_proj.weight"
  kept = [np.equal(m[key.format(i)], start[key.format(i)]) for i in (0, 1)]
  assert 0.1 < kept[0].mean() < 0.4  # both masks are 0 with a probability of 1/4
  assert (kept[0] != kept[1]).any()
  assert all((m[k] == n[k]).all() for k in m) and any((m[k] != o[k]).any() for k in m)


def test_slerp_starts_at_the_first_model(models, tmp_path):
  words = [models / "a", models / "b", "--method=slerp", "--t=0", "-o", tmp_path / "m"]
  assert runs.tunix("merge", *words) == 0
  merged, a = (checkpoints.tensors(x) for x in (tmp_path / "m", models / "a"))
  assert all(merged[key].tobytes() == a[key].tobytes() for key in a)


def test_merged_adapters_are_loaded(tmp_path):
  adapter = GOLDEN / "adapter"
  words = [adapter, adapter, "--weights", 1, -0.25, "--output", tmp_path / "m"]
  assert runs.tunix("merge", *words) == 0
  base = AutoModel.from_pretrained(GOLDEN)
  changes = []
  for folder in (adapter, tmp_path / "m"):
    linears = lora_modules.adapted(lora.load_adapter(base, folder))
    pairs = {name: lora_modules.pair_of(x) for name, x in linears.items()}
    changes.append(
      {
        name: np.asarray(a) @ np.asarray(b) * linears[name].lora_scale
        for name, (a, b) in pairs.items()
      }
    )
  assert changes[0].keys() == changes[1].keys()
  for name, change in changes[0].items():
    np.testing.assert_allclose(changes[1][name], 0.75 * change, atol=1e-5)


# Options -> a part of the message.
WRONG = {
  "--weights 1": "expected 2 numbers, one for each model",
  "--weights 1 1": "expected the sum 1",
  "--weights 0 0": "expected one that is not 0",
  "--weights nan 1": "weights[0] is nan",
  "--t 0.5": "t is 0.5, which linear does not have; its options are weights",
  "--method slerp --t 1.5": "t is 1.5",
  "--method slerp --weights 1 0": "its options are t",
  "--method ties": "base is missing",
  "--method ties --base {d}/base --weights 1 -1": "for ties none below 0",
  "--method ties --base {d}/base --density 0": "density is 0",
  "--method ties --base {d}/base --seed 1": "seed is 1, which ties does not have",
  "--method dare --base {d}/base --density 1.5": "density is 1.5",
  "--method dare --base {d}/base --seed -1": "seed is -1",
  "--method dare --base {d}/none": "/none",
  "--method soup": "choose from",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options_are_refused(words, models, tmp_path, capsys):
  given = words.format(d=models).split()
  error = refused(
    capsys, models / "a", models / "b", *given, "--output", tmp_path / "m"
  )
  assert WRONG[words] in error
  assert not list(tmp_path.iterdir())


def test_other_inputs_are_refused(models, tmp_path, capsys):
  a, adapter, out = models / "a", GOLDEN / "adapter", ("-o", tmp_path / "m")
  slerp = "--method=slerp"
  assert "models are 1 in number" in refused(capsys, a, *out)
  assert "slerp merges exactly 2" in refused(capsys, a, a, a, slerp, *out)
  assert "is an adapter" in refused(capsys, a, adapter, *out)
  assert "is an adapter" in refused(capsys, adapter, adapter, slerp, *out)
  of_base = ("--method=ties", "--base", adapter)
  assert f"{adapter} is an adapter" in refused(capsys, a, a, *of_base, *out)
  assert "is not empty" in refused(capsys, a, a, "-o", models)
  assert "there is no folder" in refused(capsys, a, tmp_path / "none", *out)
  other = refused(capsys, a, checkpoints.GOLDEN / "qwen3", *out)
  assert "model_type is 'llama' and 'qwen3'" in other
  assert "k_norm.weight is missing and (8,)" in other and " more. Give" in other
  with pytest.raises(ValueError, match="'soup'; expected one of linear, slerp"):
    tunix.merge([a, a], tmp_path / "m", method="soup")
  assert not list(tmp_path.iterdir())


def cut(folder):
  values = checkpoints.tensors(folder)
  key = next(iter(values))
  values[key] = values[key][:-1]
  st.save_file(values, folder / "model.safetensors")


def quantize(folder):
  values = {key: x.astype(np.int8) for key, x in checkpoints.tensors(folder).items()}
  st.save_file(values, folder / "model.safetensors")


DAMAGES = {
  "differ: ": cut,
  "in int8: only weights in float32": quantize,
  "quantization_config": lambda folder: checkpoints.change_config(
    folder, quantization_config={"quant_method": "fp8"}
  ),
  "model.gguf": lambda folder: (folder / "model.gguf").write_bytes(b""),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_models_that_do_not_fit_are_refused(message, models, tmp_path):
  other = checkpoints.copy("llama3p1", tmp_path / "other")
  DAMAGES[message](other)
  with pytest.raises(ValueError, match=message):
    tunix.merge([models / "a", other], tmp_path / "m")
  assert list(tmp_path.iterdir()) == [other]


def test_numbers_beyond_the_dtype_are_refused(tmp_path):
  folder = checkpoints.copy("llama3p1", tmp_path / "half")
  keys = checkpoints.tensors(folder)
  values = {k: np.full(x.shape, 4e4, np.float16) for k, x in keys.items()}
  st.save_file(values, folder / "model.safetensors")
  with pytest.raises(ValueError, match=r"weight of the merge has NaN or infinite .*16"):
    tunix.merge(
      [folder, folder], tmp_path / "m", method="dare", base=GOLDEN, density=0.2
    )
  assert list(tmp_path.iterdir()) == [folder]


def test_other_token_ids_are_a_warning(models, tmp_path, caplog):
  other = checkpoints.copy("llama3p1", tmp_path / "other")
  values = json.loads((models / "a" / "tokenizer.json").read_text())
  last = values["added_tokens"][-1]
  text, last["content"] = last["content"], "<other>"
  (other / "tokenizer.json").write_text(json.dumps(values))
  tunix.merge([models / "a", models / "a"], tmp_path / "m")
  assert not caplog.text
  tunix.merge([models / "a", other], tmp_path / "n")
  assert f"different ids for {text!r}, '<other>' (2 tokens in all)" in caplog.text


def test_a_full_disk_leaves_nothing(models, tmp_path, monkeypatch, capsys):
  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(tensor_files, "copy_companions", full)
  words = [models / "a", models / "b", "-o", tmp_path / "m"]
  assert runs.tunix("merge", *words) == 1
  assert "make room" in capsys.readouterr().err
  assert not list(tmp_path.iterdir())
