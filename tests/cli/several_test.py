"""`tunix train` in several processes: one run, which a loss ends by name."""

import json
import os
import pathlib
import random
import shutil
import signal
import time

import numpy as np
import pytest

from tests import processes
from tests.cli import runs
from tunix.cli.main import main

PROGRAM = pathlib.Path(__file__).with_name("several_program.py")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("several")
  runs.write_model(folder / "model")
  runs.write_records(folder / "train.jsonl", 32)
  return folder


def arguments(files, output, **keys):
  values = {
    "model.path": files / "model",
    "data.train": files / "train.jsonl",
    "data.max_length": 64,
    "output_dir": output,
    "mesh": "{fsdp: 8}",
    "training.global_batch_size": 8,
    "training.max_steps": 6,
    "training.learning_rate": 0.01,
    "checkpoint.save_every_n_steps": 2,
    "logging.tensorboard": "false",
    "distributed.timeout_s": 60,
    "distributed.heartbeat_s": 10,
    **keys,
  }
  given = {name: value for name, value in values.items() if value != "null"}
  return ["train", *(f"--{name}={value}" for name, value in given.items())]


def start(files, output, count=2, each=(), delays=(), whole=0, devices=8, **keys):
  """The processes of one run; `each`: further arguments of each of them; `delays`:
  seconds before each of them is started; `whole`: the one that is an interpreter of
  its own, and the others are forks; `devices`: of all of them."""
  port = processes.free_port()
  out = []
  for rank in range(count):
    told = {
      "distributed.coordinator": f"localhost:{port}",
      "distributed.num_processes": count,
      "distributed.process_id": rank,
      **(each[rank] if each else {}),
    }
    words = arguments(files, output, **{**keys, **told})
    time.sleep(delays[rank] if delays else 0)
    out.append(processes.start(PROGRAM, devices // count, *words, fork=rank != whole))
  return out


def ends(*running, within=120):
  """(exit codes, what they said on standard error)."""
  end = time.monotonic() + within
  while time.monotonic() < end and any(p.popen.poll() is None for p in running):
    time.sleep(0.1)
  codes = [process.popen.poll() for process in running]
  for process in running:
    process.popen.kill()
    process.popen.wait()
  return codes, [process.texts()[1] for process in running]


def losses(output):
  lines = (output / "logs" / "metrics.jsonl").read_text().splitlines()
  return [x["loss"] for x in map(json.loads, lines) if x["mode"] == "train"]


def the_best(output):
  return json.loads((output / "result.json").read_text())["best"]


def complaints(error):
  return [line for line in error.splitlines() if line.startswith("tunix: ")]


@pytest.mark.slow
@pytest.mark.ci
def test_two_processes_are_one_run(files, tmp_path):
  """Losses of one process, an export by both, of the best evaluation. One of them is
  killed at a random instant: the other ends by name, and all started again end with the
  same bytes; so does one process on another mesh, up to rounding."""
  one, whole, cut, moved = (tmp_path / x for x in ("one", "whole", "cut", "moved"))
  best = {
    "data.eval": files / "train.jsonl",
    "training.eval_every_n_steps": 2,
    "training.best.patience": 9,
    "export.checkpoint": "best",
  }
  processes.finish(
    processes.start(PROGRAM, 8, *arguments(files, one, **best), fork=True)
  )
  processes.finish(*start(files, whole, **best))
  np.testing.assert_allclose(losses(whole), losses(one), rtol=1e-5)
  assert the_best(one)["step"] == the_best(whole)["step"] is not None
  names = {file.name for file in (whole / "export").glob("*.safetensors")}
  assert len(names) >= 2, "each process writes its part"

  dice = random.Random(3)
  running = start(files, cut, **best)
  while not (cut / "checkpoints" / "2").is_dir():
    time.sleep(0.02)
    assert all(p.popen.poll() is None for p in running)
  victim = dice.randrange(2)
  time.sleep(dice.uniform(0, 0.5))
  os.kill(running[victim].popen.pid, signal.SIGKILL)
  codes, errors = ends(*running, within=120)
  assert codes[1 - victim] is not None, errors
  if codes[1 - victim]:  # it was not over
    # Where a CPU's collective was under way, gloo may end the process in its own words.
    words = ("another task died", "gloo::", "coordination service")
    error = errors[1 - victim]
    assert complaints(error) or any(w in error for w in words), error[-2000:]
  shutil.copytree(cut, moved)
  processes.finish(*start(files, cut, **best))
  assert losses(cut) == losses(whole)
  assert the_best(cut) == the_best(whole)
  for name in names:
    ours, theirs = ((x / "export" / name).read_bytes() for x in (whole, cut))
    assert ours == theirs
  # One process on another mesh: equal up to rounding.
  other = arguments(files, moved, **(best | {"mesh": "{fsdp: 4, tp: 2}"}))
  processes.finish(processes.start(PROGRAM, 8, *other, fork=True))
  np.testing.assert_allclose(losses(moved), losses(whole), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_share_rows_of_pairs(files, tmp_path):
  """DPO on ragged pairs, whose rows each process cuts from the same plan."""
  dice, sizes = random.Random(0), (4, 5, 6, 7, 8, 30)
  words = lambda: " ".join(dice.choices(("sea", "sun", "two"), k=dice.choice(sizes)))
  pairs = [{k: words() for k in ("prompt", "chosen", "rejected")} for _ in range(32)]
  (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs))
  keys = {"job": "dpo", "data.train": tmp_path / "pairs.jsonl", "data.max_length": 128}
  one, two = tmp_path / "one", tmp_path / "two"
  alone = processes.start(PROGRAM, 8, *arguments(files, one, **keys), fork=True)
  processes.finish(alone)
  said = "".join(alone.texts())
  assert "shared by short pairs" in said, said
  processes.finish(*start(files, two, **keys))
  assert len(losses(one)) == 6
  np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)


@pytest.fixture(scope="module")
def undisturbed(files, tmp_path_factory):
  """A run that nobody disturbs, and the seconds that it takes."""
  out, begun = tmp_path_factory.mktemp("undisturbed") / "out", time.monotonic()
  processes.finish(*start(files, out))
  return out, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kills_at_random_instants(seed, undisturbed, files, tmp_path):
  """One of two is killed, twice, wherever it is; the other ends by itself, all are
  started again, and at the end all is as if nothing had been."""
  whole, seconds = undisturbed
  dice = np.random.default_rng(seed)
  for _ in range(2):
    running = start(files, tmp_path)
    time.sleep(dice.uniform(0.2, 1) * seconds)
    running[dice.integers(2)].popen.kill()
    # One that is killed before it has joined is waited for: distributed.timeout_s.
    codes, errors = ends(*running, within=150)
    assert None not in codes, errors
  processes.finish(*start(files, tmp_path))
  parts = ("logs/metrics.jsonl", "export/*.safetensors", "export/config.json")
  for pattern in parts:
    names = sorted(x.relative_to(whole) for x in whole.glob(pattern))
    assert names == sorted(x.relative_to(tmp_path) for x in tmp_path.glob(pattern))
    for name in names:
      assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.ci
def test_a_process_that_hangs_is_named(files, tmp_path):
  # SIGSTOP does not reach a fork.
  running = start(files, tmp_path / "out", whole=1, **{"training.max_steps": 10_000})
  while not (tmp_path / "out" / "checkpoints" / "2").is_dir():
    time.sleep(0.02)
    assert all(p.popen.poll() is None for p in running)
  os.kill(running[1].popen.pid, signal.SIGSTOP)
  codes, errors = ends(running[0], within=60)
  os.kill(running[1].popen.pid, signal.SIGKILL)
  running[1].popen.wait()
  assert codes == [1], (codes, errors)
  assert "process 1 of 2 has not been heard of for 10 s" in errors[0], errors[0][-2000:]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
  ("each", "part"),
  [
    (
      [{}, {"training.learning_rate": 0.02}],
      "configuration: training.learning_rate is '0.01' on process 0 and '0.02'",
    ),
    (
      [{}, {"data.train": "{files}/other.jsonl"}],
      "configuration: data.train is",
    ),
  ],
)
def test_processes_that_differ_are_refused(each, part, files, tmp_path):
  runs.write_records(files / "other.jsonl", 32, start=5)
  each = [{k: str(v).format(files=files) for k, v in one.items()} for one in each]
  codes, errors = ends(*start(files, tmp_path / "out", each=each))
  assert codes == [2, 2], errors
  for error in errors:
    assert part in error, error[-2000:]
    assert len(complaints(error)) == 1 and "Traceback" not in error
  assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_coordinator_that_does_not_answer(files, tmp_path):
  told = {
    "distributed.coordinator": f"localhost:{processes.free_port()}",
    "distributed.num_processes": 2,
    "distributed.process_id": 1,
    "distributed.timeout_s": 1,
  }
  words = arguments(files, tmp_path / "out", **told)
  codes, errors = ends(processes.start(PROGRAM, 4, *words, fork=True))
  assert codes == [1] and len(complaints(errors[0])) == 1, errors
  assert "did not answer within 1 s" in errors[0] and "Traceback" not in errors[0]


def test_others_that_do_not_come(files, tmp_path):
  told = {
    "distributed.coordinator": f"localhost:{processes.free_port()}",
    "distributed.num_processes": 2,
    "distributed.process_id": 0,
    "distributed.timeout_s": 2,
  }
  words = arguments(files, tmp_path / "out", **told)
  codes, errors = ends(processes.start(PROGRAM, 4, *words, fork=True))
  assert codes == [1] and len(complaints(errors[0])) == 1, errors
  assert "process 0 of 2 waited 2 s for the others" in errors[0]


@pytest.mark.parametrize(
  ("keys", "part"),
  [
    (
      {"coordinator": "localhost:1"},
      "num_processes None and process_id None",
    ),
    ({"num_processes": 2}, "coordinator is None, num_processes 2"),
    ({"coordinator": "auto", "process_id": 1}, "or coordinator=auto alone"),
    (
      {"coordinator": "here", "num_processes": 2, "process_id": 0},
      "expected host:port",
    ),
    (
      {"coordinator": "localhost:1", "num_processes": 2, "process_id": 2},
      "process_id is 2 of 2 processes",
    ),
    (
      {"coordinator": "localhost:1", "num_processes": 2, "process_id": 0, "mesh": "{}"},
      "mesh is empty",
    ),
    (
      {
        "coordinator": "localhost:1",
        "num_processes": 2,
        "process_id": 0,
        "heartbeat_s": 2,
      },
      "heartbeat_s is 2",
    ),
  ],
)
def test_settings_that_cannot_be_met(keys, part, files, tmp_path, capsys):
  told = {
    name if name == "mesh" else f"distributed.{name}": value
    for name, value in keys.items()
  }
  assert main(arguments(files, tmp_path / "out", **told)) == 2
  assert part in capsys.readouterr().err


def grpo_keys(files):
  """Writes a reward function; the keys of a run of GRPO."""
  reward = (
    "def short(completions, **_):\n  return [1 / (1 + len(x)) for x in completions]"
  )
  (files / "short_reward.py").write_text(reward + "\n")
  lines = [{"prompt": f"{i} plus 1", "answer": str(i + 1)} for i in range(16)]
  (files / "grpo.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
  return {
    "job": "grpo",
    "data.train": files / "grpo.jsonl",
    "data.max_length": "null",
    "reward.functions": f"{files}/short_reward.py:short",
    "rollout.max_prompt_length": 40,
    "rollout.max_tokens_to_generate": 4,
    "algorithm.num_generations": 4,
    "training.max_steps": 2,
  }


@pytest.mark.slow
def test_a_greedy_run_of_two_processes_is_replayed_by_two(files, tmp_path):
  run, again = tmp_path / "run", tmp_path / "again"
  keys = {"rl.schedule": "greedy", "rollout.engine": "per_process", "mesh": "{fsdp: 2}"}
  processes.finish(*start(files, run, devices=2, **grpo_keys(files), **keys))
  port = processes.free_port()
  words = [
    "replay",
    run,
    f"--to={again}",
    f"--distributed.coordinator=localhost:{port}",
  ]
  both = [
    processes.start(PROGRAM, 1, *words, f"--distributed.process_id={rank}")
    for rank in range(2)
  ]
  processes.finish(*both)
  texts = [process.texts()[0] for process in both]
  assert f"the replay of {run} is equal: step 2" in texts[0]
  assert "is equal" not in texts[1]
  lines = (run / "logs" / "metrics.jsonl").read_text()
  assert lines == (again / "logs" / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("job", ["grpo", "dpo", "distill"])
def test_other_jobs(job, files, tmp_path):
  """Equal metrics of the first step, in one process and in two, and an export. What a
  reference or a teacher said is on disk, in the bytes of one process."""
  said = None
  if job == "grpo":
    keys = grpo_keys(files) | {"algorithm.beta": 0.1}
    lines = [json.loads(line) for line in keys["data.train"].open()]
  elif job == "distill":
    lines = [json.loads(line) for line in (files / "train.jsonl").open()]
    keys = {"distill.teacher": files / "model", "distill.top_k": 3}
    said = "distill.cache"
  else:
    said = "preference.reference_logps"
    lines = [
      {"prompt": f"{i} plus 1", "chosen": str(i + 1), "rejected": "x"}
      for i in range(16)
    ]
    keys = {}
  data = files / f"{job}.jsonl"
  data.write_text("\n".join(map(json.dumps, lines)) + "\n")
  keys |= {"job": job, "data.train": data, "training.max_steps": 2}
  one, two = tmp_path / "one", tmp_path / "two"
  if job != "distill":
    keys["data.max_length"] = "null"
  places = [{} if said is None else {said: tmp_path / f"said{i}"} for i in range(2)]
  words = arguments(files, one, **keys, **places[0])
  processes.finish(processes.start(PROGRAM, 8, *words, fork=True))
  processes.finish(*start(files, two, **keys, **places[1]))
  lines = [(x / "logs" / "metrics.jsonl").read_text().splitlines() for x in (one, two)]
  assert len(lines[0]) == len(lines[1])
  first, other = (json.loads(found[0]) for found in lines)
  for name, value in first.items():
    if isinstance(value, float):
      np.testing.assert_allclose(other[name], value, rtol=1e-3, err_msg=name)
  assert (two / "export" / "config.json").is_file()
  if said is not None:
    written = [
      {file.name: file.read_bytes() for file in (tmp_path / f"said{i}").iterdir()}
      for i in range(2)
    ]
    assert len(written[0]) > 1 and written[0] == written[1]


@pytest.mark.slow
@pytest.mark.ci
def test_an_evaluation_is_shared(files, tmp_path):
  """Rows are dealt out; one process writes what one alone would have written, byte by
  byte. Another file on one of them is named."""
  pairs = files / "pairs.jsonl"
  lines = [{"prompt": f"{i}", "chosen": "a" * i, "rejected": "b"} for i in range(1, 6)]
  pairs.write_text("\n".join(map(json.dumps, lines)) + "\n")
  prompts = files / "prompts.jsonl"
  prompts.write_text("\n".join(json.dumps({"prompt": f"{i}"}) for i in range(5)) + "\n")
  (files / "length_reward.py").write_text(
    "def length(completions):\n  return [float(len(x)) for x in completions]\n"
  )
  words = [
    *("eval", files / "model", "--data", files / "train.jsonl", "--pairs", pairs),
    *("--prompts", prompts, "--reward", f"{files}/length_reward.py:length"),
    *("--num_samples", 2, "--temperature", 1, "--seed", 0, "--max_new_tokens", 4),
    *("--batch_size", 2),
  ]

  def run(count, **each):
    port = processes.free_port()
    told = {"coordinator": f"localhost:{port}", "num_processes": count, "timeout_s": 60}
    return [
      processes.start(
        PROGRAM,
        1,
        *(each.get(str(x), x) if rank else x for x in words),
        *(f"--distributed.{key}={value}" for key, value in told.items()),
        f"--distributed.process_id={rank}",
        fork=rank > 0,
      )
      for rank in range(count)
    ]

  words += ["--out", tmp_path / "one"]
  processes.finish(processes.start(PROGRAM, 1, *words, fork=True))
  words[-1] = tmp_path / "two"
  processes.finish(*run(2))
  for name in ("table.csv", "records.jsonl", "samples.html"):
    one, two = ((tmp_path / x / name).read_bytes() for x in ("one", "two"))
    assert one == two, name
  runs.write_records(files / "else.jsonl", 32, start=5)
  other = {str(files / "train.jsonl"): files / "else.jsonl"}
  codes, errors = ends(*run(2, **other))
  assert codes == [2, 2] and "configuration: data is" in errors[0], errors
