import json

import pytest

from tests import toys_text
from tunix.data.reading import jsonl
from tunix.data.records import SFT
from tunix.data.rows import OneRow
from tunix.data.scan import scan as scan_source
from tunix.data.source import Source
from tunix.examples.quickstart import task
from tunix.generate.tokenizer_adapter import TokenizerAdapter

TOKENIZER = toys_text.chat_tokenizer(None)


def scan(records, tokenizer, *, max_length, overlong="error", limit=None):
  source = Source(
    records=records,
    kind=SFT,
    tokenizer=tokenizer,
    layout=OneRow(max_length=max_length),
    overlong=overlong,
  )
  return scan_source(source, limit)


def record(words):
  return {"prompt": "a", "response": " sea" * words}


def length(words):
  return 3 + words * len(TOKENIZER.encode(" sea"))


def test_counts_by_policy():
  records = [record(1), record(5), record(2)]
  full = scan(records, TOKENIZER, max_length=64)
  assert (full.records, full.scanned, full.kept, full.dropped) == (3, 3, 3, 0)
  assert full.tokens == length(1) + length(5) + length(2)
  assert full.trained_tokens == full.tokens - 6  # BOS and "a" of each
  assert (full.longest, full.longest_at) == (
    {"record": length(5)},
    {"record": "record 1"},
  )
  cut = scan(records, TOKENIZER, max_length=length(2), overlong="truncate")
  assert (cut.kept, cut.truncated) == (3, 1)
  assert cut.tokens == length(1) + 2 * length(2)
  left = scan(records, TOKENIZER, max_length=length(2), overlong="drop")
  assert (left.kept, left.dropped, left.truncated) == (2, 1, 0)
  assert left.longest == {"record": length(5)}
  assert "2 kept, 1 dropped" in str(left)


def test_text_outside_the_vocabulary_is_counted():
  tokenizer = task.make_tokenizer()  # digits, "+" and "="; BOS, then 3 and 2 unknown
  texts = [{"prompt": "a 1+b=", "response": "cd"}, {"prompt": "1+2=", "response": "3"}]
  assert scan(texts, tokenizer, max_length=64).unknown == 5
  assert scan(texts[1:], tokenizer, max_length=64).unknown == 0


def test_an_unknown_token_that_ends_texts_too_is_not_counted():
  tokenizer = task.make_tokenizer()
  named = TokenizerAdapter(
    tokenizer.tokenizer, bos_token="<begin>", eos_token="<unknown>", pad_token="<pad>"
  )
  assert tokenizer.unk_id() == named.eos_id()
  assert named.unk_id() is None


def test_errors_name_the_line(tmp_path):
  path = tmp_path / "data.jsonl"
  path.write_text("\n".join(json.dumps(record(n)) for n in (1, 9, 1)))
  records = jsonl.JsonlRecords(path)
  with pytest.raises(ValueError, match=r"data\.jsonl:2: \d+ tokens, more than the max"):
    scan(records, TOKENIZER, max_length=length(2))
  long_prompt = [{"prompt": "how many days", "response": "a"}]
  with pytest.raises(ValueError, match="record 0: the prompt has"):
    scan(long_prompt, TOKENIZER, max_length=3)
  with pytest.raises(ValueError, match="record 1: found fields 'x'"):
    scan([record(1), {"x": 1}], TOKENIZER, max_length=64)


def test_a_limit_looks_at_records_spread_over_the_data():
  records = [record(n) for n in range(1, 11)]
  part = scan(records, TOKENIZER, max_length=64, limit=4)
  assert (part.records, part.scanned, part.longest["record"]) == (10, 4, length(10))
  assert "(4 looked at)" in str(part)
  assert scan(records, TOKENIZER, max_length=64, limit=99).scanned == 10
  with pytest.raises(ValueError, match="limit is 0: it must be"):
    scan(records, TOKENIZER, max_length=64, limit=0)


def test_nothing_left_is_an_error():
  with pytest.raises(ValueError, match="all 2 scanned records are longer than 3"):
    scan([record(3)] * 2, TOKENIZER, max_length=3, overlong="drop")
  with pytest.raises(ValueError, match="records is empty"):
    scan([], TOKENIZER, max_length=8)
