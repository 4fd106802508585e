"""The cached folder of a GGUF file."""

import concurrent.futures
import os
import pathlib
import shutil

import pytest

from tests.models.gguf import ggufs, tokenizer_test
from tunix.cli.make import fingerprints, model_folders
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel
from tunix.models.gguf import folder as gguf_folder

KEY = tokenizer_test.KEY
ENDS = ("<|im_end|>", "</think>")
TEXT = "It's 2026 <|im_start|>now"


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "tunix" / "gguf"


@pytest.fixture(scope="module")
def metadata():
  made = tokenizer_test.trained("llama-bpe")
  ends = [made.token_to_id(text) for text in ENDS]
  return tokenizer_test.keys_of(made, eos_ids=ends, chat_template="{{ messages }}")


@pytest.fixture(scope="module")
def original(tmp_path_factory, metadata):
  path = tmp_path_factory.mktemp("gguf") / "model.gguf"
  return ggufs.write(path, *ggufs.source("llama3p1"), **metadata)


@pytest.fixture
def file(tmp_path, original):
  return pathlib.Path(shutil.copy(original, tmp_path / "tiny.gguf"))


def test_a_file_is_a_folder_at_every_door(cache, file):
  folder = automodel.resolve_folder(file)
  assert folder.parent == cache and (folder / "model.gguf").samefile(file)
  assert automodel.config_of_folder(file) == automodel.config_of_folder(folder)
  by_file = TokenizerAdapter.from_pretrained(file)
  made = tokenizer_test.trained("llama-bpe")
  assert by_file.encode(TEXT) == made.encode(TEXT, add_special_tokens=False).ids
  assert by_file.chat_template == "{{ messages }}"
  assert by_file.eos_ids() == tuple(made.token_to_id(text) for text in ENDS)
  assert not by_file.add_bos


def test_an_adapter_of_a_file_ends_answers_as_the_file_does(cache, file, tmp_path):
  adapter = tmp_path / "adapter"
  trained = tokenizer_test.trained("gpt-2")  # with a tokenizer of its own
  TokenizerAdapter(trained).save(adapter)
  (adapter / "adapter_config.json").write_text("{}")
  loaded = model_folders.load_tokenizer(str(file), str(adapter))
  assert loaded.encode(TEXT) == trained.encode(TEXT, add_special_tokens=False).ids
  ids = [tokenizer_test.trained("llama-bpe").token_to_id(text) for text in ENDS]
  assert {*ids} <= {*loaded.eos_ids()}


def test_a_folder_with_one_file_and_a_file_of_another_name(cache, file):
  folder = automodel.resolve_folder(file.parent)
  assert folder == automodel.resolve_folder(file)
  blob = file.rename(file.parent / "sha256-01ab")
  assert (automodel.resolve_folder(blob) / "model.gguf").samefile(blob)
  blob.rename(file)
  shutil.copy(file, file.parent / "other.gguf")
  with pytest.raises(ValueError, match=r"has 2 GGUF files .*; expected one. Name"):
    automodel.resolve_folder(file.parent)
  with pytest.raises(ValueError, match=r"revision is 'v1' and .*tiny.gguf is a file"):
    automodel.resolve_folder(file, "v1")


def test_files_beside_a_file_are_no_part_of_its_tokenizer(cache, file):
  loaded = TokenizerAdapter.from_pretrained(file)
  before = fingerprints.of_tokenizer(loaded, str(file))
  (file.parent / "tokenizer.json").write_text("{}")
  assert fingerprints.of_tokenizer(loaded, str(file)) == before


def test_a_changed_file_has_a_new_folder(cache, file):
  before = gguf_folder.folder_of(file)
  assert gguf_folder.folder_of(file) == before
  os.utime(file, (0, 0))
  assert gguf_folder.folder_of(file) != before


def test_several_processes_make_one_folder(cache, file):
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    folders = {*pool.map(gguf_folder.folder_of, [file] * 4)}
  assert [*cache.iterdir()] == [*folders]


@pytest.mark.parametrize("reason", ["read-only", "no home"])
def test_without_a_cache_the_folder_is_temporary(reason, tmp_path, monkeypatch, file):
  if reason == "read-only":  # a file in its place, because root may write anywhere
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  else:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
      pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError)
    )
  folder = gguf_folder.folder_of(file)
  assert (folder / "config.json").is_file() and "tunix-gguf-" in str(folder)
  assert gguf_folder.folder_of(file) == folder


def test_weights_are_read_without_the_tokenizer(cache, tmp_path, metadata):
  unknown = metadata | {KEY + "pre": "nonesuch"}
  file = ggufs.write(tmp_path / "x.gguf", *ggufs.source("llama3p1"), **unknown)
  assert automodel.config_of_folder(file).num_layers
  with pytest.raises(
    ValueError, match=r"x.gguf: .*pre is 'nonesuch'; expected chatglm"
  ):
    TokenizerAdapter.from_pretrained(file)


def test_a_damaged_file_leaves_nothing(cache, file):
  file.write_bytes(file.read_bytes()[:1000])
  with pytest.raises(ValueError, match=r"tiny.gguf cannot be read as a GGUF file"):
    automodel.resolve_folder(file)
  assert not [*cache.iterdir()]
