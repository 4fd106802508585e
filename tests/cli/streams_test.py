"""`data.stream`: training on data that is never read as a whole."""

import json

import numpy as np
import pytest

from tests import drills
from tests.cli import runs
from tests.cli.widths_test import LABELLED, PAIR, built
from tunix.cli import config as config_lib

RECORDS = {"dpo": [PAIR] * 8, "kto": LABELLED * 4}
RECORDS["reward"] = RECORDS["orpo"] = RECORDS["dpo"]
FUNCTION = """
def numbered(count):
  def record(i):
    return {"prompt": f"How many days? {i}", "response": "Seven days."}
  return map(record, range(count))
"""


@pytest.mark.parametrize("job", ["sft", *RECORDS])
def test_a_stream_gives_the_batches_of_the_file(settings, tmp_path, job):
  keys = settings | {"job": job, "data__shuffle": "false", "training__max_steps": 6}
  if job in RECORDS:
    keys["data__train"] = tmp_path / "pairs.jsonl"
    lines = [json.dumps(record) for record in RECORDS[job]]
    keys["data__train"].write_text("\n".join(lines))
  whole, streamed = (
    built(keys, **{"training__max_steps": 6}),
    built(keys, data__stream="true", training__max_steps=6),
  )
  assert streamed.reports["train"].records is None
  assert str(streamed.reports["train"]).startswith("a stream of ")
  assert streamed.num_steps == whole.num_steps == 6
  for _, left, right in zip(range(6), whole.train, streamed.train):
    for name in left.keys() & right.keys():
      # The widths differ, because the whole file allows narrower rows.
      size = min(left[name].shape[-1], right[name].shape[-1])
      np.testing.assert_array_equal(left[name][..., :size], right[name][..., :size])


def test_widths_follow_the_first_records(settings, tmp_path):
  lines = [
    {"prompt": "How many?", "response": "Seven days. " * (1 + 60 * (i == 70))}
    for i in range(80)
  ]
  file = tmp_path / "a.jsonl"
  file.write_text("\n".join(map(json.dumps, lines)))
  keys = settings | {"data__max_length": 1024, "data__train": file}
  keys |= {"data__stream": "true", "data__pad_to": "longest", "data__shuffle": "false"}
  data = built(keys, data__scan_limit=60, training__max_steps=40)
  assert data.widths["train"].lengths == (64, 1024)
  widths = [next_["input_tokens"].shape[1] for _, next_ in zip(range(20), data.train)]
  assert widths.count(64) == 19 and widths[17] == 1024  # record 70


def test_the_order_is_drawn_within_the_buffer(settings, tmp_path):
  file = tmp_path / "numbered.jsonl"
  lines = [{"prompt": f"How many days? {i:03}", "response": "7."} for i in range(100)]
  file.write_text("\n".join(map(json.dumps, lines)))
  keys = settings | {"data__train": file, "training__global_batch_size": 1}
  data = {
    buffer: built(
      keys, data__stream="true", data__shuffle_buffer=buffer, training__max_steps=100
    )
    for buffer in (1, 4, 100)
  }
  orders = {
    buffer: [row["input_tokens"][0].tolist() for _, row in zip(range(100), x.train)]
    for buffer, x in data.items()
  }
  moved = {
    buffer: max(abs(orders[1].index(row) - place) for place, row in enumerate(rows))
    for buffer, rows in orders.items()
  }
  assert moved[1] == 0 < moved[4] < 50 < moved[100]


def test_functions_are_read_as_streams(settings, tmp_path):
  (tmp_path / "mine.py").write_text(FUNCTION)
  keys = settings | {"data__train": f"{tmp_path}/mine.py:numbered(count=20)"}
  data = built(keys, data__stream="true", training__max_steps=9)
  assert len(list(zip(range(9), data.train))) == 9  # passes repeat
  with pytest.raises(TypeError, match="or read it as a stream"):
    built(keys)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"training__max_steps": "null"}, "training.max_steps is not set; a stream has no"),
    ({"data__weights": "[1]"}, "data.weights is .* reads its entries one after"),
    ({"job": "distill", "distill__teacher": "x"}, "data.stream is true; .* distill"),
    (
      {"job": "dpo", "preference__reference_logps": "x"},
      "preference.reference_logps is .* never read as a whole",
    ),
    (
      {"job": "grpo"},
      "data.stream.* every prompt is checked before the training",
    ),
    (
      {"data__stream": "false", "data__shuffle_buffer": 3},
      "data.shuffle_buffer is 3; expected data.stream",
    ),
  ],
)
def test_what_a_stream_cannot_do_is_refused_by_name(settings, keys, message):
  keys = settings | {"data__stream": "true"} | keys
  if keys.get("job") == "grpo":
    del keys["data__max_length"]
  with pytest.raises(ValueError, match=message):
    config_lib.load(runs.arguments(**keys))


@pytest.mark.parametrize("name", ["a.csv", "a.json", "tfds:a", "a-*.array_record"])
def test_sources_that_are_no_streams_are_refused(settings, name):
  with pytest.raises(ValueError, match=r"cannot be read as a stream; expected JSON"):
    built(settings, data__train=name, data__stream="true", training__max_steps=1)


@pytest.mark.slow
def test_killed_runs_on_a_stream_resume_exactly(settings, tmp_path, train_file):
  keys = settings | {
    "data__stream": "true",
    "data__shuffle_buffer": 6,
    "lora__rank": 2,
    "training__max_steps": 120,
    "checkpoint__every_n_steps": 4,
  }

  drill = drills.KillDrill(
    command=runs.training(keys),
    resumed=r"resuming after step (\d+)",
    files=("logs/metrics.jsonl", "export/adapter_model.safetensors"),
  )
  drill.check(tmp_path, random_kills=6)
