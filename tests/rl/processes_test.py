"""RL over several processes learns what it learns in one, and goes on in any number."""

import json
import pathlib

import numpy as np
import pytest

from tests import processes
from tests.rl import process_programs

PROGRAM = pathlib.Path(process_programs.__file__)


def together(count, folder, job, *what, devices=8):
  """Several processes, or this one: its programs are compiled and traced once."""
  folder.mkdir(exist_ok=True)
  if count == 1:
    return process_programs.do(job, folder, what, devices)
  port, devices = processes.free_port(), devices // count
  arguments = (port, count, folder, job, *what)
  processes.finish(
    *(
      processes.start(PROGRAM, devices, rank, *arguments, fork=rank > 0)
      for rank in range(count)
    ),
    timeout=600,
  )


def equal(a, b):
  a, b = np.load(a), np.load(b)
  for name in a.files:
    gap = np.linalg.norm(a[name] - b[name]) / np.linalg.norm(a[name])
    assert gap < 1e-5, (name, gap)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "count"),
  [
    pytest.param("grpo", 2, marks=pytest.mark.ci),
    ("grpo", 4),
    ("ppo", 2),
    ("ppo", 4),
  ],
)
def test_processes_learn_what_one_learns(job, count, tmp_path):
  one, many = tmp_path / "one", tmp_path / "many"
  together(1, one, job, "whole")
  more = ["roles", "local"] if (job, count) == ("grpo", 2) else []
  together(count, many, job, "whole", "cut", "different_prompts", *more)
  equal(one / "weights.npz", many / "weights.npz")
  rows = [int((many / f"rows-{rank}").read_text()) for rank in range(count)]
  assert all(rows), "every process computes rewards"
  assert sum(rows) == int((one / "rows-0").read_text()), "each of them once"
  lines = [(x / "whole" / "metrics.jsonl").read_text().count("\n") for x in (one, many)]
  assert lines[0] == lines[1], "one process writes the metrics"
  # What several processes saved, one goes on from.
  together(1, many, job, "from_half")
  equal(one / "weights.npz", many / "half.npz")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "what"),
  [
    pytest.param("engines-lagged-env", ["whole"], marks=pytest.mark.ci),
    ("engines-env", ["whole", "cut"]),
    ("engines-lagged", ["whole", "cut"]),
    ("engines", ["whole", "cut", "refused"]),
    ("hosts-lagged-env", ["whole", "cut"]),
    ("hosts", ["whole"]),
  ],
)
def test_engines_of_processes_draw_what_one_engine_draws(job, what, tmp_path):
  one, many = tmp_path / "one", tmp_path / "many"
  together(1, one, job.replace("hosts", "engines"), "whole", devices=2)
  together(2, many, job, *what, devices=2)
  texts = json.loads((one / "texts-0.json").read_text())
  assert len(texts) == 64
  for rank in range(2):  # each process has all completions
    assert json.loads((many / f"texts-{rank}.json").read_text()) == texts
  equal(one / "weights.npz", many / "weights.npz")
  failed = [
    sum(line.get("rewards/failed", 0.0) for line in metrics(folder))
    for folder in (one, many)
  ]
  assert failed[0] == failed[1] and bool(failed[0]) == ("env" in job)
  waited = "perf/exchange_wait_sec"
  assert not any(waited in line for line in metrics(one, "timings"))
  assert any(waited in line for line in metrics(many, "timings"))


@pytest.mark.slow
@pytest.mark.parametrize(
  "places", [pytest.param("engines", marks=pytest.mark.ci), "hosts"]
)
def test_greedy_engines_of_processes_are_replayed(places, tmp_path):
  together(2, tmp_path, f"{places}-greedy-env", "replayed", devices=2)
  journals = sorted(tmp_path.glob("cut/checkpoints/journal/*"))
  assert [x.name for x in journals] == ["process_0", "process_1"]
  together(1, tmp_path, f"{places}-greedy-env", "is_of_several", devices=2)


def metrics(folder, name="metrics"):
  lines = (folder / "whole" / f"{name}.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]
