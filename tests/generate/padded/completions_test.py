"""Stop strings and increments, on rows that are made by hand."""

import random
import types

import numpy as np
import pytest

from tunix.generate import outputs
from tunix.generate.drawing import stops as stops_lib
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.engine.request import EngineRequest
from tunix.generate.padded import completions
from tunix.generate.padded.completions import RowReader

TEXT = "the end. The end of it"


def letters(ids):
  return "".join(map(chr, ids))


def utf8(ids):
  return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


def ids(text):
  return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def generated(rows, lengths, done=False, stopped=False):
  """What a device would have written."""
  width = max(map(len, rows))
  tokens = np.zeros((len(rows), width), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  flags = lambda x: np.broadcast_to(np.asarray(x), (len(rows),))
  return types.SimpleNamespace(
    tokens=tokens,
    lengths=np.asarray(lengths),
    done=flags(done),
    stopped=flags(stopped),
    logps=-tokens.astype(np.float32),
    sampling_logps=None,
    logits=None,
    routes=None,
  )


@pytest.mark.parametrize(
  ("stops", "tokens", "text"),
  [
    (["end"], 7, "the "),
    (["d."], 8, "the en"),
    (["The", "end of"], 12, "the end. "),
    (["nd o", "d."], 8, "the en"),
    (["t"], 1, ""),
    (["it"], 22, "the end. The end of "),
    (["no", "xyz"], None, None),
  ],
)
@pytest.mark.parametrize("known", [0, 5])
def test_a_stop_string_is_found_where_it_is_complete(stops, tokens, text, known):
  if tokens is not None and tokens <= known:
    return
  assert outputs.find_stop(letters, ids(TEXT), stops, known) == tokens
  if tokens is not None:
    assert outputs.text_of(letters, ids(TEXT)[:tokens], "stop", stops) == text


def test_a_token_may_hold_more_than_the_stop_string():
  words = ["Yes", ". And", " so on"]
  decode = lambda tokens: "".join(words[i] for i in tokens)
  assert outputs.find_stop(decode, np.arange(3), ["."]) == 2
  assert outputs.text_of(decode, np.arange(2), "stop", ["."]) == "Yes"


@pytest.mark.parametrize(
  ("text", "stops", "kept"),
  [
    ("abc", [], "abc"),
    ("abc", ["cd"], "ab"),
    ("abc", ["bcd", "cx"], "a"),
    ("aab", ["aabaab"], ""),
    ("ab\ufffd", [], "ab"),
    ("abc", ["x"], "abc"),
  ],
)
def test_what_of_a_text_stays(text, stops, kept):
  assert completions.settled(text, stops) == kept


def test_one_search_finds_what_a_loop_over_all_stop_strings_finds():
  rng = random.Random(0)
  word = lambda most: "".join(rng.choices("ab.<", k=rng.randint(1, most)))
  for _ in range(500):
    texts, text = [word(5) for _ in range(rng.randint(0, 6))], word(12)
    found = stops_lib.compiled(texts)
    places = [text.find(stop) for stop in texts if stop in text]
    assert found.place(text) == min(places, default=None)
    # An end as long as the longest stop string would be one.
    sizes = range(1, max(map(len, texts), default=1))
    begins = [n for n in sizes if any(s.startswith(text[-n:]) for s in texts)]
    assert found.held(text) == min(len(text), max(begins, default=0))


@pytest.mark.parametrize(
  ("stops", "message"),
  [
    (["a"] * 65, "has 65 texts, expected at most 64"),
    (["a" * 1025], "1025 characters in all its texts, expected at most 1024"),
  ],
)
def test_stop_strings_have_limits(stops, message):
  options = {"max_generation_steps": 9, "stop_strings": stops}
  with pytest.raises(ValueError, match=message):
    SamplingOptions(**options)
  with pytest.raises(ValueError, match=message):
    EngineRequest(prompt=np.arange(3), max_tokens=9, stop_strings=stops)


def grown(decode, tokens, stops, steps, **end):
  """The increments of one row that is read after each of `steps` tokens."""
  options = SamplingOptions(
    max_generation_steps=9,
    stop_strings=stops,
    include_eos=end.pop("include_eos", False),
  )
  rows = RowReader(decode, 1, options)
  parts = []
  for count in steps:
    last = count == steps[-1]
    rows.read(generated([tokens], [count], **(end if last else {})))
    parts.append(rows.increment(0))
  return rows, parts


def text_of_row(rows, stops, prompt=None):
  """The text of the one row of a reader."""
  [row] = rows.completions([np.zeros(1, np.int32)])
  return outputs.text_of(letters, row.ids, row.finish_reason, stops, prompt)


@pytest.mark.parametrize("every", [1, 3, 22])
def test_increments_make_up_the_whole(every):
  steps = [*range(every, 22, every), 22]
  rows, parts = grown(letters, ids(TEXT), ["end of"], steps, done=True)
  parts = [part for part in parts if part]
  assert "".join(p.text for p in parts) == "the end. The "
  assert text_of_row(rows, ["end of"]) == "the end. The "
  assert letters(np.concatenate([p.tokens for p in parts])) == "the end. The end of"
  assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["stop"]
  np.testing.assert_array_equal(
    np.concatenate([p.logprobs for p in parts]), -ids(TEXT)[:19]
  )


def test_half_a_character_is_held_back():
  tokens = ids("aé€b")  # 1 + 2 + 3 + 1 bytes
  _, parts = grown(utf8, tokens, [], list(range(1, 8)), done=True)
  assert [p.text for p in parts] == ["a", "", "é", "", "", "€", "b"]
  assert [len(p.tokens) for p in parts] == [1] * 7


def test_held_back_text_comes_at_the_end():
  _, parts = grown(letters, ids("abcx"), ["cd"], [3, 4], done=True)
  assert [p.text for p in parts] == ["ab", "cx"]
  _, parts = grown(letters, ids("abc"), ["cd"], [2, 3], done=True)
  assert [p.text for p in parts] == ["ab", "c"]


def test_reasons_and_lengths():
  def read(text, stops, **end):
    rows, parts = grown(letters, ids(text), stops, [len(text)], **end)
    count = sum(len(part.tokens) for part in parts)
    return rows, (rows.finish_reason(0), count, text_of_row(rows, stops))

  end = {"done": True, "stopped": True}
  assert read("abc!", [], **end)[1] == ("eos", 3, "abc")
  assert read("abc!", [], include_eos=True, **end)[1] == ("eos", 4, "abc")
  assert read("abcd", [], done=True)[1] == ("length", 4, "abcd")
  rows, stopped = read("abc!", ["b"], include_eos=True, **end)
  assert stopped == ("stop", 2, "a")
  assert rows.limits(np.asarray([9])).tolist() == [2]
  rows, parts = grown(letters, ids("abc"), [], [2])
  assert rows.finish_reason(0) is None and parts[-1].finish_reason is None


def test_the_prompt_in_front():
  rows, _ = grown(letters, ids("abcd"), ["c"], [4], done=True)
  assert text_of_row(rows, ["c"], ids("xy")) == "xyab"
