"""Datasets of prompts from a function in a user's module or file."""

from __future__ import annotations

import functools
from typing import Any

from tunix.cli.utils import call_strings
from tunix.data import chat
from tunix.data.batching import map_datasets as maps
from tunix.data.batching.prompts import PROMPTS
from tunix.generate import tokenizer_adapter

_DEFAULT = "create_dataset"


def parse_call_string(text: str) -> tuple[list[Any], dict[str, Any]]:
  """Parses the arguments of a call, "(1, name='x')" or "1, name='x'".

  Arguments are literals that `ast` parses; nothing is evaluated.

  Returns: positional and keyword arguments.

  Raises:
    ValueError: the text is no list of arguments, or an argument is not a literal.
  """
  inside = text.strip()
  if inside.startswith("(") and inside.endswith(")"):
    inside = inside[1:-1]
  call = call_strings.parse_call_string(f"arguments({inside})")
  return list(call.args), dict(call.kwargs or {})


def get_dataset_from_module(specifier: str, tokenizer: object) -> Any:
  """Returns the dataset of a user's function, with the chat template applied.

  Args:
    specifier: "pkg.mod", "pkg.mod:fn", "pkg.mod:fn(name='x')" or "/path/file.py:fn".
      Without a name the function is `create_dataset`. The function returns an object
      with a length and items; an item is a record with "prompt", a string or a list of
      messages.
    tokenizer: a tokenizer with a chat template; None if all prompts are strings.

  Returns: a `grain.MapDataset` of {"prompts": text, further columns}.

  Raises:
    TypeError: the function returns no dataset.
    FileNotFoundError, ImportError, ValueError, RuntimeError: see `call_dataset`.
  """
  render = functools.partial(apply_chat_template, tokenizer=_adapted(tokenizer))
  return maps.as_map_dataset(call_dataset(specifier)).map(render)


def call_dataset(specifier: str) -> Any:
  """Calls a user's function, named as for `get_dataset_from_module`.

  Raises:
    FileNotFoundError, ImportError: no such file or module, or it cannot be imported.
    ValueError: no such function.
    RuntimeError: the function raises.
  """
  call = call_strings.parse_call_string(specifier)
  if call.source is None:
    call = call_strings.CallString(source=specifier, name=_DEFAULT)
  elif call.name is None:
    call = call_strings.CallString(source=call.source, name=_DEFAULT)
  function = call_strings.load(call)
  try:
    return function(*call.args, **(call.kwargs or {}))
  except Exception as error:  # the user's function may raise anything
    message = f"{type(error).__name__}: {error}"
    raise RuntimeError(f"{call.source}:{call.name} raised {message}") from error


def apply_chat_template(x: dict[str, Any], tokenizer: object) -> dict[str, Any]:
  """Renders the "prompt" of a record, a string or messages, as the text "prompts".

  The generation prompt is added and nothing is tokenized. Other columns are kept. A
  record with "prompts" is returned unchanged.

  Raises:
    ValueError: the record has neither column, or messages without a tokenizer.
  """
  if PROMPTS in x:
    return x
  if "prompt" not in x:
    raise ValueError(
      f'a record has the columns {sorted(x)}; expected "prompt" or "prompts" among them'
    )
  rest = {name: value for name, value in x.items() if name != "prompt"}
  return {PROMPTS: _rendered(x["prompt"], tokenizer), **rest}


def post_init_dataset(
  dataset: Any,
  tokenizer: object,
  batch_size: int,
  num_batches: int | None,
  max_prompt_length: int | None,
  fraction: float = 1.0,
  num_epochs: int = 1,
) -> Any:
  """Filters, shortens, repeats and batches a dataset, and limits the batches.

  The steps run in this order. A last batch that is not full is dropped.

  Args:
    dataset: records with "prompts", or with "prompt", which is rendered.
    tokenizer: tokenizer that measures prompts, including BOS.
    batch_size: number of prompts of a batch.
    num_batches: largest number of batches; None: no limit.
    max_prompt_length: tokens; longer prompts are dropped. None: no limit.
    fraction: share of the remaining records that is kept, from the front; in (0, 1].
    num_epochs: number of passes.

  Returns: a `grain.MapDataset` of batches {"prompts": [...], column: [...]} with random
    access and resumable iterators.

  Raises:
    ValueError: a value out of range, or no full batch remains.
  """
  if not 0 < fraction <= 1:
    raise ValueError(f"fraction is {fraction}; expected above 0 and at most 1")
  adapted = _adapted(tokenizer)
  dataset = maps.as_map_dataset(dataset).map(
    functools.partial(apply_chat_template, tokenizer=adapted)
  )
  if max_prompt_length is not None:
    dataset = maps.kept(
      dataset,
      lambda x: len(adapted.tokenize(x[PROMPTS], add_eos=False)) <= max_prompt_length,
      f"has a prompt of at most max_prompt_length {max_prompt_length} tokens: raise it",
    )
  if fraction < 1:
    dataset = dataset[: int(len(dataset) * fraction)]
  return maps.batches(dataset, batch_size, num_batches, num_epochs)


def _adapted(tokenizer: object) -> Any:
  return None if tokenizer is None else tokenizer_adapter.adapted(tokenizer)


def _rendered(prompt: Any, tokenizer: Any) -> str:
  if tokenizer is None and isinstance(prompt, str):
    return prompt
  if tokenizer is None:
    raise ValueError("tokenizer is None; expected one to render a list of messages")
  return chat.prompt_text(prompt, _adapted(tokenizer), where="a record of the dataset")
