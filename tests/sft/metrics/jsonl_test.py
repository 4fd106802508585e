import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tunix.sft.metrics import jsonl as metrics_jsonl
from tunix.sft.metrics.jsonl import JsonlBackend, read_jsonl


def log_step(backend, step):
  """What a trainer logs: step - 1 comes home late, evaluation every third step."""
  if step > 0:
    late = step - 1
    backend.log_scalar("train/loss", 1 / (late + 3), step=late)
    backend.log_scalar("train/perplexity", math.exp(1 / (late + 3)), step=late)
    backend.log_scalar("train/step_time_sec", 0.25, step=late)
  if step % 3 == 0:
    backend.log_scalar("eval/loss", 1 / (step + 7), step=step)


def uninterrupted(folder, steps=range(20)):
  backend = JsonlBackend(folder)
  for step in steps:
    log_step(backend, step)
  backend.close()
  return (folder / "metrics.jsonl").read_bytes()


def test_one_line_per_step_and_mode_in_logging_order(tmp_path):
  backend = JsonlBackend(tmp_path)
  backend.log_scalar("train/loss", 2.5, step=1)
  backend.log_scalar("eval/loss", 3.5, step=1)
  backend.log_scalar("train/step_time_sec", 0.125, step=1)
  backend.log_scalar("train/grad_norm", np.float32(0.1), step=1)
  backend.log_scalar("actor/train/tokens", 4096, step=2)
  backend.close()
  assert (tmp_path / "metrics.jsonl").read_text() == (
    '{"step": 1, "mode": "train", "loss": 2.5, "grad_norm": 0.10000000149011612}\n'
    '{"step": 1, "mode": "eval", "loss": 3.5}\n'
    '{"step": 2, "mode": "train", "actor/tokens": 4096}\n'
  )
  assert (tmp_path / "timings.jsonl").read_text() == (
    '{"step": 1, "mode": "train", "step_time_sec": 0.125}\n'
  )


def test_floats_round_trip_and_non_finite_values_are_valid_json(tmp_path):
  values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf]
  backend = JsonlBackend(tmp_path)
  for step, value in enumerate([*values, math.nan]):
    backend.log_scalar("train/loss", value, step=step)
  backend.close()

  def refuse(name):
    raise AssertionError(f"{name} is no JSON")

  for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
    json.loads(line, parse_constant=refuse)
  read = [record["loss"] for record in read_jsonl(tmp_path / "metrics.jsonl")]
  assert list(map(repr, read)) == list(map(repr, [*values, math.nan]))


def test_lines_do_not_depend_on_when_values_of_a_step_come(tmp_path):
  """A checkpoint may bring step 3 home before its evaluation, or a hook log early."""
  orders = (
    [("eval", 3, 1), ("train", 3, 2), ("train", 4, 3)],
    [("train", 3, 2), ("eval", 3, 1), ("train", 4, 3)],
    [("train", 3, 2), ("train", 4, 3), ("eval", 3, 1)],
  )
  contents = []
  for number, order in enumerate(orders):
    backend = JsonlBackend(tmp_path / str(number))
    for mode, step, value in order:
      backend.log_scalar(f"{mode}/loss", value, step=step)
    backend.close()
    contents.append((tmp_path / str(number) / "metrics.jsonl").read_bytes())
  assert contents[0] == contents[1] == contents[2]


def test_two_counters_in_one_log_keep_their_lines_whole(tmp_path):
  backend = JsonlBackend(tmp_path)
  for step in range(4):
    for name in ("loss", "grad_norm"):
      backend.log_scalar(f"actor/train/{name}", step, step=100 + step)
    for name in ("rewards", "length"):
      backend.log_scalar(f"train/{name}", step, step=step)
  backend.close()
  lines = read_jsonl(tmp_path / "metrics.jsonl")
  assert len(lines) == 8 and all(len(line) == 4 for line in lines)


def test_a_late_value_gets_its_own_line(tmp_path):
  backend = JsonlBackend(tmp_path)
  for step in (1, 2, 3, 1):
    backend.log_scalar("train/loss", float(step), step=step)
  backend.close()
  steps = [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
  assert sorted(steps) == [1, 1, 2, 3]


@pytest.mark.parametrize("saved", [0, 1, 5, 6, 12])
@pytest.mark.parametrize("died", [13, 20])
@pytest.mark.parametrize("tail", [b"", b'{"step": 99, "mo'], ids=["whole", "cut line"])
@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, saved, died, tail, closed):
  """Saved after `saved` steps, killed in step `died`, resumed in a new process."""
  expected = uninterrupted(tmp_path / "expected")
  folder = tmp_path / "run"
  first = JsonlBackend(folder)
  for step in range(saved):
    log_step(first, step)
  position = json.loads(json.dumps(first.position(), allow_nan=False))
  for step in range(saved, died):
    log_step(first, step)
  if closed:
    first.close()
  with open(folder / "metrics.jsonl", "ab") as file:
    file.write(tail)

  second = JsonlBackend(folder)
  second.rewind(position)
  for step in range(saved, 20):
    log_step(second, step)
  second.close()
  assert (folder / "metrics.jsonl").read_bytes() == expected
  timings = [line["step"] for line in read_jsonl(folder / "timings.jsonl")]
  assert timings == list(range(19))


def test_kill_9_in_the_middle_leaves_a_file_that_resumes_to_the_same_bytes(tmp_path):
  expected = uninterrupted(tmp_path / "expected", range(200))
  folder = tmp_path / "run"
  program = textwrap.dedent(
    f"""
    import json, sys
    sys.path[:0] = {[os.path.dirname(__file__), os.getcwd()]!r}
    from jsonl_test import log_step
    from tunix.sft.metrics.jsonl import JsonlBackend
    backend = JsonlBackend({str(folder)!r})
    for step in range(200):
      if step == 120:
        print(json.dumps(backend.position()), flush=True)
      if step == 170:
        print("far enough", flush=True)
        sys.stdin.read()  # until killed
      log_step(backend, step)
    """
  )
  child = subprocess.Popen(
    [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE
  )
  assert child.stdout is not None
  position = json.loads(child.stdout.readline())
  assert child.stdout.readline() == b"far enough\n"
  child.send_signal(signal.SIGKILL)
  child.wait()
  child.stdout.close()
  child.stdin.close()
  assert (folder / "metrics.jsonl").stat().st_size > position["metrics.jsonl"]["bytes"]

  backend = JsonlBackend(folder)
  backend.rewind(position)
  for step in range(120, 200):
    log_step(backend, step)
  backend.close()
  assert (folder / "metrics.jsonl").read_bytes() == expected


def test_position_does_not_change_the_file(tmp_path):
  backend = JsonlBackend(tmp_path / "asked")
  for step in range(20):
    log_step(backend, step)
    backend.position()
  backend.close()
  asked = (tmp_path / "asked" / "metrics.jsonl").read_bytes()
  assert asked == uninterrupted(tmp_path / "not asked")


def test_a_position_beyond_the_file_warns_and_names_it(tmp_path, caplog):
  backend = JsonlBackend(tmp_path)
  for step in range(10):
    log_step(backend, step)
  position = backend.position()
  backend.close()
  path = tmp_path / "metrics.jsonl"
  os.truncate(path, 100)
  with caplog.at_level(logging.WARNING):
    backend.rewind(position)
  assert str(path) in caplog.text and "100 bytes" in caplog.text
  backend.log_scalar("train/loss", 1.0, step=30)
  backend.close()
  steps = [line["step"] for line in read_jsonl(path)]
  assert steps == [0, 8, 9, 30]  # 8 and 9 waited in the position


def test_a_file_changed_since_is_cut_at_a_line_end(tmp_path, caplog):
  backend = JsonlBackend(tmp_path)
  for step in range(10):
    log_step(backend, step)
  position = backend.position()
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b"#" + path.read_bytes())
  backend.rewind(position)
  assert "was changed" in caplog.text
  assert path.read_bytes().endswith(b"}\n")


def test_a_run_from_the_beginning_moves_old_files_aside(tmp_path, caplog):
  old = uninterrupted(tmp_path)
  for expected in ("metrics.jsonl.1", "metrics.jsonl.2"):
    backend = JsonlBackend(tmp_path)
    backend.rewind(None)
    assert expected in caplog.text
    assert (tmp_path / expected).read_bytes() == old
    assert not (tmp_path / "metrics.jsonl").exists()
    for step in range(20):
      log_step(backend, step)
    backend.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == old
  assert (tmp_path / "timings.jsonl.2").exists()


def test_an_empty_folder_has_nothing_to_move(tmp_path, caplog):
  (tmp_path / "metrics.jsonl").touch()
  JsonlBackend(tmp_path).rewind(None)
  assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
  assert not caplog.records


def test_appending_after_a_kill_drops_the_cut_line(tmp_path):
  (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2}\n{"step": 2, "lo')
  backend = JsonlBackend(tmp_path)
  backend.log_scalar("loss", 1.5, step=2)
  backend.close()
  assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_lines_longer_than_a_block_are_found(tmp_path):
  long = b'{"step": 1, "x": "' + b"x" * 200_000 + b'"}\n'
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(long + long[:-10])
  backend = JsonlBackend(tmp_path)
  backend.rewind({"metrics.jsonl": {"bytes": 2 * len(long), "open": []}})
  assert path.read_bytes() == long


def test_other_volatile_names(tmp_path):
  backend = JsonlBackend(tmp_path, volatile={"clock"})
  backend.log_scalar("train/clock", 1.0, step=0)
  backend.log_scalar("train/mfu", 0.5, step=0)
  backend.close()
  assert read_jsonl(tmp_path / "timings.jsonl") == [
    {"step": 0, "mode": "train", "clock": 1.0}
  ]
  assert "mfu" in read_jsonl(tmp_path / "metrics.jsonl")[0]


def test_a_volatile_part_of_the_name_is_enough(tmp_path):
  backend = JsonlBackend(tmp_path)
  backend.log_scalar("actor/train/perf/sync", 1.0, step=0)
  backend.close()
  assert not (tmp_path / "metrics.jsonl").exists()
  assert "perf" in metrics_jsonl.VOLATILE


def test_a_url_is_refused():
  with pytest.raises(ValueError, match=r"gs://bucket/logs.*backend_factories"):
    JsonlBackend("gs://bucket/logs")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
  (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
  backend = JsonlBackend(tmp_path)
  with pytest.raises(OSError, match=r"cannot write metrics.*metrics\.jsonl"):
    for step in range(5):
      backend.log_scalar("train/loss", 1.0, step=step)


def test_reading_names_a_broken_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\nnonsense\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
    read_jsonl(path)
