"""Folders of the version before this one go on, to where that version would have come.

`make_resume.py` made them. Where everything is as it was there that bits depend on
(JAX, the processor, XLA's flags), the bytes are the same; elsewhere programs round
differently, and the numbers agree to TOLERANCE.
"""

import json
import pathlib
import shutil
import tarfile

import numpy as np
import pytest

from tests.golden import resume_jobs

TOLERANCE = 1e-6  # norm of the difference over the norm, array by array
# Metrics that the version before did not log.
NEW = {"rewards/score/prompt_p25", "rewards/score/prompt_p75", "actor/parity/kl"}
CUT_AFTER = resume_jobs.SAVE_EVERY


def unpack(job: str, folder: pathlib.Path) -> pathlib.Path:
  with tarfile.open(resume_jobs.BEFORE / f"{job}.tar.xz") as tar:
    # Python 3.11.2 has no filters.
    tar.extraction_filter = getattr(tarfile, "data_filter", None)
    tar.extractall(folder / "out")
  shutil.copytree(resume_jobs.BEFORE / "inputs", folder / "inputs")
  return folder / "out"


def same_environment() -> bool:
  recorded = json.loads((resume_jobs.BEFORE / "environment.json").read_text())
  return recorded == resume_jobs.environment()


def lines(data: bytes) -> list[dict]:
  return [json.loads(line) for line in data.decode().splitlines()]


def assert_close(found, expected, where=""):
  found, expected = np.float64(found), np.float64(expected)
  error = np.linalg.norm(found - expected)
  assert error <= TOLERANCE * max(np.linalg.norm(expected), TOLERANCE), where


def assert_same_end(folder: pathlib.Path, *, exact: bool) -> None:
  """What the run left is what `make_resume.py` saw the version before leave."""
  state = resume_jobs.state(folder)
  found = lines((folder / "logs" / "metrics.jsonl").read_bytes())
  found = [{name: line[name] for name in line if name not in NEW} for line in found]
  expected_lines = lines((folder / "end.jsonl").read_bytes())
  with np.load(folder / "end.npz") as file:
    expected = {name: file[name] for name in file}
  assert state.keys() == expected.keys()
  for name, value in expected.items():
    assert state[name].dtype == value.dtype and state[name].shape == value.shape, name
    if exact:
      assert state[name].tobytes() == value.tobytes(), f"{name} differs in its bytes"
    else:
      assert_close(state[name], value, name)
  if exact:  # the text of a float stands for one number
    assert found == expected_lines
    return
  assert len(found) == len(expected_lines)
  for a, b in zip(found, expected_lines):
    assert a.keys() == b.keys() and (a["mode"], a["step"]) == (b["mode"], b["step"])
    for name in a.keys() - {"mode"}:
      np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("job", resume_jobs.JOBS)
def test_a_folder_of_before_goes_on_to_the_same_end(tmp_path, job, monkeypatch):
  folder = unpack(job, tmp_path)
  monkeypatch.chdir(tmp_path)  # the YAML files name their inputs from there
  monkeypatch.syspath_prepend(tmp_path / "inputs")  # the reward function's module
  assert resume_jobs.steps(folder) == [CUT_AFTER]
  cut = lines((folder / "logs" / "metrics.jsonl").read_bytes())
  assert max(line["step"] for line in cut) > CUT_AFTER, "nothing is behind the save"
  resume_jobs.JOBS[job](folder)
  assert resume_jobs.steps(folder)[-1] == resume_jobs.STEPS
  timings = lines((folder / "logs" / "timings.jsonl").read_bytes())
  assert sorted({x["step"] for x in timings if x["mode"] == "train"}) == [*range(1, 7)]
  assert_same_end(folder, exact=same_environment())


@pytest.mark.parametrize("what", ["parameter", "metric"])
def test_the_check_sees_one_bit(tmp_path, what):
  folder = unpack("sft", tmp_path)
  metrics = bytearray((folder / "end.jsonl").read_bytes())
  state = resume_jobs.state(folder)
  np.savez(folder / "end.npz", **state)
  (folder / "logs" / "metrics.jsonl").write_bytes(metrics)
  assert_same_end(folder, exact=True)
  if what == "parameter":
    name = max(state, key=lambda name: state[name].nbytes)
    changed = bytearray(state[name].tobytes())
    changed[0] ^= 1
    state[name] = np.frombuffer(changed, state[name].dtype).reshape(state[name].shape)
    np.savez(folder / "end.npz", **state)
  else:
    # The first decimal of the last number: its last one may not change the float.
    metrics[metrics.rfind(b".") + 1] ^= 1
    (folder / "end.jsonl").write_bytes(metrics)
  with pytest.raises(AssertionError):
    assert_same_end(folder, exact=True)
