"""The tokenizer files of a Hugging Face folder, read and written as plain data.

This file handles JSON and jinja sources only; `tokenizer_loading` builds tokenizers.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tunix.utils import checks, io, text_files

TOKEN_NAMES = (
  *("bos_token", "eos_token", "pad_token", "unk_token"),
  *("sep_token", "cls_token", "mask_token"),
)

ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

NAMED_TEMPLATES = "additional_chat_templates"  # folder of templates by name

ChatTemplates = str | Mapping[str, str]  # jinja source, or sources by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
  """The content of a folder's tokenizer files.

  Attributes:
    tokenizer_json: path of `tokenizer.json`; None if the folder has none.
    config: content of `tokenizer_config.json`; {} if the folder has none.
    tokens: special tokens by role, for example {"eos_token": "</s>"}.
    extra_tokens: special tokens without a role.
    added_tokens: id -> description of each added token in `config`.
    chat_template: jinja source, or sources by name; None if the folder has none.
    eos_ids: end-of-sequence ids of the generation and model configurations.
  """

  tokenizer_json: pathlib.Path | None
  config: dict[str, Any]
  tokens: dict[str, str]
  extra_tokens: tuple[str, ...]
  added_tokens: dict[int, dict[str, Any]]
  chat_template: ChatTemplates | None
  eos_ids: tuple[int, ...]

  def without_added(self) -> TokenizerFiles:
    """Returns the files without `added_tokens_decoder`, which would lack new tokens.

    Readers then take all added tokens from `tokenizer.json`.
    """
    config = {k: v for k, v in self.config.items() if k != "added_tokens_decoder"}
    return dataclasses.replace(self, config=config)


def read_folder(folder: pathlib.Path) -> TokenizerFiles:
  """Reads every tokenizer file of a folder.

  Raises:
    ValueError: a file is not valid JSON, not text, or not of the expected form; the
      message names the file.
  """
  file = folder / "tokenizer_config.json"
  config = _read_json(file)
  named = {**_read_json(folder / "special_tokens_map.json"), **config}
  extra = named.get("extra_special_tokens") or named.get("additional_special_tokens")
  extra = list(extra.values()) if isinstance(extra, dict) else extra or []
  _expect(file, "extra_special_tokens", extra, list, "a list of tokens")
  source = folder / "tokenizer.json"
  return TokenizerFiles(
    tokenizer_json=source if source.is_file() else None,
    config=config,
    tokens={x: text for x in TOKEN_NAMES if (text := _token_text(named.get(x)))},
    extra_tokens=tuple(text for item in extra if (text := _token_text(item))),
    added_tokens=_read_added_tokens(file, config),
    chat_template=_read_chat_template(folder, file, config),
    eos_ids=read_eos_ids(folder),
  )


def read_eos_ids(folder: pathlib.Path) -> tuple[int, ...]:
  """Returns the end-of-sequence ids of the model's configuration, without duplicates.

  Chat models often have several: Llama 3 has one for the end of the text and one for
  the end of a turn. The tokenizer knows only one of them.
  """
  ids: list[int] = []
  for file in (folder / "generation_config.json", folder / "config.json"):
    config = _read_json(file)
    nested = config.get("text_config") or {}
    _expect(file, "text_config", nested, dict, "a JSON object")
    value = config.get("eos_token_id", nested.get("eos_token_id"))
    for number in value if isinstance(value, list) else [value]:
      if number is not None:
        ids.append(_expect(file, "eos_token_id", number, int, "whole numbers"))
  return tuple(dict.fromkeys(ids))


def write_folder(
  folder: pathlib.Path,
  *,
  tokenizer_json: str,
  config: Mapping[str, Any],
) -> None:
  """Writes `tokenizer.json` and a `tokenizer_config.json` that AutoTokenizer reads.

  Args:
    folder: the folder.
    tokenizer_json: content of `tokenizer.json`.
    config: keys of `tokenizer_config.json`, such as the special tokens by role.

  Raises:
    OSError: the folder cannot be written.
  """
  merged = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
  merged.pop("chat_template", None)  # `write_chat_template` writes its own file.
  io.write_atomic(folder / "tokenizer.json", tokenizer_json.encode())
  io.write_json(folder / "tokenizer_config.json", merged)


def write_chat_template(folder: pathlib.Path, template: ChatTemplates) -> None:
  """Writes `chat_template.jinja`, and named variants as `transformers` expects them.

  Variants of an earlier template are removed, because a reader would use them.
  """
  named = {"default": template} if isinstance(template, str) else dict(template)
  for old in (folder / NAMED_TEMPLATES).glob("*.jinja"):
    if old.stem not in named:
      old.unlink()
  for name, source in named.items():
    variant = folder / NAMED_TEMPLATES / f"{name}.jinja"
    target = folder / "chat_template.jinja" if name == "default" else variant
    io.write_atomic(target, source.encode())


def _read_added_tokens(
  file: pathlib.Path, config: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
  """Returns {id: description} of `added_tokens_decoder`."""
  added = config.get("added_tokens_decoder") or {}
  _expect(file, "added_tokens_decoder", added, dict, "an object {id: token}")
  for key, item in added.items():
    if not key.isdecimal():
      raise _misshapen(file, "an id in added_tokens_decoder", key, "a whole number")
    name = f"added_tokens_decoder[{key}]"
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
      raise _misshapen(file, name, item, 'an object with "content"')
    for flag in ADDED_TOKEN_FLAGS:
      _expect(file, f"{name}.{flag}", item.get(flag, False), bool, "true or false")
  return {int(key): item for key, item in added.items()}


def _read_chat_template(
  folder: pathlib.Path, file: pathlib.Path, config: Mapping[str, Any]
) -> ChatTemplates | None:
  """Returns the templates of the config and of the folder's jinja files.

  A jinja file replaces a template of the same name in the config.
  """
  source = config.get("chat_template")
  named: dict[str, str] = {}
  if isinstance(source, list):
    for item in source:
      fields = item if isinstance(item, dict) else {}
      name, text = fields.get("name"), fields.get("template")
      if not isinstance(name, str) or not isinstance(text, str):
        expected = 'objects of "name" and "template"'
        raise _misshapen(file, "chat_template", item, expected)
      named[name] = text
  elif source is not None:
    named["default"] = _expect(file, "chat_template", source, str, "jinja source")
  for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
    named[path.stem] = _read_template(path)
  default = folder / "chat_template.jinja"
  if default.is_file():
    named["default"] = _read_template(default)
  return named["default"] if set(named) == {"default"} else named or None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the object of a JSON file; {} if there is no file."""
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"{path} is no valid JSON ({error}); download or export the folder again"
    ) from error
  if not isinstance(value, dict):
    raise ValueError(
      f"{path} holds {checks.type_of(value)}, expected a JSON object; download or "
      "export the folder again"
    )
  return value


def _read_template(path: pathlib.Path) -> str:
  # Fingerprints of runs depend on the template, with line feeds at its line ends.
  return text_files.read(path).replace("\r\n", "\n")


def _expect(
  file: pathlib.Path, name: str, value: object, kind: type, words: str
) -> Any:
  """Returns `value` if it is a `kind`; true and false are no whole numbers.

  Raises:
    ValueError: the value has another type; `words` describes the expected one.
  """
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise _misshapen(file, name, value, words)
  return value


def _misshapen(
  file: pathlib.Path, name: str, value: object, expected: str
) -> ValueError:
  shown = repr(value)
  shown = shown if len(shown) <= 60 else shown[:57] + "..."
  return ValueError(
    f"{file}: {name} is {shown}, expected {expected}; correct it, or download the "
    "folder again"
  )


def _token_text(value: object) -> str | None:
  """Returns the text of a special token, stored as a string or as a description."""
  if isinstance(value, dict):
    value = value.get("content")
  return value if isinstance(value, str) and value else None
