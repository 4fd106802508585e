"""The table of pre-tokenizers: llama.cpp's names and the patterns of `tokenizers`.

A GGUF file holds the name of its pre-tokenizer, and `tokenizer.json` the patterns. A
pattern cuts a text into words, and no token crosses the border of two words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_WORD = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGIT = (r"\p{N}",)
_LLAMA3 = (_WORD + "{1,3}" + _SIGNS,)
_QWEN2 = (_WORD + _SIGNS,)
_QWEN35 = (
  _ENDINGS
  + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
  + _SPACES,
)
_DEEPSEEK3 = (
  r"\p{N}{1,3}",
  "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese and Japanese
  r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
  r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)


def _cased(endings: str, digits: str) -> tuple[str]:
  """Returns the pattern that cuts before an upper-case letter inside a word."""
  start = r"[^\r\n\p{L}\p{N}]?"
  return (
    f"{start}{_UPPER}*{_LOWER}+{endings}|{start}{_UPPER}+{_LOWER}*{endings}|{digits}"
    + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _SPACES,
  )


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
  """A pre-tokenizer of byte-level BPE.

  Attributes:
    names: llama.cpp's names of it; the first one is written.
    patterns: regular expressions that cut the text, one after the other.
    composes: True if texts are brought into Unicode's form NFC first. llama.cpp does
      not do it, and the tokenizers that these files were made from do.
    ignore_merges: True if a word that is a token stays whole.
    add_bos: True if BOS begins a text unless the file says otherwise.
  """

  names: tuple[str, ...]
  patterns: tuple[str, ...]
  composes: bool = False
  ignore_merges: bool = False
  add_bos: bool = False


TABLE = (
  PreTokenizer(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    _LLAMA3,
    ignore_merges=True,
    add_bos=True,
  ),
  PreTokenizer(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
  PreTokenizer(("qwen2",), _QWEN2, composes=True),
  PreTokenizer(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
  PreTokenizer(("qwen35",), _QWEN35, composes=True),
  PreTokenizer(("gpt-2", "phi-2", "trillion", "exaone4"), _GPT2),
  PreTokenizer(("olmo",), _GPT2, composes=True),
  PreTokenizer(("smollm", "refact", "starcoder", "codeshell"), _DIGIT + _GPT2),
  PreTokenizer(("command-r",), _DIGIT + _GPT2, composes=True),
  PreTokenizer(("tekken",), _cased("", r"\p{N}"), ignore_merges=True, add_bos=True),
  PreTokenizer(("gpt-4o", "llama4", "kanana2"), _cased(_ENDINGS + "?", r"\p{N}{1,3}")),
  PreTokenizer(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
)

# The step between bytes and the letters that stand for them.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
REMEDY = "Take the tokenizer from the model's Hugging Face folder (tokenizer.path)"

# Other spellings of the same pattern in published files.
_SPELLINGS = (
  ("\r", r"\r"),
  ("\n", r"\n"),
  ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _ENDINGS),
)


def by_name(name: object) -> PreTokenizer:
  """Returns the pre-tokenizer with the name that a file holds; None if it holds none.

  Raises:
    ValueError: the name is not in the table.
  """
  entry = next((entry for entry in TABLE if name in entry.names), None)
  if entry is None:
    raise ValueError(f"tokenizer.ggml.pre is {name!r}; expected {_names()}. {REMEDY}")
  return entry


def recognized(tokenizer: Mapping[str, Any]) -> PreTokenizer:
  """Returns the pre-tokenizer with the patterns of a byte-level `tokenizer.json`.

  Raises:
    ValueError: llama.cpp has none with these patterns, or with this normalizer.
  """
  patterns = _patterns(tokenizer["pre_tokenizer"])
  normalizers = [x.get("type") for x in steps(tokenizer.get("normalizer"))]
  # Where the normalizer is missing in the table, NFC comes nearest: llama.cpp has none.
  entries = sorted(
    (entry for entry in TABLE if entry.patterns == patterns),
    key=lambda entry: (
      entry.composes != (normalizers == ["NFC"]),
      entry.ignore_merges != bool(tokenizer["model"].get("ignore_merges")),
    ),
  )
  if normalizers not in ([], ["NFC"]):
    raise ValueError(
      f"tokenizer.json normalizes with {normalizers}; expected NFC or nothing, because "
      "llama.cpp has no normalizers. Export without GGUF"
    )
  if not entries:
    raise ValueError(
      f"tokenizer.json cuts texts with {patterns}, which is none of llama.cpp's "
      f"pre-tokenizers that are known here ({_names()}). Export without GGUF"
    )
  return entries[0]


def steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
  """Returns the steps of a part of `tokenizer.json`; sequences are taken apart."""
  if part is None:
    return []
  inner = part.get("normalizers") or part.get("pretokenizers") or part.get("processors")
  if part.get("type") != "Sequence":
    return [part]
  return [step for each in inner or () for step in steps(each)]


def as_json(entry: PreTokenizer) -> dict[str, Any]:
  """Returns the parts of a byte-level `tokenizer.json` that the table decides."""
  split = {"type": "Split", "behavior": "Isolated", "invert": False}
  cuts = [{**split, "pattern": {"Regex": pattern}} for pattern in entry.patterns]
  last = {**_BYTE_LEVEL, "use_regex": False}
  return {
    "normalizer": {"type": "NFC"} if entry.composes else None,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, last]},
    "decoder": {**_BYTE_LEVEL, "use_regex": True},
    "model": {"type": "BPE", "ignore_merges": entry.ignore_merges},
  }


def _patterns(part: dict[str, Any] | None) -> tuple[str, ...]:
  """Returns the patterns of a `pre_tokenizer`, in the spelling of the table."""
  patterns: tuple[str, ...] = ()
  for step in steps(part):
    how = step.get("behavior"), step.get("invert")
    if step.get("type") == "Digits" and step.get("individual_digits"):
      patterns += _DIGIT
    elif step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
      patterns += _GPT2 if step.get("use_regex", True) else ()
    elif "Regex" in step.get("pattern", ()) and how in (
      ("Isolated", False),
      ("Removed", True),  # the same where the pattern matches every character
    ):
      pattern = step["pattern"]["Regex"]
      for other, ours in _SPELLINGS:
        pattern = pattern.replace(other, ours)
      patterns += (pattern,)
    else:
      raise ValueError(
        f"tokenizer.json has the pre-tokenizer {step}, which llama.cpp does not have. "
        "Export without GGUF"
      )
  return patterns


def _names() -> str:
  return ", ".join(sorted(name for entry in TABLE for name in entry.names))
