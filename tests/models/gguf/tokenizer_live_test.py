"""Tokenizers of GGUF files against llama.cpp's own.

LLAMA_CPP_PYTHON names the Python of an environment with llama-cpp-python, REAL_GGUFS
the files of real models and REAL_FOLDERS their Hugging Face folders, with ":" between.
"""

import json
import os
import pathlib
import subprocess
import unicodedata

import gguf
import pytest
import tokenizers

from tests.models.gguf import ggufs, script_texts, tokenizer_test
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.gguf import (
  header,
  pre_tokenizers as table,
  tokenizer as gguf_tokenizer,
)
from tunix.models.gguf.tokenizer import Kind
from tunix.models.gguf.tokenizer_keys import metadata_of

pytestmark = [pytest.mark.slow, pytest.mark.real]

PYTHON = os.environ.get("LLAMA_CPP_PYTHON")
FILES, FOLDERS = (
  [*filter(None, os.environ.get(name, "").split(":"))]
  for name in ("REAL_GGUFS", "REAL_FOLDERS")
)
needs_llama_cpp = pytest.mark.skipif(PYTHON is None, reason="LLAMA_CPP_PYTHON is unset")


def check_equal(file, texts, ours=None):
  """Compares the token ids of all texts with llama.cpp's.

  Args:
    file: the GGUF file.
    texts: the texts.
    ours: a `tokenizers.Tokenizer`; None: the one of the file.
  """
  program = pathlib.Path(__file__).with_name("llama_cpp_ids.py")
  command = [PYTHON, program, file]
  done = subprocess.run(
    command, input=json.dumps(texts), capture_output=True, text=True, check=True
  )
  if ours is None:
    files = gguf_tokenizer.files_of(header.read(pathlib.Path(file)).metadata)
    ours = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
  encoded = ours.encode_batch(texts, add_special_tokens=False)
  for text, a, b in zip(texts, encoded, json.loads(done.stdout), strict=True):
    assert a.ids == b, text


@needs_llama_cpp
@pytest.mark.parametrize("file", FILES, ids=os.path.basename)
def test_real_files(file):
  metadata = header.read(pathlib.Path(file)).metadata
  kinds = [*metadata["tokenizer.ggml.token_type"]]
  named = (Kind.CONTROL, Kind.USER_DEFINED)
  tokens = metadata["tokenizer.ggml.tokens"]
  specials = [tokens[i] for i, kind in enumerate(kinds) if kind in named]
  check_equal(file, script_texts.texts(10_000, specials[:200]))


def written(path, metadata):
  """A file without tensors, which is enough for llama.cpp's tokenizer."""
  writer = gguf.GGUFWriter(path, "llama")
  for key, value in metadata.items():
    ggufs.add(writer, key, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@needs_llama_cpp
@pytest.mark.parametrize("folder", FOLDERS, ids=os.path.basename)
def test_exported_tokenizers_of_real_folders(folder, tmp_path):
  adapter = TokenizerAdapter.from_pretrained(folder)
  content = json.loads(adapter.tokenizer.to_str())
  metadata = metadata_of(
    content,
    roles={"bos_token": adapter.bos_token, "eos_token": adapter.eos_token},
    eos_ids=adapter.eos_ids(),
    chat_template=adapter.chat_template,
    add_bos=adapter.add_bos,
    rows=adapter.vocab_size,
  )
  texts = script_texts.texts(10_000, [*adapter.special_tokens()][:200])
  check_equal(written(tmp_path / "made.gguf", metadata), texts, adapter.tokenizer)


def is_cased_or_mark(letter):
  kind = unicodedata.category(letter)
  return kind[0] == "M" or (kind in ("Lu", "Ll", "Lt") and not letter.isascii())


@needs_llama_cpp
@pytest.mark.parametrize("written_name", [x for e in table.TABLE for x in e.names])
def test_pre_tokenizers(written_name, tmp_path):
  name = table.by_name(written_name).names[0]
  metadata = tokenizer_test.keys_of(tokenizer_test.trained(name))
  metadata[tokenizer_test.KEY + "pre"] = written_name
  texts = script_texts.texts(2000, tokenizer_test.SPECIALS + tokenizer_test.PLAIN)
  if tokenizer_test.PUBLISHED[name][0] is tokenizer_test.NFC:  # llama.cpp has no NFC
    texts = [tokenizer_test.NFC.normalize_str(text) for text in texts]
  if name in ("tekken", "gpt-4o"):  # llama.cpp knows no marks, and cases of ASCII only
    texts = [text for text in texts if not any(map(is_cased_or_mark, text))]
    assert len(texts) > 400
  check_equal(written(tmp_path / "made.gguf", metadata), texts)


@needs_llama_cpp
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("has_scores", [True, False])
def test_tokenizers_over_characters(prefix, has_scores, tmp_path):
  if prefix and not has_scores:
    return  # llama.cpp has no such kind
  made = tokenizer_test.over_characters(prefix=prefix, all_pairs=has_scores)
  texts = script_texts.texts(2000, tokenizer_test.SPECIALS)
  check_equal(written(tmp_path / "made.gguf", tokenizer_test.keys_of(made)), texts)
