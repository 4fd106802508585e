"""Datasets of prompts from a module or file that the user names."""

from __future__ import annotations

import functools
from typing import Any

from tunix.cli.utils import call_strings
from tunix.data import chat, map_datasets as maps
from tunix.data.prompts import PROMPTS
from tunix.generate import tokenizer_adapter

_DEFAULT = "create_dataset"


def parse_call_string(text: str) -> tuple[list[Any], dict[str, Any]]:
  """The arguments of a call, "(1, name='x')" or "1, name='x'": literals, read with
  `ast`, never evaluated.

  Raises:
    ValueError: no arguments of a call, or one that is no literal.
  """
  inside = text.strip()
  if inside.startswith("(") and inside.endswith(")"):
    inside = inside[1:-1]
  call = call_strings.parse_call_string(f"arguments({inside})")
  return list(call.args), dict(call.kwargs or {})


def get_dataset_from_module(specifier: str, tokenizer: Any) -> Any:
  """The dataset that a function of the user's makes, with the chat template applied.

  Args:
    specifier: "pkg.mod", "pkg.mod:fn", "pkg.mod:fn(name='x')" or "/path/file.py:fn";
      without a name the function is `create_dataset`. It returns anything with a length
      and items, of records with "prompt", a text or a list of messages.
    tokenizer: with a chat template, or None where prompts are texts.

  Returns: a `grain.MapDataset` of {"prompts": text, further columns}.

  Raises:
    TypeError: what it returns is no dataset.
    FileNotFoundError, ImportError, ValueError, RuntimeError: see `call_dataset`.
  """
  render = functools.partial(apply_chat_template, tokenizer=_adapted(tokenizer))
  return maps.as_map_dataset(call_dataset(specifier)).map(render)


def call_dataset(specifier: str) -> Any:
  """What a function of the user's returns, named as for `get_dataset_from_module`.

  Raises:
    FileNotFoundError, ImportError: no such file or module, or it cannot be imported.
    ValueError: no such function.
    RuntimeError: it raised.
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
    what = f"{type(error).__name__}: {error}"
    raise RuntimeError(f"{call.source}:{call.name} raised {what}") from error


def apply_chat_template(x: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
  """A record with its "prompt" (a text or messages) rendered as "prompts", the
  generation prompt added and nothing tokenised; other columns stay. A record that has
  "prompts" already is given back as it is.

  Raises:
    ValueError: it has neither, or messages and no tokenizer.
  """
  if PROMPTS in x:
    return x
  if "prompt" not in x:
    raise ValueError(
      f'a record has the columns {sorted(x)} and no "prompt": name its text so'
    )
  rest = {name: value for name, value in x.items() if name != "prompt"}
  return {PROMPTS: _rendered(x["prompt"], tokenizer), **rest}


def post_init_dataset(
  dataset: Any,
  tokenizer: Any,
  batch_size: int,
  num_batches: int | None,
  max_prompt_length: int | None,
  fraction: float = 1.0,
  num_epochs: int = 1,
) -> Any:
  """Filter, then fraction, repeat, batch (the remainder dropped) and limit.

  Args:
    dataset: records with "prompts" (or "prompt", which is rendered).
    tokenizer: counts the tokens of a prompt, BOS among them.
    batch_size: prompts of a batch.
    num_batches: at most so many batches; None: all.
    max_prompt_length: longer prompts are left out; None: none are.
    fraction: of the records that are left, from the front; in (0, 1].
    num_epochs: passes.

  Returns: a `grain.MapDataset` of batches {"prompts": [...], column: [...]}: random
    access, and iterators with a state.

  Raises:
    ValueError: a value out of range, or no whole batch is left.
  """
  if not 0 < fraction <= 1:
    raise ValueError(f"fraction is {fraction}: it must be above 0 and at most 1")
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


def _adapted(tokenizer: Any) -> Any:
  return None if tokenizer is None else tokenizer_adapter.adapted(tokenizer)


def _rendered(prompt: Any, tokenizer: Any) -> str:
  if tokenizer is None and isinstance(prompt, str):
    return prompt
  if tokenizer is None:
    raise ValueError("a prompt is a list of messages: give a tokenizer to render them")
  return chat.prompt_text(prompt, _adapted(tokenizer), where="a record of the dataset")
