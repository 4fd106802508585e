import pytest

from tunix.rl.reward import json_schema

PERSON = {
  "type": "object",
  "properties": {
    "name": {"type": "string", "minLength": 1},
    "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
  },
  "required": ["name"],
  "additionalProperties": False,
}


@pytest.mark.parametrize(
  ("value", "fits"),
  [
    ({"name": "x"}, True),
    ({"name": "x", "age": 3, "tags": ["a", "b"]}, True),
    ({"name": "x", "age": 3.0}, True),
    ({"name": ""}, False),
    ({"age": 3}, False),
    ({"name": "x", "age": -1}, False),
    ({"name": "x", "age": 150}, False),
    ({"name": "x", "age": True}, False),
    ({"name": "x", "tags": ["a", "c"]}, False),
    ({"name": "x", "tags": ["a", "a", "a"]}, False),
    ({"name": "x", "else": 1}, False),
    (["name"], False),
    (None, False),
  ],
)
def test_objects(value, fits):
  json_schema.check_schema(PERSON)
  assert json_schema.matches(value, PERSON) is fits


@pytest.mark.parametrize(
  ("schema", "good", "bad"),
  [
    (True, [1, None], []),
    (False, [], [1, None]),
    ({"type": ["string", "null"]}, ["", None], [0, []]),
    ({"type": "number"}, [1, 1.5], [True, "1"]),
    ({"type": "boolean"}, [True], [1, None]),
    ({"const": 1}, [1, 1.0], [True, "1", 2]),
    ({"const": {"a": [1]}}, [{"a": [1.0]}], [{"a": [True]}, {"a": []}, {}]),
    ({"enum": [1, "a"]}, [1, "a"], [True, "b"]),
    ({"maximum": 3}, [3, "text"], [3.5]),
    ({"exclusiveMinimum": 3}, [4], [3]),
    ({"multipleOf": 3}, [0, 9, -3, 9.0], [10, 1.5]),
    ({"multipleOf": 0.1}, [0.3, 7], [0.35, 10**400]),
    ({"maxLength": 2}, ["ab", 5], ["abc"]),
    ({"pattern": "^a+$"}, ["aa", 5], ["ab"]),
    ({"minItems": 1}, [[1], "x"], [[]]),
    ({"minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
    ({"additionalProperties": {"type": "null"}}, [{"a": None}], [{"a": 1}]),
    ({"anyOf": [{"type": "null"}, {"minimum": 5}]}, [None, 5], [4]),
    ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
    ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, [0, 3], [1, 2]),
    ({"not": {"type": "null"}}, [1], [None]),
    ({"title": "a note", "type": "null"}, [None], [1]),
    ({"uniqueItems": True}, [[1, 2]], [[1, 1]]),
    ({"format": "date"}, ["2024-02-29", 1], ["2023-02-29"]),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, [None], [1]),
    (
      {
        "$id": "urn:x",
        "$defs": {"b": {"$id": "urn:y", "type": "null"}},
        "$ref": "urn:y",
      },
      [None],
      [1],
    ),
  ],
)
def test_keywords(schema, good, bad):
  json_schema.check_schema(schema)
  assert [x for x in good if not json_schema.matches(x, schema)] == []
  assert [x for x in bad if json_schema.matches(x, schema)] == []


@pytest.mark.parametrize(
  ("schema", "message"),
  [
    ({"$ref": "#/x"}, r"refers to '#/x', which is missing"),
    (
      {"items": {"$ref": "https://example.org/x"}},
      r"refers to 'https://example\.org/x'",
    ),
    ({"$ref": "#"}, "leads back to itself"),
    ({"items": {"uniqueItem": True}}, r"at \$\.items: .*'uniqueItem'"),
    ({"properties": {"a": {"typ": "null"}}}, r"at \$\.properties\.a: .*'typ'"),
    ({"anyOf": [{"format": "dat"}]}, r"at \$\.anyOf\[0\]\.format: 'dat' is not one of"),
    ({"contentEncoding": "base64"}, "contentEncoding"),
    ({"pattern": "("}, r"at \$\.pattern: '\(' is not a 'regex'"),
    ({"type": "int"}, r"at \$\.type: 'int' is not"),
    ([], "schema is"),
  ],
)
def test_what_would_go_unchecked_is_refused(schema, message):
  with pytest.raises(ValueError, match=message):
    json_schema.check_schema(schema)


@pytest.mark.parametrize(
  "text", ["", "{", "NaN", "[Infinity]", "[" * 100_000, "1 2", "9" * 5000]
)
def test_what_is_not_json_is_a_value_error(text):
  with pytest.raises(ValueError):
    json_schema.parse(text)


def test_a_recursive_schema_ends_with_the_text():
  schema = {"properties": {"next": {"$ref": "#"}}, "required": ["n"]}
  json_schema.check_schema(schema)
  assert json_schema.matches({"n": 1, "next": {"n": 2}}, schema)
  assert not json_schema.matches({"n": 1, "next": {}}, schema)
  deep = json_schema.parse('{"n":1,"next":' * 900 + "1" + "}" * 900)
  assert not json_schema.matches(deep, schema)
