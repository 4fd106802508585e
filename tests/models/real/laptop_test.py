"""docs/guides/laptop.md: each of its commands runs, on fewer records and steps."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import docs_test
from tests.models.real import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.real]

PAGE = docs_test.ROOT / "docs/guides/laptop.md"
DOWNLOADS = ("pip ", "unzip ")  # a test has the extras, and smollm2.py the file
FEW = "reasoning_gym:chain_sum(size=4, max_terms=2, max_digits=2, system=None)"
STEPS = " --training.max_steps=2"
SMALLER = {
  "tunix train examples/real_model/grpo.yaml": f"{STEPS} --data.eval='{FEW}'"
  " --training.eval_batch_size=4",
  "tunix train examples/real_model/sft.yaml": f"{STEPS}"
  " --schedule.args='{warmup_steps: 1}'",
  "tunix train": STEPS,
  "python examples/real_model/tasks.py --model": " --prompts 4",
  "python examples/real_model/pairs.py": " --tickets 16 --held_out 4",
}
SOON = 600  # seconds


def commands() -> list[str]:
  """Returns the commands of the page in its order, inline ones of tunix included."""
  text = PAGE.read_text().replace("\\\n", " ")
  found = re.findall(r"^```text\n(.*?)^```|`(tunix [^`]*)`", text, re.M | re.S)
  lines = [line for block, inline in found for line in (block or inline).splitlines()]
  return [line for line in lines if not line.startswith(DOWNLOADS)]


def test_every_command_of_the_page(tmp_path):
  for package in ("gguf", "reasoning_gym"):
    pytest.importorskip(package)
  try:
    file = smollm2.file()
  except smollm2.Missing as error:
    pytest.skip(str(error))
  (tmp_path / "smollm2").mkdir()
  (tmp_path / "smollm2" / file.name).symlink_to(file)
  (tmp_path / "examples").symlink_to(docs_test.EXAMPLES)
  path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
  ran = commands()
  assert len(ran) >= 15
  for line in ran:
    more = next((more for start, more in SMALLER.items() if line.startswith(start)), "")
    done = subprocess.run(
      line + more,
      shell=True,
      cwd=tmp_path,
      env=docs_test.ENVIRONMENT | {"PATH": path},
      input="Hello\n",  # for the chat
      capture_output=True,
      text=True,
      timeout=SOON,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
    for held_out in tmp_path.glob("*/held_out.jsonl"):
      records = held_out.read_text().splitlines(keepends=True)
      held_out.write_text("".join(records[:4]))
  assert list((tmp_path / "gguf").glob("*.gguf"))
