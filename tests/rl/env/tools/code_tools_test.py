import sys

import pytest

from tunix.rl.env.tools.jail import JailSettings
from tunix.rl.env.tools.python_tool import PythonTool
from tunix.rl.env.tools.shell_tool import ShellTool
from tunix.rl.env.tools.tool import as_tools, call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")


@pytest.fixture(scope="module")
def tools():
  settings = JailSettings(wall_s=20, output_bytes=1000)
  files = {"data.csv": "a,b\n1,2\n"}
  return as_tools([PythonTool(settings, files), ShellTool(settings, files)])


def test_python_prints_with_its_packages_and_files(tools):
  code = "import numpy as np; print(np.ones(3).sum(), open('data.csv').readline())"
  result = call(tools, "python", {"code": code})
  assert (result.text, result.finish) == ("3.0 a,b", "ok")


def test_errors_follow_the_output(tools):
  result = call(tools, "python", {"code": "print(1)\n1/0"})
  assert result.finish == "error"
  lines = result.text.split("\n")
  assert lines[:2] == ["1", "Traceback (most recent call last):"]
  assert lines[-2:] == ["ZeroDivisionError: division by zero", "[error: exit code 1]"]


def test_nothing_is_kept_between_calls(tools):
  assert call(tools, "python", {"code": "x = 1; open('f', 'w')"}).text == "[no output]"
  code = "import os; print('x' in globals(), sorted(os.listdir()))"
  text = call(tools, "python", {"code": code}).text
  assert text == "False ['data.csv', 'main.py']"


def test_the_shell(tools):
  result = call(tools, "shell", '{"command": "cut -d, -f2 data.csv | tail -1; ls"}')
  assert (result.text, result.finish) == ("2\ndata.csv", "ok")
  result = call(tools, "shell", {"command": "echo a; exit 3"})
  assert (result.text, result.finish) == ("a\n[error: exit code 3]", "error")


def test_stops_are_named_in_the_text(tools):
  result = call(tools, "shell", {"command": "yes"})
  assert result.finish == "output_limit"
  assert result.text.endswith("\n[output_limit: it wrote more than 1000 bytes]")


@pytest.mark.parametrize("command", ["a\0b", "a\ud800b", "x" * 200_000])
def test_text_that_no_process_takes_is_an_answer(tools, command):
  assert call(tools, "shell", {"command": command}).finish == "error"
  # The message of the last one has the program, which is longer than the limit.
  finish = call(tools, "python", {"code": command}).finish
  assert finish in ("error", "output_limit")


def test_a_file_with_the_name_of_the_program_is_refused():
  with pytest.raises(ValueError, match=r"main\.py"):
    PythonTool(files={"main.py": ""})
