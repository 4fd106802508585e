"""Finds and builds the tokenizer at a path.

The package `tokenizers` alone reads a `tokenizer.json`. The packages `transformers` and
`sentencepiece` are needed only for other formats.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from tunix.generate.tokenizer import (
  files as tokenizer_files,
  limits as tokenizer_limits,
)
from tunix.generate.tokenizer.backends import TokenizersBackend
from tunix.models import hub
from tunix.models.gguf import folder as gguf_folder
from tunix.utils import optional

_NAME = re.compile(r"[\w.-]+")  # The hub's oldest models have no owner: "gpt2".

Path = str | os.PathLike[str]


def load_pretrained(path: Path, revision: str | None = None) -> Any:
  """Returns the tokenizer of a folder, a `tokenizer.json`, a GGUF file or a model id.

  Args:
    path: the folder, the file, or a model id "owner/name".
    revision: commit, tag or branch of a model id; None: its newest commit.

  Returns:
    An object that TokenizerAdapter wraps.

  Raises:
    FileNotFoundError: the path does not exist, or has no tokenizer.
    ImportError: the folder has no `tokenizer.json`, and transformers is missing.
    ValueError: a file is damaged, or a folder is given a revision.
  """
  if (made := gguf_folder.with_tokenizer(path, revision)) is not None:
    path, revision = made, None
  source = pathlib.Path(path).expanduser()
  if source.is_file() and source.name != "tokenizer.json":
    raise ValueError(
      f"{source} is no tokenizer.json and no GGUF file; give its folder, or such a file"
    )
  folder = source.parent if source.is_file() else source
  if folder.is_dir() and revision is not None:
    raise ValueError(f"revision is {revision!r} and {folder} is a folder: leave it out")
  if not folder.is_dir() and hub.is_id(str(path)):
    folder = _download(str(path), revision)
  if folder.is_dir():
    files = tokenizer_files.read_folder(folder)
    if files.tokenizer_json is not None:
      return _load_fast(files)
  elif not _NAME.fullmatch(str(path)):
    raise FileNotFoundError(f"no tokenizer folder {str(path)!r}; check the path")
  name = str(folder if folder.is_dir() else path)
  return _load_with_transformers(name, revision or "main")


def _download(name: str, revision: str | None) -> pathlib.Path:
  try:
    return hub.download(name, hub.TOKENIZER_FILES, revision)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"no tokenizer at {name!r}: neither a folder with tokenizer.json nor at the hub: "
      f"{error}"
    ) from error


def load_sentencepiece(path: Path) -> Any:
  """Returns the processor of a SentencePiece `.model` file.

  Raises:
    FileNotFoundError: the file does not exist.
    ImportError: the sentencepiece package is missing.
  """
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(f"no SentencePiece model {str(path)!r}; check the path")
  package = optional.require("sentencepiece", f"reading {path}", "sentencepiece")
  return package.SentencePieceProcessor(model_file=str(path))


LOADERS = {"huggingface": load_pretrained, "sentencepiece": load_sentencepiece}


def _load_fast(files: tokenizer_files.TokenizerFiles) -> TokenizersBackend:
  """Builds a `tokenizers.Tokenizer` and adds the special tokens of the config."""
  import tokenizers

  try:
    rust = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
  except Exception as error:  # tokenizers raises a bare Exception for a bad file.
    raise ValueError(
      f"{files.tokenizer_json} is no tokenizer ({error}); download the folder again"
    ) from error
  tokenizer_limits.check(rust, str(files.tokenizer_json))
  rust.no_truncation()
  rust.no_padding()
  fields = ("content", *tokenizer_files.ADDED_TOKEN_FLAGS)
  # In order of their ids: tokenizers gives a new token the next free id.
  for number, item in sorted(files.added_tokens.items()):
    text = item["content"]
    if rust.token_to_id(text) is None:
      known = {name: item[name] for name in fields if name in item}
      rust.add_tokens([tokenizers.AddedToken(**known)])
    if rust.token_to_id(text) != number:
      raise ValueError(
        f"tokenizer_config.json gives {text!r} the id {number}, tokenizer.json "
        f"{rust.token_to_id(text)}; the files are of two models, download them again"
      )
  # A token with a role is special even if tokenizer.json stores it as plain text.
  known = {token.content for token in rust.get_added_tokens_decoder().values()}
  special = dict.fromkeys([*files.tokens.values(), *files.extra_tokens])
  rust.add_special_tokens([text for text in special if text not in known])
  return TokenizersBackend(rust, files)


def _load_with_transformers(name: str, revision: str) -> Any:
  transformers = optional.require(
    "transformers",
    f"{name!r} is no local folder with a tokenizer.json; to load it tunix",
    "transformers",
  )
  try:
    return transformers.AutoTokenizer.from_pretrained(name, revision=revision)
  except (OSError, ValueError) as error:
    raise FileNotFoundError(
      f"no tokenizer at {name!r}: neither a folder with tokenizer.json nor anything "
      "that transformers can load; check the path or the model id"
    ) from error


def added_token(text: str) -> Any:
  """Returns a `tokenizers.AddedToken` that is matched as written, and is not special.

  transformers takes the same objects.
  """
  import tokenizers

  return tokenizers.AddedToken(text, normalized=False, special=False)


def of_bytes(special: Sequence[str]) -> Any:
  """Returns a `tokenizers.Tokenizer` over the special tokens and the 256 bytes."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
  made = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(list(special))
  return made
