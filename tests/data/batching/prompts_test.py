import dataclasses
import operator

import pytest

from tests import toys_text
from tunix.data.batching.prompts import PromptBatches, PromptText
from tunix.data.reading.jsonl import JsonlRecords
from tunix.data.reading.mixture import Mixture
from tunix.data.reading.stored import HeldRecords
from tunix.data.records import PROMPT_ROWS, SFT
from tunix.data.render import render_record
from tunix.data.scan import scan
from tunix.data.source import Source
from tunix.generate.tokenizer_adapter import TokenizerAdapter

TOKENIZER = toys_text.chat_tokenizer(None)


def source(records, max_prompt_length=None, **options):
  return Source(
    records=records,
    kind=PROMPT_ROWS,
    tokenizer=TOKENIZER,
    layout=PromptText(max_prompt_length=max_prompt_length),
    **options,
  )


def test_prompts_stay_text_beside_their_columns():
  records = [
    {"prompt": "a sea", "answer": 3},
    {"prompts": "of", "answer": None},  # the other name of the column
  ]
  kept = {}
  report = scan(source(records), kept=kept)
  assert kept == {
    0: {"prompts": "a sea", "answer": 3},
    1: {"prompts": "of", "answer": None},
  }
  assert report.columns == ("answer",)
  assert str(report) == (
    "2 prompts: 2 kept; the longest prompt has 3 (record 0); columns answer"
  )


def test_long_prompts_are_errors_or_dropped():
  records = [{"prompt": "of"}, {"prompt": " sea" * 9}, {"prompt": "of"}]
  with pytest.raises(
    ValueError, match=r"record 1: .* 10 tokens .*max_prompt_length is 4"
  ):
    scan(source(records, 4))
  kept = {}
  report = scan(source(records, 4, overlong="drop"), kept=kept)
  assert (report.kept, report.dropped, report.longest_prompt) == (2, 1, 10)
  assert list(kept) == [0, 2]
  with pytest.raises(ValueError, match=r"all 3 .*max_prompt_length 1"):
    scan(source(records, 1, overlong="drop"))


def test_kept_prompts_are_counted_by_part():
  lists = [[{"prompt": "of"}, {"prompt": " sea" * 9}], [{"prompt": "of"}]]
  parts = [HeldRecords(part, PROMPT_ROWS, name=f"p{i}") for i, part in enumerate(lists)]
  mixture = Mixture(parts, [1, 1])
  kept = {}
  scan(source(mixture, 4, overlong="drop"), kept=kept)
  assert mixture.count_by_part(kept) == (1, 1)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", "invalid JSON"),
    ('{"text": "a"}', "expected {"),
    ('{"prompt": 3}', '"prompt" is an int'),
    ('{"prompt": ""}', '"prompt" is empty'),
    ('{"prompt": [{"role": "user"}]}', '"content" is missing'),
    ('{"prompt": "a", "completions": 1}', "the column 'completions'"),
    ('{"prompt": "a", "other": 1}', 'a "other"'),
  ],
)
def test_bad_records_are_named_by_line(tmp_path, line, message):
  file = tmp_path / "p.jsonl"
  file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
  with pytest.raises(ValueError, match=r"p\.jsonl:3") as error:
    scan(source(JsonlRecords(file, PROMPT_ROWS)))
  assert message in str(error.value)


def test_batches_of_prompts_go_on_where_they_stood():
  rows = [{"prompts": str(i), "n": i} for i in range(5)]
  source = PromptBatches(rows, 2, seed=3, epochs=2)
  every = list(source)
  assert [len(batch["n"]) for batch in every] == [2, 2, 1, 2, 2, 1]
  assert operator.length_hint(source) == len(every)
  for epoch in (every[:3], every[3:]):
    assert sorted(n for batch in epoch for n in batch["n"]) == list(range(5))
  assert every[:3] != every[3:]
  first = iter(source)
  drawn = [next(first) for _ in range(4)]
  second = iter(source)
  second.set_state(first.get_state())
  assert drawn + list(second) == every
  endless = iter(PromptBatches(rows, 5, seed=None, epochs=None))
  assert [next(endless) for _ in range(3)] == [next(endless)] * 3


def test_batches_of_prompts_are_mixed_too():
  rows = [{"prompts": str(i), "n": i} for i in range(12)]
  source = PromptBatches(rows, 4, seed=1, epochs=4, sizes=(10, 2), weights=(3, 1))
  batches = list(source)
  drawn = [n for batch in batches for n in batch["n"]]
  assert [sum(n >= 10 for n in drawn[at : at + 8]) for at in range(0, 48, 8)] == [2] * 6
  assert sorted(n for n in drawn if n < 10)[:3] == [0, 0, 0]
  first = iter(source)
  for _ in range(5):
    next(first)
  second = iter(source)
  second.set_state(first.get_state())
  assert list(second) == batches[5:]
  with pytest.raises(ValueError, match="part 1 of the mixture"):
    PromptBatches(rows, 4, seed=1, epochs=1, sizes=(12, 0), weights=(3, 1))


def test_the_repr_is_short():
  batches = PromptBatches([{"prompt": "a"}] * 3, 2, seed=None, epochs=1)
  assert repr(batches) == "PromptBatches(3 prompts in batches of 2, 1 epochs)"


def test_a_prompt_has_the_tokens_of_rows_if_its_template_prints_no_bos():
  """Rows of conversations begin without BOS, as in transformers; texts with it."""
  template = toys_text.TEMPLATES["chatml"][0]
  tokenizer = TokenizerAdapter(
    toys_text.bpe(), chat_template=template, bos_token="<s>", eos_token="<|im_end|>"
  )
  row = render_record({"prompt": "a sea", "response": "of"}, SFT, tokenizer)
  record = {"prompt": "a sea", "answer": 3}
  kept = {}
  texts = dataclasses.replace(source([record]), tokenizer=tokenizer)
  report = scan(texts, kept=kept)
  ids = kept[0]["prompt_token_ids"]
  assert ids == row.prompt.tolist()
  assert tokenizer.tokenize(kept[0]["prompts"], add_eos=False).tolist() == [
    tokenizer.bos_id(),
    *ids,
  ]
  assert report.columns == ("answer",) and report.longest_prompt == len(ids)
