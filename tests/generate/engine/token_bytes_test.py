"""The bytes of tokens, derived from every kind of tokenizer."""

import pytest
import tokenizers

from tests import toys_text
from tests.generate.tokenizer_kinds_test import KINDS
from tunix.generate.engine.token_bytes import token_bytes
from tunix.generate.tokenizer_adapter import TokenizerAdapter

TEXTS = "the sea, naïve ☃", '{"é": "😀\\n"}', " two  spaces", "日本語\tß"


@pytest.mark.parametrize("kind", [*KINDS, "metaspace"])
def test_joined_bytes_are_the_text(kind):
  make = toys_text.metaspace if kind == "metaspace" else KINDS[kind]
  tokenizer = TokenizerAdapter(make())
  found = token_bytes(tokenizer)
  assert len(found) == tokenizer.vocab_size
  assert all(found[i] is None for i in tokenizer.special_ids())
  assert b"" not in found
  for text in TEXTS if kind != "plain" else ["the sea"]:
    joined = b"".join(found[i] for i in tokenizer.encode(text))
    # SentencePiece and Llama put a space before a text; the trained model of the test
    # joins spaces.
    assert joined.decode().split() == text.split()


def test_bytes_by_hand():
  bpe = toys_text.bpe()
  found = token_bytes(TokenizerAdapter(bpe))
  # "Ġ" is the byte 0x20 and "Ã" is the byte 0xC3 in the alphabet of byte-level BPE.
  assert found[bpe.token_to_id("Ġthe")] == b" the"
  assert found[bpe.token_to_id("Ã")] == b"\xc3"
  assert found[bpe.token_to_id("<think>")] == b"<think>"  # added, but not special
  assert found[bpe.token_to_id("<|im_end|>")] is None

  llama = toys_text.metaspace()
  found = token_bytes(TokenizerAdapter(llama))
  assert found[llama.token_to_id("<0xC3>")] == b"\xc3"
  assert found[llama.token_to_id("<0x20>")] == found[llama.token_to_id("▁")] == b" "
  assert found[llama.token_to_id("</s>")] is None


def test_an_added_token_outside_the_byte_alphabet_is_plain_text():
  bpe = toys_text.bpe()
  bpe.add_tokens(["<a b>"])
  assert (
    token_bytes(TokenizerAdapter(bpe))[-1] == b"<a b>" == bpe.decode([514]).encode()
  )


def test_the_unknown_token_of_unigram_has_no_bytes():
  pieces = [("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0), ("▁", -2.0)]
  tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  tokenizer.decoder = tokenizers.decoders.Metaspace()
  assert token_bytes(TokenizerAdapter(tokenizer)) == [None, b" a", b"b", b" "]


class Processor:
  """The methods of `SentencePieceProcessor` that tell the kind of a piece."""

  PIECES = ("<unk>", "<s>", "</s>", "<unused>", "<0xC3>", "<0xA9>", "▁a", "b", "▁")

  def encode(self, text):
    ids = {"é": [4, 5], "a": [6], "b": [7], " ": [8]}
    return [i for char in text for i in ids.get(char, [0])]

  def decode(self, ids):
    parts = {4: b"\xc3", 5: b"\xa9", 6: b" a", 7: b"b", 8: b" "}
    return b"".join(parts.get(i, b"") for i in ids).decode(errors="replace").lstrip()

  def bos_id(self):
    return 1

  def eos_id(self):
    return 2

  def pad_id(self):
    return -1

  def vocab_size(self):
    return len(self.PIECES)

  def id_to_piece(self, number):
    return self.PIECES[number]

  def is_unknown(self, number):
    return number == 0

  def is_control(self, number):
    return number in (1, 2)

  def is_unused(self, number):
    return number == 3

  def is_byte(self, number):
    return number in (4, 5)


def test_the_kinds_of_sentencepiece():
  expected = [None] * 4 + [b"\xc3", b"\xa9", b" a", b"b", b" "]
  assert token_bytes(TokenizerAdapter(Processor())) == expected


class Encoding(KINDS["tiktoken-like"]):
  """An encoding with a gap, as tiktoken's `cl100k_base` has."""

  n_vocab = 260

  def decode_single_token_bytes(self, number):
    if number < 256:
      return bytes([number])
    raise KeyError(number)


def test_gaps_of_tiktoken_have_no_bytes():
  found = token_bytes(TokenizerAdapter(Encoding()))
  assert found == [bytes([b]) for b in range(256)] + [None] * 4


class Bytes:
  """The ids of ByT5: a byte is its value + 3, and decoding drops broken characters."""

  bos_id, eos_id, pad_id = None, 1, 0

  def encode(self, text):
    return [byte + 3 for byte in text.encode()]

  def decode(self, ids):
    return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors="ignore")

  def __len__(self):
    return 384


def test_bytes_of_parts_of_characters_are_found_by_encoding():
  found = token_bytes(TokenizerAdapter(Bytes()))
  # UTF-8 never has the bytes 0xC0, 0xC1 and those from 0xF5 on.
  never = {0xC0, 0xC1, *range(0xF5, 0x100)}
  expected = [None if b in never else bytes([b]) for b in range(256)]
  assert found == [None] * 3 + expected + [None] * 125


class CleansUp(Bytes):
  """Decodes an opening bracket without the space before it."""

  def decode(self, ids):
    return super().decode(ids).replace(" {", "{")


def test_decoders_that_change_neighbours_are_refused():
  words = {"a": 0, "[UNK]": 1}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
  tokenizer.decoder = tokenizers.decoders.WordPiece()
  with pytest.raises(ValueError, match="part of type 'WordPiece'; expected ByteLevel"):
    token_bytes(TokenizerAdapter(tokenizer))
  with pytest.raises(ValueError, match=r"decodes a sample as .*; expected equal texts"):
    token_bytes(TokenizerAdapter(CleansUp()))
