"""The tokenizer files of a Hugging Face folder, read and written as plain data.

Only JSON and jinja sources pass through here; building the tokenizer itself is the
adapter's work.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tunix.utils import io

TOKEN_NAMES = (
  "bos_token",
  "eos_token",
  "pad_token",
  "unk_token",
  "sep_token",
  "cls_token",
  "mask_token",
)

ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

ChatTemplates = str | Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
  """What a folder says about its tokenizer.

  Attributes:
    tokenizer_json: path of `tokenizer.json`, or None when the folder has none.
    config: `tokenizer_config.json` as it stands, {} when absent.
    tokens: special tokens by their role, for example {"eos_token": "</s>"}.
    extra_tokens: special tokens without a role.
    added_tokens: id -> description, from the configuration.
    chat_template: jinja source, or sources by name, or None.
    eos_ids: end-of-sequence ids of the generation and model configurations.
  """

  tokenizer_json: pathlib.Path | None
  config: dict[str, Any]
  tokens: dict[str, str]
  extra_tokens: tuple[str, ...]
  added_tokens: dict[int, dict[str, Any]]
  chat_template: ChatTemplates | None
  eos_ids: tuple[int, ...]


def read_folder(folder: pathlib.Path) -> TokenizerFiles:
  """Reads every tokenizer file of a folder.

  Raises:
    ValueError: one of the files is no valid JSON, no text, or not of the form that
      tokenizers have; it is named.
  """
  config_file = folder / "tokenizer_config.json"
  config = _read_json(config_file)
  named = {**_read_json(folder / "special_tokens_map.json"), **config}
  tokens = {
    name: text for name in TOKEN_NAMES if (text := _token_text(named.get(name)))
  }
  extra = named.get("extra_special_tokens") or named.get("additional_special_tokens")
  extra = list(extra.values()) if isinstance(extra, dict) else extra or []
  if not isinstance(extra, list):
    raise _misshapen(config_file, "extra_special_tokens", extra, "a list of tokens")
  source = folder / "tokenizer.json"
  return TokenizerFiles(
    tokenizer_json=source if source.is_file() else None,
    config=config,
    tokens=tokens,
    extra_tokens=tuple(text for item in extra if (text := _token_text(item))),
    added_tokens=_read_added_tokens(config_file, config),
    chat_template=_read_chat_template(folder, config),
    eos_ids=read_eos_ids(folder),
  )


def read_eos_ids(folder: pathlib.Path) -> tuple[int, ...]:
  """End-of-sequence ids that the model's own configuration names, in order, once.

  Chat models often have several (Llama 3: end of text and end of turn); the
  tokenizer knows only one of them.
  """
  ids: list[int] = []
  for name in ("generation_config.json", "config.json"):
    config = _read_json(folder / name)
    text_config = config.get("text_config") or {}
    if not isinstance(text_config, dict):
      raise _misshapen(folder / name, "text_config", text_config, "a JSON object")
    value = config.get("eos_token_id", text_config.get("eos_token_id"))
    values = value if isinstance(value, list) else [value]
    for number in values:
      if number is not None and not _is_id(number):
        raise _misshapen(folder / name, "eos_token_id", number, "whole numbers")
    ids += [number for number in values if number is not None]
  return tuple(dict.fromkeys(ids))


def write_folder(
  folder: pathlib.Path,
  *,
  tokenizer_json: str,
  config: Mapping[str, Any],
  tokens: Mapping[str, str],
) -> None:
  """Writes `tokenizer.json` and a `tokenizer_config.json` that AutoTokenizer reads.

  Raises:
    OSError: the folder cannot be written.
  """
  merged = {"tokenizer_class": "PreTrainedTokenizerFast", **config, **tokens}
  merged.pop("chat_template", None)  # has a file of its own
  io.write_atomic(folder / "tokenizer.json", tokenizer_json.encode())
  io.write_json(folder / "tokenizer_config.json", merged)


def write_chat_template(folder: pathlib.Path, template: ChatTemplates) -> None:
  """Writes `chat_template.jinja`, and named variants where `transformers` looks."""
  named = {"default": template} if isinstance(template, str) else dict(template)
  for name, source in named.items():
    variant = folder / "additional_chat_templates" / f"{name}.jinja"
    target = folder / "chat_template.jinja" if name == "default" else variant
    io.write_atomic(target, source.encode())


def _read_added_tokens(
  file: pathlib.Path, config: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
  """{id: description} of `added_tokens_decoder`."""
  stated = config.get("added_tokens_decoder") or {}
  if not isinstance(stated, dict):
    raise _misshapen(file, "added_tokens_decoder", stated, "an object {id: token}")
  added = {}
  for key, item in stated.items():
    if not key.isdecimal():
      raise _misshapen(file, "an id in added_tokens_decoder", key, "a whole number")
    name = f"added_tokens_decoder[{key}]"
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
      raise _misshapen(file, name, item, 'an object with "content"')
    for flag in ADDED_TOKEN_FLAGS:
      if not isinstance(item.get(flag, False), bool):
        raise _misshapen(file, f"{name}.{flag}", item[flag], "true or false")
    added[int(key)] = item
  return added


def _read_chat_template(
  folder: pathlib.Path, config: Mapping[str, Any]
) -> ChatTemplates | None:
  stated = config.get("chat_template")
  named: dict[str, str] = {}
  if isinstance(stated, str):
    named["default"] = stated
  elif isinstance(stated, list):
    for item in stated:
      fields = item if isinstance(item, dict) else {}
      name, source = fields.get("name"), fields.get("template")
      if not isinstance(name, str) or not isinstance(source, str):
        file = folder / "tokenizer_config.json"
        raise _misshapen(
          file, "chat_template", item, 'objects of "name" and "template"'
        )
      named[name] = source
  elif stated is not None:
    file = folder / "tokenizer_config.json"
    raise _misshapen(file, "chat_template", stated, "jinja source")
  for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
    named[path.stem] = _read_text(path)
  source = folder / "chat_template.jinja"
  if source.is_file():
    named["default"] = _read_text(source)
  if set(named) == {"default"}:
    return named["default"]
  return named or None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"{path} is no valid JSON ({error}); download or export the folder again"
    ) from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds a {type(value).__name__}, expected a JSON object")
  return value


def _read_text(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is no UTF-8 text ({error}); download or export the folder again"
    ) from error


def _is_id(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _misshapen(file: pathlib.Path, what: str, value: Any, expected: str) -> ValueError:
  shown = repr(value)
  shown = shown if len(shown) <= 60 else shown[:57] + "..."
  return ValueError(
    f"{file}: {what} is {shown}, expected {expected}; correct it, or download the "
    "folder again"
  )


def _token_text(value: Any) -> str | None:
  """The text of a special token, written as a string or as a description of one."""
  if isinstance(value, dict):
    value = value.get("content")
  return value if isinstance(value, str) and value else None
