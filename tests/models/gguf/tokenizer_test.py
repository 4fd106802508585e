"""Tokenizers of GGUF files: tokenizer files -> metadata -> tokenizer files."""

import functools
import json

import pytest
import tokenizers
from tokenizers import (
  AddedToken,
  Regex,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  trainers,
)

from tests.models.gguf import script_texts
from tunix.models.gguf import pre_tokenizers as table, tokenizer as gguf_tokenizer
from tunix.models.gguf.tokenizer import Kind
from tunix.models.gguf.tokenizer_keys import metadata_of

SPECIALS = ["<s>", "<|im_end|>", "<|im_start|>"]
PLAIN = ["<think>", "</think>"]
KEY = "tokenizer.ggml."


def bytes_after(*steps):
  last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return pre_tokenizers.Sequence([*steps, last])


def isolated(pattern):
  return pre_tokenizers.Split(Regex(pattern), "isolated")


# The pre-tokenizers as published tokenizer.json files spell them, by llama.cpp's name:
# normalizer, pre-tokenizer, ignore_merges.
LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
  r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}"
  r"\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
  r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
  "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
  "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
NFC = normalizers.NFC()
PUBLISHED = {
  "llama-bpe": (None, bytes_after(isolated(LLAMA3)), True),
  "dbrx": (
    None,
    bytes_after(pre_tokenizers.Split(Regex(LLAMA3), "removed", invert=True)),
    False,
  ),
  "qwen2": (NFC, bytes_after(isolated(QWEN2)), False),
  "deepseek-r1-qwen": (None, bytes_after(isolated(QWEN2)), False),
  "qwen35": (NFC, bytes_after(isolated(QWEN35)), False),
  "gpt-2": (None, GPT2, False),
  "olmo": (NFC, GPT2, False),
  "smollm": (None, pre_tokenizers.Sequence([DIGITS, GPT2]), False),
  "command-r": (NFC, pre_tokenizers.Sequence([DIGITS, GPT2]), False),
  "tekken": (None, bytes_after(isolated(TEKKEN)), True),
  "gpt-4o": (None, bytes_after(isolated(O200K)), False),
  "deepseek-v3": (
    normalizers.Sequence([]),
    bytes_after(
      isolated(r"\p{N}{1,3}"),
      isolated("[一-龥\u3040-ゟ\u30a0-ヿ]+"),
      isolated(DEEPSEEK),
    ),
    False,
  ),
}


@functools.cache
def trained(name):
  """A small tokenizer of a published kind; its merges include digits and spaces."""
  normalizer, cuts, ignore_merges = PUBLISHED[name]
  made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
  if normalizer is not None:
    made.normalizer = normalizer
  made.pre_tokenizer, made.decoder = cuts, decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=600,
    special_tokens=SPECIALS,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  made.train_from_iterator(script_texts.texts(80, seed=1), trainer)
  made.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
  return made


def keys_of(made, **changes):
  ids = [made.token_to_id("<|im_end|>")]
  roles = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
  options = {
    "roles": roles,
    "eos_ids": ids,
    "chat_template": None,
    "add_bos": False,
    "rows": made.get_vocab_size() + 5,
  }
  return metadata_of(json.loads(made.to_str()), **(options | changes))


def read_back(metadata):
  text = gguf_tokenizer.files_of(metadata)["tokenizer.json"]
  return tokenizers.Tokenizer.from_str(text)


def check_equal(one, other, count=200):
  texts = script_texts.texts(count, SPECIALS + PLAIN)
  pairs = zip(one.encode_batch(texts), other.encode_batch(texts), strict=True)
  for text, (a, b) in zip(texts, pairs, strict=True):
    assert a.ids == b.ids, text
    assert one.decode(a.ids) == other.decode(b.ids), text


def test_every_pre_tokenizer_is_tested():
  assert [*PUBLISHED] == [entry.names[0] for entry in table.TABLE]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tokenizer_over_bytes_comes_back(name):
  metadata = keys_of(trained(name))
  assert metadata[KEY + "pre"] == name
  assert {*metadata[KEY + "tokens"][-5:]} == {f"[PAD{i}]" for i in range(602, 607)}
  check_equal(trained(name), read_back(metadata))


@functools.cache
def over_characters(*, prefix=False, all_pairs=True):
  """A small tokenizer over characters, with spaces written as ▁.

  Args:
    prefix: it puts a space before a text.
    all_pairs: every pair that makes a token is a merge, as in SentencePiece's files.
  """
  made = tokenizers.Tokenizer(
    models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
  )
  changes = [normalizers.Prepend("▁")] if prefix else []
  made.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", "▁")])
  made.decoder = decoders.Sequence(
    [
      *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
      *([decoders.Strip(" ", 1, 0)] if prefix else []),
    ]
  )
  letters = [f"<0x{i:02X}>" for i in range(256)]
  trainer = trainers.BpeTrainer(
    vocab_size=900,
    limit_alphabet=300,
    special_tokens=["<unk>", *SPECIALS, *letters],
    show_progress=False,
  )
  texts = script_texts.texts(80, seed=1)
  # Whole texts would take long: each is one word here.
  made.train_from_iterator([f" {x}" for text in texts for x in text.split()], trainer)
  known = json.loads(made.to_str())
  # The trainer adds the bytes; in published files they are plain tokens.
  added = [item for item in known["added_tokens"] if item["content"] not in letters]
  known["added_tokens"] = added
  if all_pairs:
    made_by = ["".join(pair) for pair in known["model"]["merges"]]
    vocab = known["model"]["vocab"]
    merges = [pair for text in made_by for pair in gguf_tokenizer.splits(text, vocab)]
    known["model"]["merges"] = merges
  return tokenizers.Tokenizer.from_str(json.dumps(known))


@pytest.mark.parametrize("prefix", [False, True])
def test_a_tokenizer_over_characters_comes_back_by_its_scores(prefix):
  made = over_characters(prefix=prefix)
  metadata = keys_of(made)
  assert metadata[KEY + "model"] == "llama" and KEY + "merges" not in metadata
  assert metadata[KEY + "add_space_prefix"] is prefix
  kinds = metadata[KEY + "token_type"]
  assert kinds.count(Kind.BYTE) == 256 and kinds[0] == Kind.UNKNOWN
  check_equal(made, read_back(metadata))


def test_merges_are_stored_where_scores_do_not_give_them():
  made = over_characters(all_pairs=False)
  metadata = keys_of(made)
  assert metadata[KEY + "model"] == "gemma4"
  check_equal(made, read_back(metadata))
