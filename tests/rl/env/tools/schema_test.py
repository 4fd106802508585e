import enum
from typing import Any, Literal, Optional

import pytest

from tunix.rl.env.tools.schema import checked_form, function_schema
from tunix.rl.reward import json_schema


class Unit(enum.Enum):
  CELSIUS = "c"
  FAHRENHEIT = "f"


def weather(
  city: str,
  days: int | str,
  unit: Unit = Unit.CELSIUS,
  place: Optional[list[float]] = None,  # noqa: UP045 (both forms have one schema)
  mode: Literal["a", 1, None] = None,
  extra: dict[str, Any] | str | None = None,
  style: str = "short",
  pair: tuple[int, str] = (1, "a"),
) -> str:
  """Tells the weather
  of a city.

  Example:
    weather("Paris")

  Args:
    city: The city,
      with its country.
    days (`int` or `str`): Number of days: 1 to 9.
    unit: The unit.
    place: Latitude and longitude.
    mode: The mode.
    extra: More.
    style: The length. (choices: ["short", "long"])
    pair: Two.

  Returns:
    The weather: one line.

  Raises:
    ValueError: never.
  """
  return f"{city} {days} {unit} {place} {mode} {extra} {style} {pair}"


SCHEMA = {
  "type": "function",
  "function": {
    "name": "weather",
    "description": 'Tells the weather\nof a city.\n\nExample:\n  weather("Paris")',
    "parameters": {
      "type": "object",
      "properties": {
        "city": {"type": "string", "description": "The city, with its country."},
        "days": {
          "type": ["integer", "string"],
          "description": "Number of days: 1 to 9.",
        },
        "unit": {"type": "string", "enum": ["c", "f"], "description": "The unit."},
        "place": {
          "type": "array",
          "items": {"type": "number"},
          "nullable": True,
          "description": "Latitude and longitude.",
        },
        "mode": {
          "type": ["string", "integer", "null"],
          "enum": ["a", 1, None],
          "description": "The mode.",
        },
        "extra": {
          "anyOf": [
            {"type": "object", "additionalProperties": {}},
            {"type": "string"},
          ],
          "nullable": True,
          "description": "More.",
        },
        "style": {
          "type": "string",
          "enum": ["short", "long"],
          "description": "The length.",
        },
        "pair": {
          "type": "array",
          "prefixItems": [{"type": "integer"}, {"type": "string"}],
          "description": "Two.",
        },
      },
      "required": ["city", "days"],
    },
    "return": {"type": "string", "description": "The weather: one line."},
  },
}


def test_a_schema_has_types_descriptions_and_required_arguments():
  assert function_schema(weather) == SCHEMA


def test_a_schema_is_that_of_transformers():
  utils = pytest.importorskip("transformers.utils")
  assert utils.get_json_schema(weather) == SCHEMA


@pytest.mark.parametrize(
  ("name", "right", "wrong"),
  [
    ("place", [1, 2.5], ["a"]),
    ("place", None, 1),
    ("mode", None, "b"),
    ("extra", {"a": [1]}, 3),
    ("style", "long", "tall"),
    ("pair", [1, "a"], [1]),
    ("unit", "c", "CELSIUS"),
    ("days", "3", 0.5),
  ],
)
def test_the_checked_form_tells_right_from_wrong(name, right, wrong):
  schema = checked_form(SCHEMA["function"]["parameters"]["properties"][name])
  json_schema.check_schema(schema)
  assert json_schema.first_error(right, schema) is None
  assert json_schema.first_error(wrong, schema)


def no_docstring(x: int): ...


def no_hint(x):
  """Does.

  Args:
    x: X.
  """


def no_description(x: int):
  """Does."""


def no_schema(x: set[int]):
  """Does.

  Args:
    x: X.
  """


def many(*x: int):
  """Does.

  Args:
    x: X.
  """


def wrong_choices(x: str):
  """Does.

  Args:
    x: X (choices: [a, b])
  """


def unknown_hint(x: "Nothing"):
  """Does.

  Args:
    x: X.
  """


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (no_docstring, "'no_docstring' has no docstring"),
    (no_hint, "argument 'x' of the tool 'no_hint' has no type hint"),
    (no_description, "'x' of the tool 'no_description' has no description"),
    (no_schema, r"has the type set\[int\]; expected str"),
    (many, "argument 'x' of the tool 'many' is variadic"),
    (wrong_choices, r"choices .* are \[a, b\]; expected a JSON list"),
    (unknown_hint, "type hint of the tool 'unknown_hint' is unknown"),
  ],
)
def test_functions_without_a_schema_are_refused(function, message):
  with pytest.raises(ValueError, match=message):
    function_schema(function)
