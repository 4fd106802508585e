import json

import pytest

from tunix.report import series
from tunix.report.series import Curve, Point


def write(folder, records, name="metrics.jsonl", more=b""):
  (folder / "logs").mkdir(exist_ok=True)
  lines = "".join(json.dumps(record) + "\n" for record in records)
  (folder / "logs" / name).write_bytes(lines.encode() + more)


def test_few_values_are_all_kept():
  curve = Curve(4)
  for step, value in ((1, 3.0), (2, 1.0), (3, float("nan")), (4, 2.0)):
    curve.add(step, value)
  assert curve.points() == [(1, 3.0), (2, 1.0), (4, 2.0)]
  assert (curve.count, curve.not_finite) == (3, 1)
  assert (curve.low, curve.high) == (Point(2, 1.0), Point(1, 3.0))


@pytest.mark.parametrize("count", [5, 64, 1000, 4097])
def test_a_long_curve_keeps_its_ends_and_peaks(count):
  curve = Curve(8)
  for step in range(count):
    curve.add(
      step, 99.0 if step == count // 2 else -99.0 if step == 2 else step / count
    )
  points = curve.points()
  assert len(points) <= 2 * 8 + 2
  assert {(0, 0.0), (count // 2, 99.0)} <= {*points, (0, 0.0)}
  assert points[0].step == 0 and points[-1].step == count - 1
  assert curve.high == (count // 2, 99.0)
  assert points == sorted(points) and curve.count == count


def test_two_files_and_modes_by_name(tmp_path):
  write(
    tmp_path, [{"step": 0, "mode": "eval", "loss": 3.0}, {"step": 1, "loss": "NaN"}]
  )
  write(tmp_path, [{"step": 1, "mode": "train", "mfu": 0.5}], "timings.jsonl")
  curves = series.read(tmp_path)
  assert {n: [*m] for n, m in curves.by_name.items()} == {
    "loss": ["eval", "train"],
    "mfu": ["train"],
  }
  assert curves.by_name["loss"]["train"].not_finite == 1
  assert curves.last_step == 1 and not curves.notes


DAMAGE = [
  (b"", None),
  (b'{"step": 3, "loss"', None),  # is being written
  (b"\0\0\0\n[1]\n", "2 damaged lines of metrics.jsonl skipped, the first is"),
  (b'{"step": "x"}\n{"loss": 1}\n{"step": 1, "a": [1]}\n', "3 damaged lines of"),
  (b'{"step": 1, "a": null}\n', "1 damaged line of"),
  (b"x" * (3 << 20) + b"\n", "damaged"),
  (
    b'{"step": %s, "loss": 1}\n{"step": -1, "loss": 1}\n' % (b"9" * 4000),
    "2 damaged lines",
  ),
]


@pytest.mark.parametrize("more, note", DAMAGE, ids=range(len(DAMAGE)))
def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path, more, note):
  write(tmp_path, [{"step": 2, "mode": "train", "loss": 1.5}], more=more)
  curves = series.read(tmp_path)
  assert curves.by_name["loss"]["train"].points() == [(2, 1.5)]
  assert [note in text for text in curves.notes] == ([True] if note else [])


def test_nothing_was_logged(tmp_path):
  assert "metrics.jsonl is missing" in series.read(tmp_path).notes[0]
  write(tmp_path, [])
  assert "is empty" in series.read(tmp_path).notes[0]


def test_a_file_of_names_fills_no_memory(tmp_path):
  write(tmp_path, [{"step": i, f"n{i}": 1.0} for i in range(1000)])
  assert len(series.read(tmp_path).by_name) == 400


class EndlessRun:
  """A metrics file that is written while it is read; `seen` looks at what is kept."""

  def __init__(self, count, seen):
    self.count, self.seen, self.step = count, seen, 0

  def readline(self, size):
    if self.step == self.count:
      return b""
    if self.step % 500 == 0:
      self.seen()
    self.step += 1
    record = {"step": self.step, "loss": 9.0 if self.step == 7 else 1 / self.step}
    return (json.dumps(record) + "\n").encode()[:size]


def test_a_long_run_is_thinned_out_while_it_is_read():
  curves, kept = series.Curves(), []

  def look():
    kept.append(sum(len(m["train"].points()) for m in curves.by_name.values()))

  series._read_file(EndlessRun(10_000, look), "metrics.jsonl", curves, 20)
  curve = curves.by_name["loss"]["train"]
  assert len(kept) == 20 and max(kept) <= 2 * 20 + 2
  assert curve.count == 10_000 and Point(7, 9.0) in curve.points()
  assert curve.points()[-1].step == 10_000
