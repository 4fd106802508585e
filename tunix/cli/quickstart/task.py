"""What the quickstart teaches: to describe a function, in three labelled lines.

The answer to a signature can be checked against it, without a second model:

    def shorten(text, width, **kwargs)

    Name: shorten
    Arguments: text, width, kwargs
    Summary: Collapse and truncate the given text to fit in the given width.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from tunix.cli.quickstart.stdlib import Function

_NO_ARGUMENTS = "none"
_ANSWER = re.compile(r"Name: (\S+)\nArguments: (\S[^\n]*)\nSummary: (\S[^\n]*)")
_LONGEST = {"signature": 120, "summary": 120}
_SHORTEST_SUMMARY = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """How far an answer does what was asked.

  Attributes:
    format: it is the three labelled lines, each with something behind the label.
    name: the name is the one of the signature.
    arguments: the arguments are those of the signature, in order.
  """

  format: bool
  name: bool
  arguments: bool


def is_suitable(function: Function) -> bool:
  """Whether a function makes a record: short plain text, and a summary that says
  something."""
  summary = function.summary
  return (
    len(function.signature) <= _LONGEST["signature"]
    and _SHORTEST_SUMMARY <= len(summary) <= _LONGEST["summary"]
    and summary.isascii()
    and summary[0].isalpha()
  )


def answer(function: Function) -> str:
  """What the model should say."""
  arguments = ", ".join(function.arguments) or _NO_ARGUMENTS
  return f"Name: {function.name}\nArguments: {arguments}\nSummary: {function.summary}"


def record(function: Function) -> dict[str, Any]:
  """The function as a chat record."""
  return {
    "messages": [
      {"role": "user", "content": function.signature},
      {"role": "assistant", "content": answer(function)},
    ]
  }


def check(signature: str, text: str) -> Check:
  """Compares an answer with the signature that was asked about."""
  match = _ANSWER.fullmatch(text.strip())
  if match is None:
    return Check(format=False, name=False, arguments=False)
  name, arguments = _parse(signature)
  return Check(
    format=True,
    name=match.group(1) == name,
    arguments=match.group(2).strip() == (", ".join(arguments) or _NO_ARGUMENTS),
  )


def _parse(signature: str) -> tuple[str, list[str]]:
  """Name and arguments, from the text alone."""
  node = ast.parse(f"{signature}: pass").body[0]
  assert isinstance(node, ast.FunctionDef)
  a = node.args
  starred = [a.vararg] if a.vararg else []
  named = [a.kwarg] if a.kwarg else []
  every = [*a.posonlyargs, *a.args, *starred, *a.kwonlyargs, *named]
  return node.name, [argument.arg for argument in every]


def share(checks: Sequence[Check], field: str) -> float:
  """The share of answers for which a field of `Check` holds; 0 without answers."""
  return sum(getattr(c, field) for c in checks) / len(checks) if checks else 0.0
