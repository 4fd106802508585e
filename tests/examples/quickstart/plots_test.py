"""Loss curves become a PNG of the right shape that depends on the numbers."""

import struct

from tunix.examples.quickstart.plots import save_curves


def curve(height: float):
  steps = [(step, height / step) for step in range(1, 20)]
  return {"train": steps, "eval": [(0, height), (19, 1.0)]}


LABELS = {"a": ("a stage", "loss"), "b": ("another", "reward")}


def size(path) -> tuple[int, int]:
  data = path.read_bytes()
  assert data[:8] == b"\x89PNG\r\n\x1a\n"
  return struct.unpack(">II", data[16:24])


def test_one_panel_a_curve(tmp_path):
  one, two, other = (tmp_path / f"{name}.png" for name in ("one", "two", "other"))
  save_curves(one, {"a": curve(5.0)}, LABELS)
  save_curves(two, {"a": curve(5.0), "b": curve(3.0)}, LABELS)
  save_curves(other, {"a": curve(4.0)}, LABELS)
  assert size(two) == (2 * size(one)[0], size(one)[1])
  assert other.read_bytes() != one.read_bytes()
