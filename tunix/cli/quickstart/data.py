"""The quickstart's data: three splits of the standard library, and a tokenizer.

A split is a set of modules, so that no text of a held-out module is trained on:

  pretrain.jsonl        {"text"}: help pages of functions, classes and modules
  pretrain_eval.jsonl   the same, of held-out modules
  finetune.jsonl        {"messages"}: a signature, and its description
  finetune_eval.jsonl   the same, of held-out modules
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunix.cli.quickstart import task
from tunix.cli.quickstart.stdlib import Function, Passage, read_stdlib
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import io

# Shares of the functions, by split.
SHARES = {"pretrain": 0.4, "finetune": 0.5, "held_out": 0.1}
# Pieces of longer texts, in characters: up to about 128 tokens, a row of training.
_PIECE = 300

_SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}"
  "{% if message['role'] not in ('user', 'assistant') %}"
  "{{ raise_exception('this template knows the roles user and assistant') }}"
  "{% endif %}"
  "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartData:
  """What was written, and how much of it.

  Attributes:
    folder: where the JSON-lines files lie, named as this module's docstring says.
    records: records by file name without its ending.
    modules: modules by split.
    held_out: the held-out functions, in the order of `finetune_eval.jsonl`.
  """

  folder: pathlib.Path
  records: Mapping[str, int]
  modules: Mapping[str, tuple[str, ...]]
  held_out: tuple[Function, ...]

  def path(self, name: str) -> pathlib.Path:
    """The file of that name."""
    return self.folder / f"{name}.jsonl"


def build_data(
  folder: str | os.PathLike[str],
  *,
  seed: int = 0,
  held_out: int = 160,
  stdlib: str | os.PathLike[str] | None = None,
) -> QuickstartData:
  """Reads the standard library, splits it by modules and writes the files.

  Args:
    folder: where to; made if it is not there.
    seed: another seed gives another split.
    held_out: at most so many records of either held-out file.
    stdlib: sources to read instead of the running Python's.

  Raises:
    FileNotFoundError: the standard library's sources are not there.
    OSError: the folder cannot be written.
  """
  functions, passages = read_stdlib(stdlib)
  split_of = split_modules(Counter(f.module for f in functions), seed)
  modules: dict[str, list[str]] = {name: [] for name in SHARES}
  for module, split in sorted(split_of.items()):
    modules[split].append(module)
  by_split = _group(functions, split_of)
  unseen = _unseen(by_split)[:held_out]
  prose = _group(passages, split_of)
  files: dict[str, list[dict[str, Any]]] = {
    "pretrain": _texts(by_split["pretrain"], prose["pretrain"]),
    "pretrain_eval": _texts(by_split["held_out"], prose["held_out"])[:held_out],
    "finetune": [task.record(f) for f in by_split["finetune"] if task.is_suitable(f)],
    "finetune_eval": [task.record(f) for f in unseen],
  }
  target = pathlib.Path(folder)
  for name, records in files.items():
    write_jsonl(target / f"{name}.jsonl", records)
  return QuickstartData(
    folder=target,
    records={name: len(records) for name, records in files.items()},
    modules={name: tuple(found) for name, found in modules.items()},
    held_out=tuple(unseen),
  )


def split_modules(sizes: Mapping[str, int], seed: int) -> dict[str, str]:
  """Gives every module to one split, as near to `SHARES` as whole modules allow.

  Args:
    sizes: functions by module.
    seed: determines the order in which modules are given away.
  """

  def place(module: str) -> bytes:
    return hashlib.sha256(f"{seed}/{module}".encode()).digest()

  total = sum(sizes.values())
  filled = dict.fromkeys(SHARES, 0)
  split_of: dict[str, str] = {}
  for module in sorted(sizes, key=place):
    # The split that would be least full with this module in it.
    split = min(SHARES, key=lambda s: (filled[s] + sizes[module]) / SHARES[s] / total)
    filled[split] += sizes[module]
    split_of[module] = split
  return split_of


def _group(items: Iterable[Any], split_of: Mapping[str, str]) -> dict[str, list[Any]]:
  """Items by split; modules without a function stay in the first one."""
  groups = defaultdict(list, {split: [] for split in SHARES})
  for item in items:
    groups[split_of.get(item.module, next(iter(SHARES)))].append(item)
  return groups


def _unseen(by_split: Mapping[str, Sequence[Function]]) -> list[Function]:
  """Held-out functions whose signature and summary stand in no other split.

  Modules repeat each other (`__init__(self)`, "Return repr(self)."), and what was
  repeated would be remembered, not understood. The order is by hash, so that any
  first part of the list is a fair sample.
  """
  seen = {
    text
    for split, functions in by_split.items()
    if split != "held_out"
    for f in functions
    for text in (f.signature, f.summary)
  }
  found: dict[str, Function] = {}
  for f in by_split["held_out"]:
    if task.is_suitable(f) and f.signature not in seen and f.summary not in seen:
      found.setdefault(f.signature, f)
  return [found[key] for key in sorted(found, key=_digest)]


def _texts(
  functions: Sequence[Function], passages: Sequence[Passage]
) -> list[dict[str, Any]]:
  """Records of running text, no two the same, in an order without pattern."""
  whole = [_help_page(f) for f in functions]
  whole += [passage.text for passage in passages]
  pieces = dict.fromkeys(piece for text in whole for piece in _pieces(text))
  return [{"text": piece} for piece in sorted(pieces, key=_digest)]


def _help_page(f: Function) -> str:
  """A function as Python's help() shows it, nearly. The name stands there twice: so a
  model learns to copy, which reading docstrings alone would hardly teach it."""
  doc = textwrap.indent(f.doc, "    ")
  return f"Help on function {f.name} in module {f.module}:\n\n{f.signature}\n{doc}"


def _pieces(text: str) -> Iterable[str]:
  """The text in parts of whole lines, each at most `_PIECE` characters if its lines
  allow."""
  part = ""
  for line in text.splitlines(keepends=True):
    if part.strip() and len(part) + len(line) > _PIECE:
      yield part
      part = ""
    part += line
  if part.strip():
    yield part


def _digest(text: str) -> bytes:
  return hashlib.sha256(text.encode()).digest()


def write_jsonl(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """One JSON object a line."""
  lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
  # A docstring may hold a lone surrogate, which is no UTF-8.
  io.write_atomic(path, lines.encode("utf-8", "replace"))


def train_tokenizer(data: QuickstartData, vocab_size: int = 2048) -> TokenizerAdapter:
  """A byte-level BPE tokenizer with a chat template, from the two training splits.

  Args:
    data: where the text is.
    vocab_size: ids, special tokens included.
  """
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  rust = tokenizers.Tokenizer(models.BPE())
  rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  rust.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=list(_SPECIAL),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  rust.train_from_iterator(_training_text(data), trainer)
  pad, begin, end = _SPECIAL[:3]
  return TokenizerAdapter(
    rust, chat_template=CHAT_TEMPLATE, bos_token=begin, eos_token=end, pad_token=pad
  )


def _training_text(data: QuickstartData) -> Iterable[str]:
  for name in ("pretrain", "finetune"):
    with data.path(name).open(encoding="utf-8") as file:
      for line in file:
        record = json.loads(line)
        for message in record.get("messages", [{"content": record.get("text")}]):
          yield message["content"]
