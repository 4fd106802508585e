"""Makes resume_before/: runs cut short by the version before, and how they end there.

Run it with that version, not with this one:

  git worktree add /tmp/before f6bda63
  PYTHONPATH=/tmp/before python tests/golden/make_resume.py

Every job runs in a process of its own, with the settings of tests/world.py. One of them
is killed when step 3 is logged and step 2 saved.
"""

import io
import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

# The settings of today's tests: the version before may have had others.
os.environ |= runpy.run_path(str(pathlib.Path(__file__).parents[1] / "world.py"))[
  "environment"
]()

import numpy as np
import resume_jobs  # beside this file

from tests import toys_text
from tunix.models import safetensors_saver
from tunix.sft.metrics import jsonl as metrics_jsonl

KILLED_AT = 3
INPUTS = resume_jobs.BEFORE / "inputs"
WORDS = " ".join(toys_text.WORDS).split()


def write_inputs() -> None:
  """A tiny model folder and records of the three kinds."""
  tokenizer = toys_text.chat_tokenizer("chatml")
  shutil.rmtree(INPUTS / "model", ignore_errors=True)
  safetensors_saver.save_pretrained(
    resume_jobs.llama(tokenizer.vocab_size),
    INPUTS / "model",
    hf_fields={"eos_token_id": tokenizer.eos_id()},
  )
  tokenizer.save(INPUTS / "model")
  chats, pairs, prompts = [], [], []
  for i in range(16):
    question = f"How many days are in {i} weeks?"
    good, bad = (" ".join(WORDS[i + k :][: 3 + i % 3]) for k in (1, 20))
    user = {"role": "user", "content": question}
    chats.append({"messages": [user, {"role": "assistant", "content": good}]})
    pairs.append({"prompt": question, "chosen": good, "rejected": bad})
    prompts.append({"prompt": [user] if i % 2 else question, "answer": str(7 * i)})
  for name, records in (("chats", chats), ("pairs", pairs), ("prompts", prompts)):
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (INPUTS / f"{name}.jsonl").write_text(lines)


def die_in_the_middle(folder: pathlib.Path) -> None:
  """kill -9 once step KILLED_AT is in the metrics and the step before it saved."""
  log = metrics_jsonl.JsonlBackend.log_scalar

  def log_and_die(self, event, value, **more):
    log(self, event, value, **more)
    if more.get("step") == KILLED_AT:
      self.flush()  # lines behind the checkpoint, which a resumed run takes back
      while resume_jobs.steps(folder) != [resume_jobs.SAVE_EVERY]:
        time.sleep(0.01)
      os.kill(os.getpid(), signal.SIGKILL)

  metrics_jsonl.JsonlBackend.log_scalar = log_and_die


def worker(job: str, place: str) -> None:
  if place == "cut":
    die_in_the_middle(pathlib.Path(place))
  sys.path.append(str(INPUTS))  # the reward function's module
  resume_jobs.JOBS[job](pathlib.Path(place).absolute())


def pack(name: str, folder: pathlib.Path) -> None:
  """A folder as NAME.tar.xz, without times and owners."""

  def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info

  with tarfile.open(resume_jobs.BEFORE / f"{name}.tar.xz", "w:xz") as tar:
    tar.add(folder, arcname=".", filter=plain)


def make(job: str) -> None:
  with tempfile.TemporaryDirectory() as there:
    folder = pathlib.Path(there)
    (folder / "inputs").symlink_to(INPUTS)
    for place, code in (("whole", 0), ("cut", -signal.SIGKILL)):
      argv = [sys.executable, str(pathlib.Path(__file__).absolute()), job, place]
      run = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
      assert run.returncode == code, run.stdout + run.stderr
    end = io.BytesIO()
    np.savez_compressed(end, **resume_jobs.state(folder / "whole"))
    (folder / "cut" / "end.npz").write_bytes(end.getvalue())
    metrics = (folder / "whole" / "logs" / "metrics.jsonl").read_bytes()
    (folder / "cut" / "end.jsonl").write_bytes(metrics)
    pack(job, folder / "cut")


def main() -> None:
  if sys.argv[1:]:
    worker(*sys.argv[1:])
    return
  write_inputs()
  for job in resume_jobs.JOBS:
    make(job)
    print(job, (resume_jobs.BEFORE / f"{job}.tar.xz").stat().st_size)
  text = json.dumps(resume_jobs.environment(), indent=2)
  (resume_jobs.BEFORE / "environment.json").write_text(text + "\n")


if __name__ == "__main__":
  main()
