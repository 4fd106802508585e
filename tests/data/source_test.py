import itertools
from typing import Any

import numpy as np
import pytest

from tests import toys_text
from tunix.data import pipeline
from tunix.data.records import KINDS
from tunix.data.rows import SideBySide
from tunix.data.scan import scan
from tunix.data.source import Source

TOKENIZER = toys_text.chat_tokenizer(None)


def pairs(count):
  return [
    {"prompt": f"{i} of", "chosen": " sea" * (i % 3 + 1), "rejected": " river"}
    for i in range(count)
  ]


def source(records, **options):
  kind = "labelled" if "completion" in records[0] else "pair"
  layout = SideBySide(
    max_prompt_length=options.pop("max_prompt_length", 8), max_completion_length=8
  )
  kind = KINDS[options.pop("kind", kind)]
  return Source(
    records=records, kind=kind, tokenizer=TOKENIZER, layout=layout, **options
  )


def texts(batch, name):
  return [
    TOKENIZER.decode(ids[mask == 1])
    for ids, mask in zip(batch[f"{name}_ids"], batch[f"{name}_mask"])
  ]


def test_batches_of_pairs():
  batches = list(pipeline.build_batches(source(pairs(5)), batch_size=4, shuffle=False))
  assert len(batches) == 2
  first, last = batches
  assert first["prompt_ids"].shape == first["chosen_ids"].shape == (4, 8)
  assert texts(first, "prompt") == ["0 of", "1 of", "2 of", "3 of"]
  assert texts(first, "chosen") == [" sea", " sea sea", " sea sea sea", " sea"]
  assert texts(first, "rejected") == [" river"] * 4
  eos = TOKENIZER.eos_id()
  assert first["rejected_ids"][0][first["rejected_mask"][0] == 1][-1] == eos
  # The last batch has one pair; the rest is padding, which has one token to begin with.
  assert last["chosen_mask"].any(1).tolist() == [True, False, False, False]
  assert last["prompt_mask"][1:].sum(1).tolist() == [1, 1, 1]
  assert last.pop("weights").tolist() == [1.0, 0.0, 0.0, 0.0]
  assert {k: v.dtype for k, v in last.items()} == dict.fromkeys(last, np.dtype("int32"))


def test_labels_and_margins():
  records = [{"prompt": "a", "completion": "b", "label": i > 1} for i in range(3)]
  [batch] = pipeline.build_batches(source(records), batch_size=4, shuffle=False)
  assert batch["labels"].tolist() == [False, False, True, True]
  assert set(batch) == {
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"),
    *("labels", "weights"),
  }
  records = [pair | {"margin": i} for i, pair in enumerate(pairs(2))]
  [batch] = pipeline.build_batches(source(records), batch_size=2, shuffle=False)
  assert batch["margins"].tolist() == [0.0, 1.0]
  assert batch["margins"].dtype == np.float32


def test_some_margins_are_an_error():
  records = [pairs(1)[0] | {"margin": 1.0}, *pairs(1)]
  with pytest.raises(ValueError, match="margin"):
    list(pipeline.build_batches(source(records), batch_size=2))
  with pytest.raises(ValueError, match=r'record 1: .* no "margin"'):
    scan(source(records))


def test_iterators_go_on_where_they_were():
  made = pipeline.build_batches(source(pairs(7)), batch_size=2, num_epochs=None)
  running = iter(made)
  for _ in range(5):
    next(running)
  state = running.get_state()
  expected = [next(running) for _ in range(6)]
  again = iter(made)
  again.set_state(state)
  for batch in expected:
    found = next(again)
    for name, value in batch.items():
      np.testing.assert_array_equal(found[name], value)


def test_processes_share_a_batch():
  options: dict[str, Any] = {"batch_size": 4, "num_epochs": 2, "seed": 3}
  whole = list(pipeline.build_batches(source(pairs(7)), **options))
  parts = [
    list(
      pipeline.build_batches(
        source(pairs(7)), **options, process_index=i, process_count=2
      )
    )
    for i in range(2)
  ]
  assert len(whole) == len(parts[0]) == len(parts[1]) == 4
  for batch, *shares in zip(whole, *parts):
    for name, value in batch.items():
      both = np.concatenate([share[name] for share in shares])
      np.testing.assert_array_equal(both, value)


def test_the_order_follows_from_the_seed():
  def order(seed):
    made = pipeline.build_batches(
      source(pairs(9)), batch_size=1, num_epochs=2, seed=seed
    )
    return [texts(batch, "prompt")[0] for batch in made]

  one = order(1)
  assert order(1) == one
  assert order(2) != one
  assert sorted(one[:9]) == sorted(one[9:]) == sorted(f"{i} of" for i in range(9))
  assert one[:9] != one[9:]


BAD = [
  *pairs(2),
  {"prompt": "a", "chosen": " ", "rejected": "x"},
  {"prompt": "a", "chosen": "x", "rejected": "x"},
  {"prompt": "a", "chosen": " sea" * 30, "rejected": "x"},
]


def test_bad_pairs_are_counted():
  report = scan(source(BAD, overlong="truncate", unusable="drop"))
  counts = (report.records, report.kept, report.truncated, report.empty, report.equal)
  assert counts == (5, 3, 1, 1, 1)
  dropped = scan(source(BAD, overlong="drop", unusable="drop"))
  assert (dropped.kept, dropped.dropped) == (2, 1)
  assert dropped.longest_at["completion"] == "record 4"
  text = str(dropped)
  assert text.startswith(
    "5 pairs: 2 kept, 1 dropped, 1 with an empty completion left out"
  )
  batches = pipeline.build_batches(
    source(BAD, overlong="drop", unusable="drop"), batch_size=8
  )
  assert [int(batch["chosen_mask"].any(1).sum()) for batch in batches] == [2]


@pytest.mark.parametrize(
  ("records", "options", "message"),
  [
    (BAD[2:3], {}, 'record 0: "chosen" is empty'),
    (BAD[3:4], {}, 'record 0: "chosen" and "rejected" are equal, so'),
    (
      BAD[4:],
      {},
      "record 0: the completion has .* tokens and max_completion_length is 8",
    ),
    (
      [{"prompt": "a", "chosen": " sea" * 30, "rejected": " sea" * 20}],
      {"overlong": "truncate"},
      'record 0: "chosen" and "rejected" are equal in their first 8 tokens',
    ),
    (BAD[2:4], {"unusable": "drop"}, "all 2 .* so none is left"),
  ],
)
def test_bad_pairs_are_errors(records, options, message):
  with pytest.raises(ValueError, match=message):
    scan(source(records, **options))
  with pytest.raises(ValueError, match=message):
    list(pipeline.build_batches(source(records, **options), batch_size=1))


def test_labels_are_counted():
  records = [{"prompt": "a", "completion": "b", "label": i > 1} for i in range(5)]
  report = scan(source(records))
  assert (report.desirable, report.undesirable) == (3, 2)
  assert str(report).endswith("3 desirable, 2 undesirable")


def test_prompts_alone():
  records = [{"prompt": "a sea"}, {"prompt": "of", "response": " sea" * 30}]
  read = source(records, kind="prompt")
  text = str(scan(read))
  assert text == "2 prompts: 2 kept; the longest prompt has 3 (record 0)"
  [batch] = pipeline.build_batches(read, batch_size=4, shuffle=False)
  assert set(batch) == {"prompt_ids", "prompt_mask", "weights"}
  assert texts(batch, "prompt")[:2] == ["a sea", "of"]
  short = source(records, kind="prompt", max_prompt_length=1, overlong="drop")
  with pytest.raises(
    ValueError, match="longer than max_prompt_length 1, so none is left; raise"
  ):
    scan(short)


def test_a_limited_scan_is_spread_over_the_data():
  report = scan(source(pairs(10)), limit=3)
  assert (report.records, report.scanned) == (10, 3)
  with pytest.raises(ValueError, match="limit is 0"):
    scan(source(pairs(1)), limit=0)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"max_prompt_length": 0}, "max_prompt_length is 0"),
    ({"overlong": "ignore"}, "overlong 'ignore' is unknown"),
    ({"unusable": "ignore"}, "unusable 'ignore' is unknown"),
    ({"kind": "sft"}, "layout is SideBySide.*expected OneRow"),
  ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    source(pairs(1), **options)


def test_an_endless_stream_begins_again():
  made = pipeline.build_batches(source(pairs(3)), batch_size=2, num_epochs=None)
  batches = list(itertools.islice(made, 6))
  seen = [t for batch in batches for t in texts(batch, "prompt")]
  assert sorted(seen) == sorted(["0 of", "1 of", "2 of"] * 4)
