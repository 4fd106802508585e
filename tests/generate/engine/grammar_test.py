"""Constraints: masks by hand, and random walks that stay in the allowed texts."""

import itertools
import json
import re
import sys
import threading

import jsonschema
import numpy as np
import pytest

from tests import toys_text
from tests.generate.tokenizer_kinds_test import KINDS
from tunix.generate.engine.grammar import Grammars
from tunix.generate.engine.request import RequestError
from tunix.generate.engine.token_bytes import token_bytes
from tunix.generate.tokenizer_adapter import TokenizerAdapter


class Letters:
  """Ten ids: an end token, letters, two tokens of one text, and "é" in two halves."""

  TEXTS = (b"", b"a", b"b", b"ab", b"c", b"c", b"\xc3\xa9", b"\xc3", b"\xa9", b"")
  bos_id, eos_id, pad_id = None, 0, 9

  def encode(self, text):
    ids = {"a": [1], "b": [2], "c": [4], "é": [7, 8]}
    return [i for char in text for i in ids.get(char, [])]

  def decode(self, ids):
    return b"".join(self.TEXTS[i] for i in ids).decode(errors="replace")

  def decode_single_token_bytes(self, number):
    return self.TEXTS[number]

  def vocab_size(self):
    return len(self.TEXTS)


def letters(vocab_size=10, eos_ids=(0,)):
  return Grammars(TokenizerAdapter(Letters()), vocab_size, eos_ids)


def allowed(matcher, vocab_size=10):
  """Returns the ids that a mask allows; bits beyond the vocabulary must be 0."""
  words = matcher.mask()
  assert words.dtype == np.uint32 and words.shape == (-(-vocab_size // 32),)
  ids = [v for v in range(32 * len(words)) if words[v // 32] >> np.uint32(v % 32) & 1]
  assert all(v < vocab_size for v in ids)
  return ids


def after(constraint, tokens, vocab_size=10):
  matcher = constraint.matcher()
  for token in tokens:
    matcher.accept(token)
  return allowed(matcher, vocab_size)


def test_masks_by_hand():
  grammar = letters().regex("ab*c?")
  # At the start only texts that begin with "a" go on.
  assert after(grammar, []) == [1, 3]
  # After "a": "b", both tokens of "c", or the end. "ab" would be "aab".
  assert after(grammar, [1]) == [0, 2, 4, 5]
  assert after(grammar, [3, 2]) == [0, 2, 4, 5]
  # After "abc" only the end is left, and after the end as well.
  assert after(grammar, [3, 5]) == [0]
  assert after(grammar, [3, 5, 0]) == [0]
  # "é" as a whole or in halves; after the first half the second.
  grammar = letters().choice(["é", "ca"])
  assert after(grammar, []) == [4, 5, 6, 7]
  assert after(grammar, [7]) == [8]
  assert after(grammar, [7, 8]) == after(grammar, [6]) == [0]
  # The empty text may be a choice, and a choice may begin another one.
  assert after(letters().choice(["", "a", "ab"]), []) == [0, 1, 3]
  assert after(letters().choice(["", "a", "ab"]), [1]) == [0, 2]


@pytest.mark.parametrize("vocab_size", [4, 10, 32, 33, 64, 70])
def test_sizes_of_the_models_vocabulary(vocab_size):
  # The model has fewer ids than the tokenizer, more, or a multiple of 32.
  grammar = letters(vocab_size).regex("[abc]é?")
  first = after(grammar, [], vocab_size)
  assert first == [i for i in (1, 2, 4, 5) if i < vocab_size]
  assert 0 in after(grammar, [1], vocab_size)


def test_several_end_tokens_and_an_end_token_with_a_text():
  # Id 9 has no text; id 2 is "b" for the tokenizer and only an end here.
  grammar = letters(eos_ids=(9, 2, 9)).regex("[ab]b?")
  assert after(grammar, []) == [1, 3]
  assert after(grammar, [1]) == [2, 9]


def test_matchers_are_independent_and_masks_are_read_only():
  grammar = letters().regex("ab*c?")
  one, two = grammar.matcher(), grammar.matcher()
  one.accept(1)
  assert allowed(one) != allowed(two) == [1, 3]
  assert one.mask() is one.mask()
  with pytest.raises(ValueError, match="read-only"):
    one.mask()[0] = 0


def test_a_token_outside_the_mask_and_a_dead_end_are_request_errors():
  matcher = letters().regex("ab*").matcher()
  with pytest.raises(RequestError, match="does not allow token 4: "):
    matcher.accept(4)
  # No token writes "d". That shows only once the text has come there.
  matcher = letters().regex("a(d|e)").matcher()
  matcher.accept(1)
  with pytest.raises(RequestError, match="has no next token: no text is allowed"):
    matcher.mask()


def test_matchers_work_in_several_threads():
  grammar = letters().regex("(ab|c)*")
  results = []

  def walk():
    matcher = grammar.matcher()
    for _ in range(200):
      matcher.accept(3)
    results.append(allowed(matcher))

  threads = [threading.Thread(target=walk) for _ in range(4)]
  [thread.start() for thread in threads]
  [thread.join() for thread in threads]
  assert results == [[0, 1, 3, 4, 5]] * 4


SCHEMA = {
  "type": "object",
  "properties": {
    "name": {"type": "string", "minLength": 1, "maxLength": 6},
    "é☃": {"enum": ["naïve", "日本", 'a"\\b', None, 3.5]},
    "counts": {
      "type": "array",
      "items": {"type": "integer", "minimum": -20, "maximum": 300},
      "minItems": 1,
      "maxItems": 4,
    },
    "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "boolean"}]},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    "day": {"type": "string", "format": "date"},
  },
  "required": ["name", "é☃", "counts", "next", "code"],
  "additionalProperties": False,
  "$defs": {"leaf": {"type": "object", "maxProperties": 0}},
}
REGEXES = (
  r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?",
  r"^(yes|no|[ß-ü☃😀]{1,4}),? [^\s\x00-\x1f]{1,5}$",
  r"(?i)step [0-9]: .{0,20}",
)
CHOICES = [
  "positive",
  "negative",
  "neither",
  "né",
  "😀",
  'say "no"\n',
  "a b",
  "",
  "(x|.)?",
]


def is_valid(text, schema):
  try:
    jsonschema.validate(json.loads(text), schema)
  except (ValueError, jsonschema.ValidationError):
    return False
  return True


def walk(constraint, tokens, eos, vocab_size, rng):
  """Draws allowed tokens at random to the end; returns the text."""
  matcher, text = constraint.matcher(), b""
  for _ in range(3000):
    ids = allowed(matcher, vocab_size)
    token = int(rng.choice(ids))
    matcher.accept(token)
    if token == eos:
      return text.decode()
    assert tokens[token]  # neither a special token nor one that only the model has
    text += tokens[token]
  raise AssertionError(f"no end after {text!r}")


WALKED = "tokenizers", "transformers", "tiktoken-like", "sentencepiece-like"


@pytest.mark.parametrize("kind", [*WALKED, "tiktoken", "sentencepiece", "metaspace"])
def test_random_walks_stay_in_the_allowed_texts(kind):
  make = toys_text.metaspace if kind == "metaspace" else KINDS[kind]
  tokenizer = TokenizerAdapter(make())
  tokens, eos = token_bytes(tokenizer), tokenizer.eos_id()
  size = tokenizer.vocab_size + 45
  grammars, rng = Grammars(tokenizer, size, [eos]), np.random.default_rng(0)

  def texts(constraint, count):
    return [walk(constraint, tokens, eos, size, rng) for _ in range(count)]

  for source in SCHEMA, json.dumps(SCHEMA):
    for text in texts(grammars.json_schema(source), 10):
      assert is_valid(text, SCHEMA), text
  for regex in REGEXES:
    for text in texts(grammars.regex(regex), 15):
      assert re.fullmatch(regex, text), text
  found = texts(grammars.choice(CHOICES), 60)
  assert set(found) <= set(CHOICES) and len(set(found)) > 4


def encoded(tokenizer, text):
  return [*tokenizer.encode_continuation(text), tokenizer.eos_id()]


@pytest.mark.parametrize("kind", ["tokenizers", "metaspace", "tiktoken-like"])
def test_the_tokenizers_own_ids_of_an_allowed_text_are_allowed(kind):
  make = toys_text.metaspace if kind == "metaspace" else KINDS[kind]
  tokenizer = TokenizerAdapter(make())
  grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids())
  value = {"name": "né☃", "é☃": 'a"\\b', "counts": [1, -20], "next": {}, "code": "AB-7"}
  cases = [
    (grammars.choice(CHOICES), CHOICES[5]),
    (grammars.json_object(), '{"é": [1, {"b": null}]}'),
    (grammars.json_schema(SCHEMA), json.dumps(value, ensure_ascii=False)),
    (grammars.json_schema(SCHEMA), json.dumps(value, ensure_ascii=False, indent=2)),
  ]
  for constraint, text in cases:
    matcher = constraint.matcher()
    for token in encoded(tokenizer, text):
      assert token in allowed(matcher, tokenizer.vocab_size), text
      matcher.accept(token)


def test_many_choices_and_one_that_no_token_writes():
  grammar = letters().choice(["".join(p) for p in itertools.product("abc", repeat=8)])
  assert after(grammar, [3, 3, 3, 1]) == [1, 2, 4, 5]
  assert after(letters().choice(["x", "b"]), []) == [2]


def test_white_space_in_json_has_a_bound():
  tokenizer = TokenizerAdapter(KINDS["tiktoken-like"]())
  matcher = Grammars(tokenizer, 258, [256]).json_object().matcher()
  for byte in b"{\n" + b" " * 64:
    assert byte in allowed(matcher, 258)
    matcher.accept(byte)
  assert bytes(allowed(matcher, 258)) == b'"}'


@pytest.mark.parametrize(
  ("build", "message"),
  [
    (lambda g: g.json_schema("{"), "schema is '{'; expected JSON text: .*Pass a JSON"),
    (lambda g: g.json_schema("[1]"), r"schema is '\[1\]'; expected a JSON object"),
    (lambda g: g.json_schema(True), "schema is True; expected a JSON object"),
    (lambda g: g.json_schema({"a": {1}}), "expected values that JSON has"),
    (
      lambda g: g.json_schema({"type": "strng"}),
      "Invalid type: strng. Correct the sch",
    ),
    (lambda g: g.json_schema({"enum": []}), "Unsatisfiable schema: anyOf is empty"),
    (lambda g: g.json_schema({"$ref": "#/no"}), "Pointer '/no' does not exist"),
    (lambda g: g.json_schema({"not": {}}), 'Unimplemented keys: ."not"'),
    (lambda g: g.regex("a("), r"regex is 'a\('; expected .*unclosed group"),
    (lambda g: g.regex("(?=a)a"), "look-around"),
    (lambda g: g.regex("a^b"), "lookarounds not supported"),
    (lambda g: g.regex(r"a[^\s\S]"), "that allows a text: no text is allowed. Correct"),
    (lambda g: g.regex("x"), "no text is allowed"),  # no token writes it
    (lambda g: g.regex(5), "regex is 5; expected a string"),
    (lambda g: g.choice([]), r"choice is \[\]; expected a list of at least one"),
    (lambda g: g.choice("ab"), "choice is 'ab'; expected a list"),
    (lambda g: g.choice(["a", 1]), "expected a list of at least one string"),
    (lambda g: g.choice(["\ud800"]), "without surrogates"),
    (lambda g: g.regex("\ud800"), "expected a string without surrogates"),
  ],
)
def test_bad_constraints_are_refused_when_they_are_built(build, message):
  with pytest.raises(ValueError, match=f"(?s){message}"):
    build(letters())


def closed(*patterns):
  """The schema of an object with declared keys, patterns, and no other keys."""
  return {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {}},
    "patternProperties": {key: {"type": "integer"} for key in patterns},
    "additionalProperties": False,
  }


def test_patterns_over_declared_properties():
  tokenizer = toys_text.chat_tokenizer()
  grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids())
  for patterns in (["^(a|b)$"], ["^a$", "^b$"]):  # after a comma there is no key
    with pytest.raises(ValueError, match=r"'.*b.*\$'\] match none. Leave them out"):
      grammars.json_schema({"type": "array", "items": closed(*patterns)})
  free = closed("^a$") | {"additionalProperties": True}
  absent = closed() | {"patternProperties": {"^a$": False}}
  for schema in (closed("^(a|c)$"), closed("^a$", "^c"), closed("b"), free, absent):
    matcher = grammars.json_schema(schema).matcher()
    for token in tokenizer.encode('{"b":1' + ("" if schema is absent else ',"')):
      matcher.accept(token)
    matcher.mask()


def test_end_tokens_are_checked():
  with pytest.raises(ValueError, match=r"eos_ids is \(\); expected at least one id"):
    letters(eos_ids=())
  with pytest.raises(ValueError, match=r"eos_ids is \(12,\); .*from 0 to 9"):
    letters(eos_ids=(12,))


def test_the_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "llguidance", None)
  with pytest.raises(ImportError, match=r"pip install tunix\[grammar\]"):
    letters()
