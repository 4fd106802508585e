"""`tokenizer.add_tokens` from the command to the export."""

import json

import numpy as np
import pytest

from tests import toys
from tests.cli import runs
from tests.cli.train_test import train, weights
from tunix.cli import config as config_lib, one_call
from tunix.cli.make import loading, objects
from tunix.generate.new_tokens import add_tokens
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.automodel import AutoModel

TEXT = "<tool>the sea</tool>"


@pytest.fixture(scope="module")
def keys(model, tmp_path_factory):
  """Settings of a LoRA run whose records have the new tokens."""
  folder = tmp_path_factory.mktemp("added")
  record = json.dumps({"prompt": "the sea", "response": TEXT})
  (folder / "train.jsonl").write_text(f"{record}\n" * 8)
  return {
    "model__path": model,
    "data__train": folder / "train.jsonl",
    "data__max_length": 32,
    "training__max_steps": 3,
    "training__global_batch_size": 4,
    "training__learning_rate": "1e-2",
    "logging__tensorboard": "false",
    "tokenizer__add_tokens": '["<tool>", "</tool>", "<think>"]',
    "lora__rank": 2,
    "output_dir": folder / "out",
  }


@pytest.fixture(scope="module")
def run(keys):
  """The folder of the run."""
  assert train(keys) == 0
  return keys["output_dir"]


@pytest.mark.long
def test_resumed_run_equals_one_run(run, keys, tmp_path):
  parts = keys | {"output_dir": tmp_path / "parts"}
  assert train(parts, training__max_steps=1) == 0
  assert train(parts) == 0
  assert weights(tmp_path / "parts" / "export") == weights(run / "export")


def test_run_trains_and_exports_the_rows(run, model, tmp_path):
  base, before = (
    AutoModel.from_pretrained(model),
    TokenizerAdapter.from_pretrained(model),
  )
  size = before.vocab_size
  assert base.config.vocab_size == size  # so the embedding grows
  adapter = TokenizerAdapter.from_pretrained(run / "export")
  ids = adapter.encode(TEXT)
  assert (ids[0], ids[-1]) == (size, size + 1)
  adapted = lora.load_adapter(base, run / "export")
  assert adapted.token_rows.ids == (size, size + 1)  # <think> was a token before
  assert runs.tunix("export", "--run", run, "--kind", "merged", "--to", tmp_path) == 0
  merged = AutoModel.from_pretrained(tmp_path)
  assert merged.config.vocab_size == size + 2
  assert TokenizerAdapter.from_pretrained(tmp_path).encode(TEXT) == ids
  old, new = (np.asarray(x.embed_tokens.embedding[...]) for x in (base, merged))
  np.testing.assert_array_equal(new[:size], old)
  start = old.astype(np.float64).mean(axis=0)
  assert np.abs(new[size:] - start).max() > 1e-3  # they were trained
  tokens = np.array([ids], np.int32)
  np.testing.assert_allclose(
    toys.logits(adapted, tokens), toys.logits(merged, tokens), atol=1e-5
  )


def loader(keys, **more):
  return loading.ModelLoader(config_lib.load(runs.arguments(**(keys | more))))


def test_models_of_a_run(keys):
  adapted = loader(keys).model()
  size = adapted.config.vocab_size
  assert adapted.token_rows.ids == (size - 2, size - 1)
  assert loader(keys).sizes().vocab_size == size
  # Modules that are trained whole include the new rows.
  whole = {"lora__modules_to_save": '["embed_tokens", "lm_head"]'}
  assert loader(keys, **whole).model().token_rows is None
  full = {name: value for name, value in keys.items() if name != "lora__rank"}
  model = loader(full).model()
  assert model.token_rows is None
  rows = np.asarray(model.embed_tokens.embedding[...])[-2:]
  np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize(
  ("more", "message"),
  [
    ({"tokenizer__add_tokens": '[""]'}, "tokenizer.add_tokens has ''; expected texts"),
    ({"tokenizer__add_tokens": '["<a>", "<a>"]'}, "add_tokens has '<a>' twice"),
  ],
)
def test_refused_settings(keys, more, message, capsys):
  assert train(keys, **more) == 2
  assert message in capsys.readouterr().err


def test_rows_have_no_gguf_adapter(run, tmp_path, capsys):
  pytest.importorskip("gguf")
  words = ["--kind", "adapter", "--gguf", "f32", "--to", tmp_path / "g"]
  assert runs.tunix("export", "--run", run, *words) == 2
  assert "trainable_token_indices" in capsys.readouterr().err


def test_model_in_memory_is_extended_by_the_caller(model):
  base, tokenizer = AutoModel.from_pretrained(model), str(model)
  records = [{"prompt": "a", "response": "b"}]
  options = {"model": base, "tokenizer": tokenizer, "data": records, "max_steps": 1}
  with pytest.raises(ValueError, match=r"add_tokens is .* which is loaded already"):
    one_call.sft(**options, add_tokens=["<tool>"])
  base, tokenizer = add_tokens(
    base, TokenizerAdapter.from_pretrained(model), ["<tool>"]
  )
  options |= {"model": base, "tokenizer": tokenizer, "lora": 2}
  with objects.holding():
    trained = loading.ModelLoader(one_call.sft.settings(**options)).model()
  assert trained.token_rows.ids == (base.config.vocab_size - 1,)
