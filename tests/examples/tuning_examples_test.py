"""examples/sft.py, lora.py and qlora.py, in a small size, as their readers run them."""

import re

import pytest

from tests.examples import loading


def run(name, folder, steps, monkeypatch, capsys):
  """What the example prints, and (before, after) of its held-out loss."""
  argv = [name, "--output", str(folder), "--steps", str(steps)]
  monkeypatch.setattr("sys.argv", argv)
  loading.example(name).main()
  out = capsys.readouterr().out
  losses = re.search(r"held-out loss (\S+) -> (\S+)", out)
  assert losses is not None, out
  return out, float(losses[1]), float(losses[2])


def test_fine_tuning_learns_and_goes_on(tmp_path, monkeypatch, capsys):
  _, first, last = run("sft", tmp_path, 10, monkeypatch, capsys)
  assert last < first - 0.5
  _, _, later = run("sft", tmp_path, 20, monkeypatch, capsys)
  assert later < last
  assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.fixture
def taught(tmp_path, monkeypatch, capsys):
  """Enough steps for the base to answer, and for the adapters."""
  return lambda name: run(name, tmp_path, 20, monkeypatch, capsys)


def test_adapters_change_the_habit_and_not_the_base(taught, tmp_path):
  out, first, last = taught("lora")
  assert last < 0.3 * first
  shares = {
    name: (int(ordered), int(stands))
    for name, ordered, stands in re.findall(
      r"^(\w+) +sorted +(\d+)% +unchanged +(\d+)%", out, re.M
    )
  }
  assert shares["base"][0] > 80 and shares["base"][1] < 20
  assert shares["adapted"][1] > 80 and shares["adapted"][0] < 20
  assert shares["adapted"] == shares["loaded"] == shares["merged"]
  assert "11 of the base's 11 arrays are shared" in out
  assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_four_bits_are_a_seventh_and_can_be_taught(taught):
  out, first, last = taught("qlora")
  sizes = [int(x.replace(",", "")) for x in re.findall(r"layers +([\d,]+) bytes", out)]
  assert sizes[1] < sizes[0] / 6
  assert last < 0.3 * first


@pytest.mark.parametrize("name", ["sft", "lora", "qlora", "sharding"])
def test_examples_stay_short(name):
  path = loading.EXAMPLES / f"{name}.py"
  assert len(path.read_text().splitlines()) <= 120
