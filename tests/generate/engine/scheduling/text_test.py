"""Text of growing completions: parts that join, and stop strings."""

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from tunix.generate import outputs
from tunix.generate.engine.request import RequestError
from tunix.generate.engine.scheduling.text import TextReader

# Bytes as tokens, as tokenizers with a byte fallback have them, and some words.
WORDS = [b"the ", b"sea", " \u65e5".encode(), b"<|", b"|>", b"a", "\u00e9".encode()]


def decode(ids):
  data = b"".join(bytes([i]) if i < 256 else WORDS[i - 256] for i in ids)
  return data.decode(errors="replace")


def spelt(text):
  return list(text.encode())


tokens = st.lists(
  st.one_of(
    st.integers(256, 255 + len(WORDS)).map(lambda i: [i]),
    st.text("a|>\u00e9\u65e5\U0001f600", max_size=3).map(spelt),
    st.integers(128, 255).map(lambda i: [i]),  # no text of its own
  ),
  max_size=20,
).map(lambda parts: [token for part in parts for token in part])
stops = st.lists(st.text("<a|>\u65e5e ", min_size=1, max_size=4), max_size=2)
sizes = st.lists(st.integers(1, 6), min_size=1)


def parts_of(tokens, sizes):
  """Numbers of tokens after each launch."""
  out, number = [], 0
  while number < len(tokens):
    number = min(number + sizes[len(out) % len(sizes)], len(tokens))
    out.append(number)
  return out


def first_stop(tokens, stops):
  """The least number of tokens whose text has a stop string."""
  for count in range(len(tokens) + 1):
    if any(stop in decode(tokens[:count]) for stop in stops):
      return count
  return None


LONG_STOP = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0"


@settings(max_examples=400, deadline=None)
@given(tokens, stops, sizes)
@example(spelt("ab" + LONG_STOP + "cd"), [LONG_STOP], [1])
@example(spelt("ab" * 30 + LONG_STOP + "cd"), [LONG_STOP], [3])
def test_parts_join_and_stops_are_found_at_once(tokens, stops, sizes):
  row = np.array(tokens, np.int32)
  reader, sent = TextReader(decode, stops, streams=True), []
  wanted, before = first_stop(tokens, stops), 0
  for count in parts_of(tokens, sizes):
    found = reader.find_stop(row[:count])
    is_here = wanted is not None and before < wanted <= count
    assert found == (wanted if is_here else None)
    if is_here:
      sent.append(reader.text(row[:wanted], "stop"))
      break
    sent.append(reader.text(row[:count], None))
    before = count
  else:
    sent.append(reader.text(row, "length"))
  reason = "length" if wanted is None else "stop"
  whole = outputs.text_of(decode, row[:wanted], reason, stops)
  assert "".join(sent) == whole
  if wanted is not None:
    assert not any(stop in whole for stop in stops)


def test_what_may_change_waits():
  """Half a character, and the beginning of a stop string."""
  reader = TextReader(decode, ["<|end|>"], streams=True)
  row = spelt("a\u00e9b<|e") + spelt("f")
  text = [reader.text(np.array(row[: n + 1]), None) for n in range(len(row))]
  assert text == ["a", "", "\u00e9", "b", "", "", "", "<|ef"]


def test_without_a_stream_all_of_it_comes_at_the_end():
  reader = TextReader(decode, [], streams=False)
  row = np.array(spelt("the sea"))
  assert [reader.text(row[:n], None) for n in (1, 4)] == ["", ""]
  assert reader.text(row, "length") == "the sea"


def test_an_end_token_has_no_text():
  reader = TextReader(decode, [], streams=True)
  row = np.array([256, 257, 7])
  assert reader.text(row[:2], None) == "the sea"
  assert reader.text(row, "eos") == ""


def test_a_stream_decodes_a_window_only():
  """The cost of a part does not grow with the completion."""
  most = 0

  def counted(ids):
    nonlocal most
    most = max(most, len(ids))
    return decode(ids)

  reader = TextReader(counted, ["|>x"], streams=True)
  row = np.array(spelt("word " * 200))
  for count in range(4, len(row), 4):
    assert reader.find_stop(row[:count]) is None
    reader.text(row[:count], None)
  assert most < 32


def test_ids_without_a_text_are_an_error_of_the_request():
  reader = TextReader(decode, ["a"], streams=True)
  for call in (
    lambda: reader.find_stop(np.array([900])),
    lambda: reader.text(np.array([900]), None),
    lambda: reader.text(np.array([900]), "length"),
  ):
    with pytest.raises(RequestError, match=r"cannot decode .*IndexError"):
      call()
