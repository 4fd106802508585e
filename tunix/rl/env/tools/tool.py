"""Tools: functions that a model calls, with checked arguments and bounded answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tunix.rl.env import threads
from tunix.rl.env.tools import schema as schemas
from tunix.rl.env.tools.results import MAX_CHARS, ToolResult, as_text, bounded
from tunix.rl.reward import json_schema
from tunix.utils import checks

_MAX_SHOWN = 200  # characters of a wrong value that an answer repeats
_NOT_TOOLS = ("reset", "get_reward")


class Tool:
  """A function that a model calls.

  Attributes:
    function: the function, plain or async.
    name: name of the tool.
    schema: JSON schema of the tool, for the chat template.
    max_chars: most characters of an answer, see `results.bounded`.
  """

  def __init__(
    self,
    function: Callable[..., Any],
    *,
    schema: Mapping[str, Any] | None = None,
    max_chars: int = MAX_CHARS,
  ):
    """Initializes the tool.

    Args:
      function: a function or method. It returns text, a `ToolResult`, or a value that
        is shown as JSON.
      schema: schema of the tool; None: from the type hints and the docstring.
      max_chars: see the class.

    Raises:
      ValueError: the function has no schema, see `schema.function_schema`, or
        `max_chars` is too small.
    """
    checks.number("max_chars", max_chars, checks.Range(100), whole=True)
    self.function, self.max_chars = function, max_chars
    self.schema: dict[str, Any] = dict(schema or schemas.function_schema(function))
    fields = self.schema.get("function", self.schema)
    self.name: str = fields["name"]
    parameters = fields.get("parameters", {})
    self._required: Sequence[str] = parameters.get("required", ())
    self._arguments: dict[str, Any] = {
      name: schemas.checked_form(x)
      for name, x in parameters.get("properties", {}).items()
    }
    for argument in self._arguments.values() if schema else ():
      json_schema.check_schema(argument)

  def run(self, arguments: Mapping[str, Any] | str) -> ToolResult:
    """Calls the function and waits for its result.

    Args:
      arguments: the arguments by name, or their JSON text as the model wrote it.

    Returns:
      The answer. Wrong arguments and exceptions of the function are answers too.
    """
    values = self._checked(arguments)
    if isinstance(values, ToolResult):
      return values
    if inspect.iscoroutinefunction(self.function):
      # A new thread has no event loop; this one may be inside of one.
      with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, self._awaited(values)).result()
    return self._called(values)

  async def run_async(self, arguments: Mapping[str, Any] | str) -> ToolResult:
    """Does what `run` does without blocking the event loop.

    A plain function runs in a thread of its own. If this call is cancelled, the thread
    is left alone until the function returns.
    """
    values = self._checked(arguments)
    if isinstance(values, ToolResult):
      return values
    if inspect.iscoroutinefunction(self.function):
      return await self._awaited(values)
    return await threads.result(lambda: self._called(values))

  def _checked(self, arguments: Mapping[str, Any] | str) -> dict[str, Any] | ToolResult:
    """Returns the arguments of the function, or the answer to wrong ones."""
    values: Any = arguments
    if isinstance(arguments, str):
      try:
        values = json_schema.parse(arguments)
      except ValueError as error:
        return self._malformed(
          f"the arguments {_shown(arguments)} are no JSON: {error}"
        )
    if not isinstance(values, Mapping):
      return self._malformed(f"the arguments are {_shown(values)}; expected an object")
    for name in values:
      if name not in self._arguments:
        return self._malformed(f"the argument {_shown(name)} is unknown")
    for name in self._required:
      if name not in values:
        return self._malformed(f"the argument {name!r} is missing")
    for name, value in values.items():
      wrong = json_schema.first_error(value, self._arguments[name])
      if wrong is not None:
        expected = _expected(self._arguments[name], wrong)
        return self._malformed(
          f"the argument {name!r} is {_shown(value)}; expected {expected}"
        )
    return {k: _as_declared(v, self._arguments[k]) for k, v in values.items()}

  def _malformed(self, message: str) -> ToolResult:
    names = ", ".join(self._arguments) or "none"
    text = f"Error: {message}. The arguments of {self.name} are: {names}."
    return ToolResult(text=bounded(text, self.max_chars), finish="malformed")

  def _called(self, values: dict[str, Any]) -> ToolResult:
    try:
      return self._answer(self.function(**values))
    # The function is the user's, and an exception of any kind is an answer.
    except (Exception, SystemExit) as error:
      return self._failed(error)

  async def _awaited(self, values: dict[str, Any]) -> ToolResult:
    try:
      return self._answer(await self.function(**values))
    except (Exception, SystemExit) as error:  # likewise
      return self._failed(error)

  def _answer(self, value: object) -> ToolResult:
    result = value if isinstance(value, ToolResult) else ToolResult(text=as_text(value))
    return dataclasses.replace(result, text=bounded(result.text, self.max_chars))

  def _failed(self, error: BaseException) -> ToolResult:
    try:
      message = f"{type(error).__name__}: {error}"
    except Exception:  # an exception's __str__ may raise as well
      message = type(error).__name__
    text = bounded(f"Error: {message}", self.max_chars)
    return ToolResult(text=text, finish="error")


def tools_of(owner: object) -> list[Tool]:
  """Returns the public methods of an object as tools, in alphabetical order.

  `reset`, `get_reward` and names that begin with an underscore are no tools.

  Raises:
    ValueError: a method has no schema, see `schema.function_schema`.
  """
  methods = []
  for name in dir(type(owner)):  # sorted
    member = inspect.getattr_static(type(owner), name)
    is_method = inspect.isfunction(member) or isinstance(member, classmethod)
    if is_method and not name.startswith("_") and name not in _NOT_TOOLS:
      methods.append(Tool(getattr(owner, name)))
  return methods


def as_tools(items: Iterable[Any]) -> dict[str, Tool]:
  """Returns tools by name.

  Args:
    items: tools, functions, and objects whose public methods are tools.

  Raises:
    ValueError: an object has no tools, or two tools have one name.
  """
  tools: dict[str, Tool] = {}
  for item in items:
    if isinstance(item, Tool):
      entries = [item]
    elif inspect.isroutine(item):
      entries = [Tool(item)]
    else:
      entries = tools_of(item)
    if not entries:
      raise ValueError(
        f"{_shown(item)} is no tool: expected a function, or an object "
        "with public methods"
      )
    for tool in entries:
      if tool.name in tools:
        raise ValueError(f"two tools have the name {tool.name!r}; rename one of them")
      tools[tool.name] = tool
  return tools


def call(
  tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any] | str
) -> ToolResult:
  """Calls a tool by name; a wrong name is an answer too."""
  return tools[name].run(arguments) if name in tools else _unknown(tools, name)


async def call_async(
  tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any] | str
) -> ToolResult:
  """Does what `call` does without blocking the event loop."""
  if name not in tools:
    return _unknown(tools, name)
  return await tools[name].run_async(arguments)


def _unknown(tools: Mapping[str, Tool], name: str) -> ToolResult:
  names = ", ".join(tools) or "none"
  text = f"Error: the tool {_shown(name)} is unknown. The tools are: {names}."
  return ToolResult(text=bounded(text, MAX_CHARS), finish="malformed")


def _as_declared(value: object, schema: Mapping[str, Any]) -> Any:
  """Returns a whole float as the integer that it stands for: JSON has one number."""
  if isinstance(value, float) and schema.get("type") == "integer":
    return int(value)
  return value


def _expected(schema: Mapping[str, Any], wrong: str) -> str:
  """Describes the values of an argument, one of which is wrong."""
  if set(schema) == {"type"}:
    return f"the type {_shown(schema['type'])}"
  return f"{_shown(dict(schema))} ({wrong[:_MAX_SHOWN]})"


def _shown(value: object) -> str:
  text = repr(value)
  return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
