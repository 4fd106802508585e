"""The ten commands of the guide, as a new user types them."""

import pathlib
import re
import shlex
import socket
import subprocess
import sys

import pytest

from tests import forks
from tests.cli import runs

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "tinker.md"


def blocks():
  found = re.findall(r"^```text\n(.*?)^```", GUIDE.read_text("utf-8"), re.M | re.S)
  commands, program = found[:2]
  return commands, program


def test_the_ten_commands(tmp_path):
  pytest.importorskip("tinker")
  commands, program = blocks()
  assert len(re.findall(r"^\w", commands.replace("; ", "\n"), re.M)) == 11
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  first, rest = commands.split("\n", 1)
  assert first.startswith("pip install")
  python = shlex.quote(sys.executable)
  # 134: the SDK's threads may abort while the interpreter ends. What the
  # program made is checked below.
  rest = rest.replace("8000", str(port)).replace(
    "python train.py", f"{python} train.py || [ $? = 134 ]"
  )
  rest = re.sub(r"^tunix ", f"{forks.shared().shim} ", rest, flags=re.M)
  (tmp_path / "train.py").write_text(program)
  runs.write_model(tmp_path / "my-model")
  done = subprocess.run(
    ["bash", "-euo", "pipefail", "-c", "trap 'kill %1; wait' EXIT\n" + rest],
    cwd=tmp_path,
    input="The sea\n",
    capture_output=True,
    text=True,
    timeout=400,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
  losses = [float(x.split()[1]) for x in re.findall(r"^\d+ .*", done.stdout, re.M)]
  assert len(losses) == 20 and losses[-1] < losses[0]
