"""Tokenizer files made from the metadata of a GGUF file.

llama.cpp has three kinds of tokenizer that models of our families use. "gpt2" is BPE
over bytes. "llama" is SentencePiece's BPE over characters: a score ranks each token, a
space is written as "▁", and unknown characters become bytes. "gemma4" is the same with
merges in place of scores.
"""

from __future__ import annotations

import collections
import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.models.gguf import pre_tokenizers

SPACE = "▁"
KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"

# Keys of the special tokens -> their names in tokenizer_config.json.
ROLES = {
  "bos_token_id": "bos_token",
  "eos_token_id": "eos_token",
  "unknown_token_id": "unk_token",
  "seperator_token_id": "sep_token",  # GGUF's spelling
  "padding_token_id": "pad_token",
  "mask_token_id": "mask_token",
}
# Keys of the tokens that end a text, a turn, and a message that calls a tool.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end an answer in llama.cpp, whatever the keys say.
END_TEXTS = frozenset(
  (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|eom_id|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>", "</s>"),
    *("<|endoftext|>", "<|end_of_text|>", "<\uff5cend▁of▁sentence\uff5c>"),
  )
)
_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
_AGAIN = "Download the file again"
# Characters of a token. Making merges takes their square; published tokens have 128.
_MAX_TOKEN = 1024


class Kind(enum.IntEnum):
  """Kinds of tokens in a GGUF file."""

  NORMAL = 1
  UNKNOWN = 2
  CONTROL = 3
  USER_DEFINED = 4
  UNUSED = 5
  BYTE = 6


_KINDS = {int(kind): kind for kind in Kind}


def files_of(metadata: Mapping[str, Any]) -> dict[str, str]:
  """Returns the tokenizer files of a model folder: text by name.

  Args:
    metadata: the metadata of a GGUF file.

  Raises:
    ValueError: the tokenizer is missing, of an unknown kind, or damaged.
  """
  model = _get(metadata, KEY + "model", str)
  tokens, kinds = _vocabulary(metadata)
  ids = _ids(metadata, len(tokens))
  texts = {role: tokens[ids[key]] for key, role in ROLES.items() if key in ids}
  add_eos = _get(metadata, KEY + "add_eos_token", bool, False)
  if model == "gpt2":
    pre = pre_tokenizers.by_name(metadata.get(KEY + "pre"))
    add_bos, parts = pre.add_bos, pre_tokenizers.as_json(pre)
  elif model in ("llama", "gemma4"):
    add_bos = model == "llama"
    prefix = _get(metadata, KEY + "add_space_prefix", bool, add_bos)
    parts = _sentencepiece(prefix, texts.get("unk_token"))
  else:
    raise ValueError(
      f"tokenizer.ggml.model is {model!r}; expected gpt2, llama or gemma4. "
      f"{pre_tokenizers.REMEDY}"
    )
  # llama.cpp puts BOS before all texts of Gemma 4. The original tokenizer does not: its
  # chat template writes BOS.
  add_bos = model != "gemma4" and _get(metadata, KEY + "add_bos_token", bool, add_bos)
  if model == "llama" and KEY + "merges" not in metadata:
    merges = _merges_of_scores(tokens, kinds, _numbers(metadata, "scores"))
  else:
    merges = [_pair(line) for line in _get(metadata, KEY + "merges", Sequence)]
  parts["model"]["vocab"] = {text: number for number, text in enumerate(tokens)}
  parts["model"]["merges"] = merges
  before = [texts["bos_token"]] if add_bos and "bos_token" in texts else []
  after = [texts["eos_token"]] if add_eos and "eos_token" in texts else []
  parts["post_processor"] = _post_processor(
    before, after, {text: parts["model"]["vocab"][text] for text in (*before, *after)}
  )
  added = _added_tokens(metadata, tokens, kinds)
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "add_bos_token": add_bos,
    "add_eos_token": add_eos,
    **texts,
  }
  tokenizer = {"version": "1.0", "added_tokens": added, **parts}
  return {
    "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
    "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2),
    **_templates(metadata),
  }


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `generation_config.json`: the ids that begin, pad and end a text.

  `eos_token_id` holds all ids at which llama.cpp ends an answer, except those of
  infilling.

  Raises:
    ValueError: the vocabulary or an id is damaged.
  """
  if KEY + "tokens" not in metadata:
    return {}
  tokens, kinds = _vocabulary(metadata)
  ids = _ids(metadata, len(tokens))
  control = {tokens[i]: i for i, kind in enumerate(kinds) if kind == Kind.CONTROL}
  named = END_TEXTS & control.keys()
  # An answer of gpt-oss has several messages, which <|end|> ends. </s> of Gemma 4 is a
  # tag of HTML.
  named -= {"<|end|>"} if {"<|return|>", "<|call|>"} <= named else set()
  named -= {"</s>"} if "<|tool_response>" in named else set()
  ends = [ids[key] for key in ENDS if key in ids]
  ends += sorted(control[text] for text in named)
  values = {
    "bos_token_id": ids.get("bos_token_id"),
    "eos_token_id": list(dict.fromkeys(ends)) or None,
    "pad_token_id": ids.get("padding_token_id"),
  }
  return {key: value for key, value in values.items() if value is not None}


def splits(text: str, known: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns the pairs of known texts that make a text, the longest left part first."""
  cuts = range(len(text) - 1, 0, -1)
  return [(text[:i], text[i:]) for i in cuts if text[:i] in known and text[i:] in known]


def _get(
  metadata: Mapping[str, Any], key: str, kind: type, default: object = None
) -> Any:
  """Returns a value of the metadata, which has a default or must be there."""
  value = metadata.get(key, default)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    shown = "missing" if value is None else f"of type {type(value).__name__}"
    raise ValueError(f"{key} is {shown}; expected type {kind.__name__}. {_AGAIN}")
  return value


def _numbers(metadata: Mapping[str, Any], name: str) -> list[Any]:
  """Returns a list with one number for each token."""
  values = np.ravel(metadata.get(KEY + name, ())).tolist()
  if len(values) != (count := len(metadata[KEY + "tokens"])):
    raise ValueError(
      f"{KEY}{name} has {len(values)} entries; expected {count}, one for each token. "
      f"{_AGAIN}"
    )
  return values


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[Kind]]:
  """Returns the texts and the kinds of the tokens by id.

  Unused tokens at the end, which only fill the rows of the embedding, are left out.
  """
  # llama.cpp also gives empty tokens a name.
  listed = enumerate(_get(metadata, KEY + "tokens", Sequence))
  tokens = [text or f"[EMPTY_{number}]" for number, text in listed]
  text, times = collections.Counter(tokens).most_common(1)[0] if tokens else ("", 1)
  if times > 1:
    raise ValueError(f"{KEY}tokens holds {text[:80]!r} {times} times. {_AGAIN}")
  longest = max(map(len, tokens), default=0)
  if longest > _MAX_TOKEN:
    raise ValueError(
      f"{KEY}tokens holds a token of {longest} characters; expected at most "
      f"{_MAX_TOKEN}. {_AGAIN}"
    )
  kinds = [Kind.NORMAL] * len(tokens)
  if KEY + "token_type" in metadata:
    kinds = [_KINDS.get(x, Kind.NORMAL) for x in _numbers(metadata, "token_type")]
  while tokens and kinds[-1] == Kind.UNUSED and tokens[-1] == f"[PAD{len(tokens) - 1}]":
    del tokens[-1], kinds[-1]
  return tokens, kinds


def _ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
  """Returns the ids of the special tokens by key."""
  is_piece = metadata.get(KEY + "model") == "llama"
  ids = dict(_SENTENCEPIECE_IDS) if is_piece else {}
  for key in (*ROLES, *ENDS):
    if KEY + key in metadata:
      ids[key] = _get(metadata, KEY + key, int)
      if not 0 <= ids[key] < count:
        raise ValueError(
          f"{KEY}{key} is {ids[key]}; expected an id below {count}. {_AGAIN}"
        )
  return {key: number for key, number in ids.items() if number < count}


def _pair(line: str) -> tuple[str, str]:
  """Returns the two parts of a merge; the first character may be a space."""
  at = line.find(" ", 1)
  if at < 0:
    raise ValueError(
      f"{KEY}merges holds {line[:80]!r}; expected two parts with a space between them. "
      f"{_AGAIN}"
    )
  return line[:at], line[at + 1 :]


def _merges_of_scores(
  tokens: Sequence[str], kinds: Sequence[int], scores: Iterable[float]
) -> list[tuple[str, str]]:
  """Returns the merges of SentencePiece: the pairs of the best token come first.

  Tokens of other kinds are cut out of a text before, so that no pair makes them.
  """
  listed = zip(tokens, kinds, scores, strict=False)  # scores of unused tokens are left
  normal = {text: score for text, kind, score in listed if kind == Kind.NORMAL}
  ordered = sorted(normal, key=normal.__getitem__, reverse=True)
  return [pair for text in ordered for pair in splits(text, normal)]


def _added_tokens(
  metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> list[dict[str, Any]]:
  """Returns the tokens that are cut out of a text before anything else."""
  # Special tokens of Phi-3 take the spaces after them. The file does not say so:
  # llama.cpp knows it from the name of the model.
  name = f"{metadata.get('general.name')} {metadata.get('general.architecture')}"
  is_phi3 = metadata.get(KEY + "model") == "llama" and re.search("(?i)phi-?3", name)
  plain = ("<unk>", "<s>", "<|endoftext|>")
  return [
    dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    | {"id": number, "content": text, "special": kind != Kind.USER_DEFINED}
    | {"rstrip": bool(is_phi3) and text not in plain}
    for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
    if kind in (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
  ]


def _sentencepiece(prefix: bool, unknown: str | None) -> dict[str, Any]:
  """Returns the parts of `tokenizer.json` as `pre_tokenizers.as_json` does.

  Args:
    prefix: put a space before a text and after special tokens.
    unknown: text of the token of unknown characters.
  """
  first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
  last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
  spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
  back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
  decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *last]
  flags = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
  return {
    "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
    "pre_tokenizer": None,
    "decoder": {"type": "Sequence", "decoders": decoders},
    "model": {"type": "BPE", **flags},
  }


def _post_processor(
  before: Sequence[str], after: Sequence[str], ids: Mapping[str, int]
) -> dict[str, Any]:
  """Returns the step that puts special tokens around a text."""

  def parts(name: str, number: int) -> list[dict[str, Any]]:
    def special(text):
      return {"SpecialToken": {"id": text, "type_id": number}}

    text = {"Sequence": {"id": name, "type_id": number}}
    return [*map(special, before), text, *map(special, after)]

  tokens = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ids.items()}
  single, pair = parts("A", 0), parts("A", 0) + parts("B", 1)
  rules = {"single": single, "pair": pair, "special_tokens": tokens}
  return {"type": "TemplateProcessing", **rules}


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
  """Returns the chat template, and its variants by the names of their files."""
  files = {}
  for key in metadata:
    if key == TEMPLATE:
      files["chat_template.jinja"] = _get(metadata, key, str)
    elif variant := re.fullmatch(re.escape(TEMPLATE) + r"\.(\w{1,64})", key):
      name = f"additional_chat_templates/{variant[1]}.jinja"
      files[name] = _get(metadata, key, str)
  return files
