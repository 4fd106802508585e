import asyncio
import re
import threading

import numpy as np
import pytest

from tunix.rl.env.tools import tool as tools
from tunix.rl.env.tools.results import ToolResult, as_text, bounded
from tunix.rl.env.tools.tool import Tool, as_tools, tools_of


def add(a: int, b: int = 1) -> int:
  """Adds two numbers.

  Args:
    a: The first.
    b: The second.
  """
  assert type(a) is int
  return a + b


async def later(text: str) -> str:
  """Answers later.

  Args:
    text: The answer.
  """
  await asyncio.sleep(0)
  if text == "raise":
    raise KeyError(text)
  return text


class Game:
  """An environment in the form of TRL."""

  def __init__(self):
    self.position = 0

  def reset(self, **columns):
    return "start"

  def get_reward(self):
    return 1.0

  def _hidden(self):
    pass

  @property
  def broken(self):
    raise RuntimeError("properties are not read")

  def move(self, by: int) -> str:
    """Moves.

    Args:
      by: Steps.
    """
    self.position += by
    return f"at {self.position}"

  def look(self) -> dict:
    """Looks around."""
    return {"position": self.position}

  @staticmethod
  def helper():
    pass


def both(tool, arguments):
  """Returns the answer, which is the same with and without an event loop."""
  result = tool.run(arguments)
  assert asyncio.run(tool.run_async(arguments)) == result
  return result


def test_arguments_are_an_object_or_its_json():
  assert both(Tool(add), {"a": 2, "b": 3}) == ToolResult(text="5")
  assert both(Tool(add), '{"a": 2}') == ToolResult(text="3")
  assert both(Tool(add), {"a": 2.0}).text == "3"  # JSON has one kind of number


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ("{", "the arguments '{' are no JSON"),
    ('{"a": NaN}', "NaN is not JSON"),
    ("[1]", r"the arguments are \[1\]; expected an object"),
    ({"b": 1}, "the argument 'a' is missing"),
    ({"a": 1, "c": 1}, "the argument 'c' is unknown"),
    ({"a": "1"}, "'a' is '1'; expected the type 'integer'"),
    ({"a": None}, "'a' is None; expected the type 'integer'"),
    ({"a": 1, "b": "x" * 99999}, r"x\.\.\.; expected the type 'integer'"),
    ("[" * 100000, "nested too deep"),
  ],
)
def test_malformed_calls_are_answers(arguments, message):
  result = both(Tool(add), arguments)
  assert result.finish == "malformed"
  assert re.search(message, result.text)
  assert result.text.endswith("The arguments of add are: a, b.")
  assert len(result.text) < 600


def test_unknown_tools_are_answers():
  found = as_tools([add, later])
  result = tools.call(found, "subtract", "{}")
  assert result.finish == "malformed"
  assert "'subtract' is unknown. The tools are: add, later" in result.text
  assert asyncio.run(tools.call_async(found, "subtract", {})) == result
  assert tools.call(found, "add", '{"a": 1}').text == "2"
  assert asyncio.run(tools.call_async(found, "add", {"a": 1})).text == "2"


def test_async_functions_run_with_and_without_an_event_loop():
  assert both(Tool(later), {"text": "a"}) == ToolResult(text="a")

  async def inside():
    return Tool(later).run({"text": "b"})

  assert asyncio.run(inside()).text == "b"
  assert both(Tool(later), {"text": "raise"}).text == "Error: KeyError: 'raise'"


class BadError(Exception):
  def __str__(self):
    raise ValueError


@pytest.mark.parametrize(
  ("error", "text"),
  [
    (ValueError("no such city"), "Error: ValueError: no such city"),
    (SystemExit(3), "Error: SystemExit: 3"),
    (BadError(), "Error: BadError"),
    (RecursionError(), "Error: RecursionError: "),
  ],
)
def test_exceptions_are_answers(error, text):
  def fail():
    """Fails."""
    raise error

  assert both(Tool(fail), {}) == ToolResult(text=text, finish="error")


def test_a_hanging_function_does_not_block_the_event_loop():
  event = threading.Event()

  def hang():
    """Hangs."""
    event.wait(30)

  async def run():
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(Tool(hang).run_async({}), 0.05)
    return (await Tool(add).run_async({"a": 1})).text

  assert asyncio.run(run()) == "2"
  event.set()


def test_public_methods_are_tools():
  game = Game()
  found = tools_of(game)
  assert [x.name for x in found] == ["look", "move"]
  assert both(found[0], {}).text == '{"position": 0}'
  assert found[1].run({"by": 2}).text == "at 2"
  assert game.position == 2
  assert list(found[1].schema["function"]["parameters"]["properties"]) == ["by"]


def test_tools_come_from_functions_objects_and_tools():
  assert list(as_tools([add, Game(), Tool(later)])) == ["add", "look", "move", "later"]
  with pytest.raises(ValueError, match="two tools have the name 'add'"):
    as_tools([add, Tool(add)])
  with pytest.raises(ValueError, match="is no tool"):
    as_tools([object()])


def test_a_schema_of_the_users_replaces_the_docstring():
  schema = {"name": "f", "parameters": {"properties": {"x": {"enum": [1, 2]}}}}
  tool = Tool(lambda x: x, schema=schema)
  assert both(tool, {"x": 2}).text == "2"
  assert both(tool, {"x": 3}).finish == "malformed"
  schema["parameters"]["properties"]["x"] = {"type": "strin"}
  with pytest.raises(ValueError, match="strin"):
    Tool(lambda x: x, schema=schema)


@pytest.mark.parametrize(
  ("value", "text"),
  [
    ("é", "é"),
    (None, "null"),
    ({"é": (1, True)}, '{"é": [1, true]}'),
    (np.arange(3), "[0, 1, 2]"),
    (np.float32(0.5), "0.5"),
    ({1j}, "{1j}"),
  ],
)
def test_values_become_text(value, text):
  assert as_text(value) == text


def test_long_text_keeps_its_begin_and_end():
  text = "a" * 500 + "b" * 500
  cut = bounded(text, 101)
  assert cut == "a" * 37 + "\n[927 characters left out]\n" + "b" * 36
  # 101 - 28 characters are kept: the mark is reserved with the digits of the whole.
  assert len(cut) <= 101
  assert bounded(text, 1000) == text
  assert bounded("a\ud800b", 100) == "a?b"  # tokenizers refuse lone surrogates


def test_answers_are_bounded():
  def shout(count: int):
    """Shouts.

    Args:
      count: How often.
    """
    if count < 0:
      raise ValueError("x" * 10000)
    return ToolResult(text="x" * count, finish="ok")

  tool = Tool(shout, max_chars=200)
  assert len(both(tool, {"count": 10000}).text) <= 200
  assert len(both(tool, {"count": -1}).text) <= 200
  with pytest.raises(ValueError, match="max_chars is 3"):
    Tool(shout, max_chars=3)
