"""Loss curves become a PNG of the right shape that depends on the numbers."""

import struct

import pytest

from tunix.examples.quickstart.plots import Curve, save_curves


def curve(height: float) -> Curve:
  return Curve(
    title="a stage",
    train=[(step, height / step) for step in range(1, 20)],
    held_out=[(0, height), (19, 1.0)],
  )


def size(path) -> tuple[int, int]:
  data = path.read_bytes()
  assert data[:8] == b"\x89PNG\r\n\x1a\n"
  return struct.unpack(">II", data[16:24])


def test_one_panel_a_curve(tmp_path):
  one, two, other = (tmp_path / f"{name}.png" for name in ("one", "two", "other"))
  save_curves(one, [curve(5.0)])
  save_curves(two, [curve(5.0), curve(3.0)])
  save_curves(other, [curve(4.0)])
  assert size(two) == (2 * size(one)[0], size(one)[1])
  assert other.read_bytes() != one.read_bytes()


def test_nothing_to_draw_is_refused(tmp_path):
  with pytest.raises(ValueError, match="no curves"):
    save_curves(tmp_path / "x.png", [])
  with pytest.raises(ValueError, match="'empty' has no points"):
    save_curves(tmp_path / "x.png", [Curve(title="empty", train=[], held_out=[])])
