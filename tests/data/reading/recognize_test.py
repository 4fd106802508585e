import pytest

from tunix.data.reading.recognize import recognize
from tunix.data.records import LABELLED, PAIRS, PROMPTS, SFT

# Keys of a record: kind, keys by which it is known, whose form it has.
KNOWN = [
  (("prompt", "response"), SFT, ("prompt", "response"), None),
  (("id", "messages", "tools"), SFT, ("messages",), None),
  (("text",), SFT, ("text",), None),
  (("instruction", "output", "text"), SFT, ("instruction", "output"), "Alpaca"),
  (("conversations", "system"), SFT, ("conversations",), "ShareGPT"),
  (("prompt", "completion"), SFT, ("prompt", "completion"), "TRL"),
  (("prompt", "messages"), SFT, ("prompt", "messages"), "TRL"),
  (("prompt", "chosen", "rejected"), PAIRS, ("chosen", "rejected"), None),
  (("chosen", "rejected"), PAIRS, ("chosen", "rejected"), None),
  (
    ("conversations", "chosen", "rejected"),
    PAIRS,
    ("conversations", "chosen", "rejected"),
    "ShareGPT",
  ),
  (("prompt", "completion", "label"), LABELLED, ("completion", "label"), None),
  (("prompt", "answer"), PROMPTS, ("prompt",), None),
  (("instruction", "solution"), PROMPTS, ("instruction",), "Alpaca"),
]


@pytest.mark.parametrize(("fields", "kind", "keys", "library"), KNOWN)
def test_a_record_is_known_by_its_keys(fields, kind, keys, library):
  # A null counts as absent.
  nulls = {"chosen": None, "label": None, "output": None}
  record = dict.fromkeys((*fields, *nulls)) | dict.fromkeys(fields, "")
  assert recognize(record, "a:1") == (kind, keys, library)


@pytest.mark.parametrize(
  ("record", "says"),
  [
    ({"question": "a"}, "a:1: found fields 'question', expected chosen with rejected"),
    ({"chosen": "a"}, "the keys of ShareGPT, OpenAI, Alpaca, TRL"),
    (["a"], "a:1: found a list, expected chosen"),
  ],
)
def test_what_is_known_by_nothing_is_refused(record, says):
  with pytest.raises(ValueError, match=says):
    recognize(record, "a:1")
