"""Metadata of a GGUF file made from tokenizer files; see `gguf.tokenizer`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.models.gguf import pre_tokenizers, tokenizer as reader
from tunix.models.gguf.tokenizer import ENDS, KEY, SPACE, TEMPLATE, Kind

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_ONE_SPACE = {"String": " "}
_WRITTEN = ("content", "prepend", "replacement")  # what a step writes for a space
_EXTRAS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_Merges = Sequence[tuple[str, ...]]


def metadata_of(
  tokenizer: Mapping[str, Any],
  *,
  roles: Mapping[str, str],
  eos_ids: Sequence[int],
  chat_template: str | Mapping[str, str] | None,
  add_bos: bool,
  rows: int,
) -> dict[str, Any]:
  """Returns the metadata of a tokenizer.

  Args:
    tokenizer: content of `tokenizer.json`.
    roles: text of the special tokens by role, for example {"eos_token": "</s>"}.
    eos_ids: ids that end an answer.
    chat_template: jinja source, or sources by name.
    add_bos: True if BOS begins a plain text.
    rows: number of rows of the embedding. A row without a token gets an unused token; a
      token without a row is left out.

  Returns:
    Numbers >= 0, texts, flags, and lists of whole numbers, of floats or of texts.

  Raises:
    ValueError: llama.cpp has no such tokenizer.
  """
  model = tokenizer["model"]
  extras = [key for key in _EXTRAS if model.get(key)]
  if model.get("type", "BPE") != "BPE" or extras:
    raise ValueError(
      f"tokenizer.json has a model of type {model.get('type')} {extras}; expected BPE "
      f"without {', '.join(_EXTRAS)}. Export without GGUF"
    )
  merges = [tuple(x.split(" ") if isinstance(x, str) else x) for x in model["merges"]]
  added = {item["content"]: item for item in tokenizer.get("added_tokens") or ()}
  places = model["vocab"] | {text: item["id"] for text, item in added.items()}
  vocabulary = {text: number for text, number in places.items() if number < rows}
  kinds = dict.fromkeys(vocabulary, Kind.NORMAL)
  built = {"".join(pair) for pair in merges}
  for text, item in added.items():
    # Gemma lists runs of "▁", which the merges make of spaces. As added tokens they
    # would match that letter alone.
    if text in vocabulary and not (SPACE in text and text in built):
      kinds[text] = Kind.CONTROL if item.get("special") else Kind.USER_DEFINED
  cuts = pre_tokenizers.steps(tokenizer.get("pre_tokenizer"))
  if any(step["type"] == "ByteLevel" for step in cuts):
    pre = pre_tokenizers.recognized(tokenizer).names[0]
    keys = {"model": "gpt2", "pre": pre, "merges": _joined(merges)}
  else:
    kinds |= {text: Kind.BYTE for text in vocabulary if _BYTE.fullmatch(text)}
    if model.get("unk_token") in vocabulary:
      kinds[model["unk_token"]] = Kind.UNKNOWN
    prefix = _adds_space(tokenizer, bool(chat_template))
    keys = {"add_space_prefix": prefix, **_ranks(merges, kinds, prefix)}
  texts = {number: text for text, number in vocabulary.items()}
  tokens = [texts.get(number, f"[PAD{number}]") for number in range(rows)]
  if "scores" in keys:
    keys["scores"] = [keys["scores"].get(text, 0.0) for text in tokens]
  ids = _ids(vocabulary, kinds, roles, eos_ids)
  keys |= {
    "tokens": tokens,
    "token_type": [int(kinds.get(text, Kind.UNUSED)) for text in tokens],
    # llama.cpp refuses a file that adds a token which it does not name.
    "add_bos_token": add_bos and "bos_token_id" in ids,
    "add_eos_token": _adds_eos(tokenizer, roles),
    **ids,
  }
  return {KEY + key: value for key, value in keys.items()} | _templates(chat_template)


def _ranks(merges: _Merges, kinds: Mapping[str, Kind], prefix: bool) -> dict[str, Any]:
  """Returns the keys of the merges of a tokenizer over characters.

  Every version of llama.cpp reads scores. They allow every pair that makes a token, so
  that the merges themselves are stored where the tokenizer lacks some of these pairs.
  """
  normal = {text for text, kind in kinds.items() if kind == Kind.NORMAL}
  made: dict[str, list[tuple[str, ...]]] = {}
  mixed = False  # the pairs of two tokens alternate
  for pair in merges:
    if (text := "".join(pair)) in normal:
      made.setdefault(text, []).append(pair)
      mixed = mixed or next(reversed(made)) != text
  known = dict.fromkeys(normal)
  if not mixed and all(
    {*reader.splits(t, known)} == {*made.get(t, ())} for t in normal
  ):
    scores = {text: -float(rank) for rank, text in enumerate(made)}
    return {"model": "llama", "pre": "default", "scores": scores}
  if prefix or any(" " in part for pair in merges for part in pair):
    raise ValueError(
      "tokenizer.json lacks some pairs that make a token, and puts a space before "
      "texts or into a token; expected only one of these. Export without GGUF"
    )
  return {"model": "gemma4", "pre": "gemma4", "merges": _joined(merges)}


def _joined(merges: _Merges) -> list[str]:
  return [" ".join(pair) for pair in merges]


def _adds_space(tokenizer: Mapping[str, Any], is_chat: bool) -> bool:
  """Returns True if a tokenizer over characters puts a space before a text."""
  parts = (tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer"))
  steps = [step for part in parts for step in pre_tokenizers.steps(part)]
  kinds = [step["type"] for step in steps]
  is_known = tokenizer["model"].get("byte_fallback") and all(
    step.get("pattern", _ONE_SPACE) == _ONE_SPACE
    and {step[key] for key in _WRITTEN if key in step} <= {SPACE}
    for step in steps
  )
  # A Split at spaces finds none after Replace.
  if is_known and kinds in (["Replace"], ["Replace", "Split"]):
    return False
  if is_known and kinds == ["Prepend", "Replace"]:
    return True
  if is_known and kinds == ["Metaspace"] and not steps[0].get("split", True):
    # "first" puts no space after a special token, with which a chat begins. llama.cpp
    # would put one after each of them.
    scheme = steps[0].get("prepend_scheme", "always")
    return scheme == "always" or (scheme == "first" and not is_chat)
  raise ValueError(
    f"tokenizer.json changes texts by {str(steps)[:200]}; expected byte-level BPE, or "
    "BPE with byte_fallback where Replace or Metaspace writes ▁ for a space. Export "
    "without GGUF"
  )


def _adds_eos(tokenizer: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
  """Returns True if the tokenizer puts EOS after a text."""
  steps = pre_tokenizers.steps(tokenizer.get("post_processor"))
  last = [step["single"][-1] for step in steps if step.get("single")]
  ends = [part["SpecialToken"]["id"] for part in last if "SpecialToken" in part]
  return bool(ends) and ends[-1] == roles.get("eos_token")


def _ids(
  vocabulary: Mapping[str, int],
  kinds: Mapping[str, Kind],
  roles: Mapping[str, str],
  eos_ids: Sequence[int],
) -> dict[str, int]:
  """Returns the ids of the special tokens by key."""
  keys = {
    key: vocabulary.get(roles.get(role, "")) for key, role in reader.ROLES.items()
  }
  keys = {key: number for key, number in keys.items() if number is not None}
  texts = {number: text for text, number in vocabulary.items()}

  # llama.cpp finds some tokens by their texts. The keys are for the other ones.
  def is_known_end(i):
    return kinds[texts[i]] == Kind.CONTROL and texts[i] in reader.END_TEXTS

  known = keys.get("eos_token_id")
  others = dict.fromkeys(
    i for i in eos_ids if i in texts and i != known and not is_known_end(i)
  )
  if len(others) > 2:
    raise ValueError(
      f"{[texts[i] for i in others]} end an answer besides EOS; expected at most 2 for "
      "GGUF. Shorten eos_token_id in generation_config.json"
    )
  return keys | dict(zip(ENDS[1:], others, strict=False))


def _templates(template: str | Mapping[str, str] | None) -> dict[str, Any]:
  """Returns the keys of a chat template and its variants."""
  named = {"default": template} if isinstance(template, str) else dict(template or {})
  variants = [name for name in named if name != "default"]
  keys: dict[str, Any] = {f"{TEMPLATE}.{name}": named[name] for name in variants}
  keys |= {TEMPLATE: named["default"]} if "default" in named else {}
  return keys | ({"tokenizer.chat_templates": variants} if variants else {})
