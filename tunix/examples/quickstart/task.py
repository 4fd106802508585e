"""The quickstart's task: sums of three digits, answered in brackets.

    3+8+5=     [16]

A reward function can check an answer without a second model. Each character is a token,
so neither data nor a tokenizer has to be downloaded.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.config import RopeConfig
from tunix.utils import io

TERMS = 3
ALPHABET = "0123456789+=[]"
HELD_OUT = 200  # sums of 1,000 that no training sees
ROW_LENGTH = 96  # tokens of a training row; several sums are packed into one
# The second function rewards the form alone, so that a model that is always wrong still
# learns to answer in brackets.
REWARDS = ("exact_match(column='response')", r"format_match('\\[[0-9]+\\]')")
WEIGHTS = (1.0, 0.1)
RIGHT = 1.0  # the smallest reward of a right answer

_SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")

Record = dict[str, str]


def problems(seed: int, held_out: int = HELD_OUT) -> tuple[list[Record], list[Record]]:
  """Shuffles all sums of three digits and splits them.

  Args:
    seed: seed of the shuffle.
    held_out: number of sums that are held out.

  Returns: the sums to train on and the held-out sums, records {"prompt", "response"}.
  """
  sums = list(itertools.product(range(10), repeat=TERMS))
  random.Random(seed).shuffle(sums)
  records = [_record(terms) for terms in sums]
  return records[held_out:], records[:held_out]


def _record(terms: Sequence[int]) -> Record:
  return {"prompt": "+".join(map(str, terms)) + "=", "response": f"[{sum(terms)}]"}


def write_data(train_file: pathlib.Path, eval_file: pathlib.Path, seed: int) -> Record:
  """Writes the sums to train on and the held-out sums; returns the first held-out sum.

  Raises:
    OSError: a file cannot be written.
  """
  train, held_out = problems(seed)
  _write_jsonl(train_file, train)
  _write_jsonl(eval_file, held_out)
  return held_out[0]


def _write_jsonl(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  io.write_atomic(path, "".join(json.dumps(r) + "\n" for r in records).encode())


def make_tokenizer(words: Sequence[str] = ()) -> TokenizerAdapter:
  """Returns a tokenizer whose tokens are the characters of the task.

  It has no chat template, so no completion of the quickstart has reasoning.

  Args:
    words: further tokens of several characters, which are plain text.
  """
  import tokenizers
  from tokenizers import decoders, models

  pad, begin, end, unknown = _SPECIAL
  vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *ALPHABET])}
  rust = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
  rust.add_special_tokens(list(_SPECIAL))
  rust.add_tokens(list(words))
  rust.decoder = decoders.Fuse()
  return TokenizerAdapter(rust, bos_token=begin, eos_token=end, pad_token=pad)


def write_model(folder: pathlib.Path, seed: int) -> int:
  """Writes a fresh Llama-style model and the tokenizer in Hugging Face format.

  Args:
    folder: the folder.
    seed: seed of the weights.

  Returns: the number of parameters.

  Raises:
    OSError: the disk is full or not writable.
  """
  tokenizer = make_tokenizer()
  config = ModelConfig(
    num_layers=2,
    vocab_size=tokenizer.vocab_size,
    embed_dim=128,
    hidden_dim=384,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    rope=RopeConfig(theta=10_000.0),
    tie_embeddings=True,
    max_position=2 * ROW_LENGTH,
  )
  model = AutoModel.from_config(config, seed=seed)
  ids = {
    "bos_token_id": tokenizer.bos_id(),
    "eos_token_id": tokenizer.eos_id(),
    "pad_token_id": tokenizer.pad_id(),
  }
  save_pretrained(model, folder, hf_fields=ids)
  tokenizer.save(folder)
  return sum(leaf.size for leaf in jax.tree.leaves(model))
