"""The bytes of every token of a tokenizer.

The bytes of a completion's tokens, joined, are its text in UTF-8. One token may hold a
part of a character. Constraints (`engine/grammar.py`) need the bytes, and so does the
field `bytes` of log-probabilities in OpenAI's API.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunix.generate.tokenizer_adapter import TokenizerAdapter

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"
_UNKNOWN = "\ufffd"

# A step of a decoder: a text becomes another text or, at the last step, bytes.
_Step = Callable[[Any], Any]

# One character for each byte that UTF-8 has beyond ASCII: all bytes that continue a
# character, then the first bytes of characters of two, three and four bytes.
_BEYOND_ASCII = "".join(
  map(
    chr,
    [
      *range(0x80, 0xC0),
      *range(0xC0, 0x800, 0x40),
      *(0x800, *range(0x1000, 0x10000, 0x1000)),
      *(0x10000, *range(0x40000, 0x110000, 0x40000)),
    ],
  )
)

# Text that `_check` encodes: JSON, letters of two, three and four bytes, white space.
_SAMPLE = 'a {"b": [1, 2]}\n  naïve ☃ \U0001f600'


def token_bytes(tokenizer: TokenizerAdapter) -> list[bytes | None]:
  """Returns the bytes of each id.

  Args:
    tokenizer: a tokenizer of any kind. If it offers neither its pieces nor their bytes,
      the bytes are found by decoding ids and by encoding characters.

  Returns:
    List of `vocab_size` entries, indexed by id. An entry is None if the id has no text
    of its own (a special token or an unused id), or if its bytes cannot be found.

  Raises:
    ValueError: the bytes, joined, differ from what the tokenizer decodes. This is so
      for decoders that change a token's text according to its neighbors.
  """
  by_id: list[bytes | None] = [None] * tokenizer.vocab_size
  special = tokenizer.special_ids()
  for number, data in _plain_tokens(tokenizer):
    if 0 <= number < len(by_id) and number not in special:
      by_id[number] = data or None
  _check(tokenizer, by_id)
  return by_id


def _plain_tokens(
  tokenizer: TokenizerAdapter,
) -> Iterable[tuple[int, bytes | None]]:
  """Returns (id, bytes) pairs, by the best source that the tokenizer offers."""
  raw, ids = tokenizer.tokenizer, range(tokenizer.vocab_size)
  rust = getattr(raw, "backend_tokenizer", raw)
  if hasattr(rust, "to_str") and hasattr(rust, "get_added_tokens_decoder"):
    return _of_tokenizers(rust)
  if hasattr(raw, "decode_single_token_bytes"):
    return ((i, _of_tiktoken(raw, i)) for i in ids)
  if hasattr(raw, "id_to_piece") and hasattr(raw, "is_byte"):
    return ((i, _of_sentencepiece(raw, i)) for i in ids)
  return _by_decoding(tokenizer).items()


def _of_tokenizers(rust: Any) -> Iterable[tuple[int, bytes | None]]:
  """Returns the tokens of a `tokenizers.Tokenizer`, by the steps of its decoder."""
  vocabulary = rust.get_vocab(with_added_tokens=True)
  # The whole vocabulary is written as JSON, 0.1 s for 150,000 tokens, because decoder
  # objects do not show their settings.
  source = json.loads(rust.to_str())
  steps = [_step(part) for part in _parts(source["decoder"])]
  model = source["model"]
  unknown = model.get("unk_token"), model.get("unk_id")  # BPE has a text, Unigram an id
  special = {i for i, t in rust.get_added_tokens_decoder().items() if t.special}
  for piece, number in vocabulary.items():
    if piece in unknown or number in unknown or number in special:
      continue
    data: Any = piece
    for step in steps:
      data = step(data) if isinstance(data, str) else data
    yield number, data.encode() if isinstance(data, str) else data


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
  """Returns the parts of a decoder that change a single token, in order."""
  parts = _flat(decoder or {"type": None})
  kinds = [part["type"] for part in parts]
  fused = kinds.index("Fuse") if "Fuse" in kinds else len(parts)
  # A strip after "Fuse" removes the space at the start of a whole text only.
  after = [part for part in parts[fused + 1 :] if part["type"] != "Strip"]
  return parts[:fused] + after


def _flat(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  if decoder["type"] != "Sequence":
    return [decoder]
  return [part for nested in decoder["decoders"] for part in _flat(nested)]


def _step(part: Mapping[str, Any]) -> _Step:
  kind = part["type"]
  if kind == "ByteLevel":
    return _of_byte_level
  if kind == "ByteFallback":
    return _of_byte_piece
  if kind == "Metaspace":
    return lambda text: text.replace(part["replacement"], " ")
  if kind == "Replace" and "String" in part["pattern"]:
    return lambda text: text.replace(part["pattern"]["String"], part["content"])
  raise ValueError(
    f"the tokenizer's decoder has a part of type {kind!r}; expected ByteLevel, "
    "ByteFallback, Metaspace, Fuse, Replace of a string, or Strip after Fuse, because "
    "only they give each token bytes of its own. Use a byte-level or SentencePiece "
    "tokenizer"
  )


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
  """Returns character -> byte of the alphabet that GPT-2 introduced.

  Visible characters of Latin-1 stand for themselves; the other bytes, in order, are the
  characters from U+0100 on.
  """
  visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  hidden = [byte for byte in range(256) if byte not in visible]
  alphabet = {chr(byte): byte for byte in visible}
  return alphabet | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def _of_byte_level(piece: str) -> bytes:
  alphabet = _byte_level_alphabet()
  # A token with a character outside the alphabet, such as the space of an added token
  # "<a b>", is decoded as plain text.
  if all(char in alphabet for char in piece):
    return bytes(alphabet[char] for char in piece)
  return piece.encode()


def _of_byte_piece(piece: str) -> bytes | str:
  match = _BYTE_PIECE.fullmatch(piece)
  return bytes([int(match[1], 16)]) if match else piece


def _of_tiktoken(encoding: Any, number: int) -> bytes | None:
  try:
    return encoding.decode_single_token_bytes(number)
  except KeyError:
    return None  # Encodings have gaps between their last tokens.


def _of_sentencepiece(processor: Any, number: int) -> bytes | None:
  checks = (processor.is_control, processor.is_unknown, processor.is_unused)
  if any(check(number) for check in checks):
    return None
  piece = processor.id_to_piece(number)
  if processor.is_byte(number):
    return bytes([int(piece[3:5], 16)])
  return piece.replace(_SPACE, " ").encode()


def _by_decoding(tokenizer: TokenizerAdapter) -> dict[int, bytes]:
  """Returns id -> bytes of the tokens whose bytes decoding or encoding shows."""
  # Decoders drop a space at the start of a text. Behind an anchor the space stays.
  anchor = tokenizer.encode("a")
  start = tokenizer.decode(anchor, skip_special_tokens=False)
  by_id: dict[int, bytes] = {}
  unknown: set[int] = set()
  for number in range(tokenizer.vocab_size):
    text = tokenizer.decode([*anchor, number], skip_special_tokens=False)
    if text.startswith(start) and text != start and _UNKNOWN not in text:
      by_id[number] = text[len(start) :].encode()
    else:
      unknown.add(number)
  return by_id | _lone_bytes(tokenizer, unknown)


def _lone_bytes(tokenizer: TokenizerAdapter, unknown: set[int]) -> dict[int, bytes]:
  """Returns id -> byte of the unknown ids that hold one byte of a character.

  If a character of n bytes is encoded as n ids without text of their own, and they
  decode to the character, then each id holds one byte.
  """
  by_id: dict[int, bytes] = {}
  for char in _BEYOND_ASCII if unknown else "":
    ids, data = tokenizer.encode_continuation(char), char.encode()
    is_split = len(ids) == len(data) and unknown.issuperset(ids)
    if is_split and tokenizer.decode(ids, skip_special_tokens=False) == char:
      by_id.update({i: bytes([byte]) for i, byte in zip(ids, data)})
  return by_id


def _check(tokenizer: TokenizerAdapter, by_id: list[bytes | None]) -> None:
  """Compares the joined bytes of a sample with the tokenizer's own text.

  Raises:
    ValueError: the two differ.
  """
  ids = [i for i in tokenizer.encode(_SAMPLE) if by_id[i] is not None]
  joined = b"".join(by_id[i] or b"" for i in ids).decode("utf-8", errors="replace")
  text = tokenizer.decode(ids)
  # SentencePiece puts a space before the text and drops it again.
  if joined.removeprefix(" ") != text.removeprefix(" "):
    raise ValueError(
      f"the tokenizer decodes a sample as {text!r}, but the bytes of its tokens are "
      f"{joined!r}; expected equal texts. Its decoder changes tokens according to "
      "their neighbors. Use a tokenizer without this, for example one with "
      "clean_up_tokenization_spaces=False"
    )
