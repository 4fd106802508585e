import logging
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from tests.sandbox import hostile
from tunix.sandbox.jail import Jail, JailSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
ROOT = pathlib.Path(__file__).parents[2]
MEMORY = 400 << 20


def run(code, jail=None, **settings):
  defaults = {"wall_s": 20.0, "memory_bytes": MEMORY, "workers": 4}
  jail = jail or Jail(JailSettings(**defaults | settings))
  argv = [sys.executable, "-s", "-P", "main.py"]
  return jail.run(argv, files={"main.py": code})


@pytest.fixture(scope="module")
def protections():
  return Jail().protections()


def test_a_program_runs_with_files_and_input():
  jail = Jail()
  code = "import sys; print(open('data/a.txt').read() + sys.stdin.read())"
  argv = [sys.executable, "-c", code]
  result = jail.run(argv, stdin="é\0", files={"data/a.txt": "ü"})
  assert (result.finish, result.stdout, result.exit_code) == ("ok", "üé\0\n", 0)
  assert result.text() == "üé\0"


def test_an_exception_has_the_same_text_in_each_call():
  one, two = run("import nothing"), run("import nothing")
  assert (one.finish, one.reason, one.exit_code) == ("error", "exit code 1", 1)
  assert one.stderr == two.stderr
  assert "ModuleNotFoundError" in one.text()
  assert one.text().endswith("[error: exit code 1]")


def test_hash_order_is_the_same_in_each_call():
  code = "print({'a', 'b', 'c', 'd'}, hash('x'))"
  assert run(code).stdout == run(code).stdout


def test_a_loop_without_end_is_stopped():
  start = time.monotonic()
  result = run("print('begun', flush=True)\nwhile True: pass", wall_s=0.5)
  assert (result.finish, result.stdout) == ("timeout", "begun\n")
  assert "0.5 s" in result.reason
  assert time.monotonic() - start < 5


def test_processor_time_is_limited():
  result = run("while True: pass", cpu_s=1)
  assert result.finish == "timeout"
  assert "processor" in result.reason


def test_an_allocation_of_10_gb_fails():
  result = run("x = bytearray(10 << 30)")
  assert (result.finish, result.exit_code) == ("memory", 1)


def test_memory_of_all_processes_is_limited():
  # Six processes of 100 MiB each have more than 400 MiB, and each of them has less.
  code = """
import os, time
for _ in range(6):
  if os.fork() == 0:
    x = b"x" * (100 << 20)
    time.sleep(30)
time.sleep(30)
"""
  result = run(code)
  assert result.finish == "memory", result
  assert "its processes" in result.reason


def test_1_gb_of_output_is_cut():
  code = """
import sys
for _ in range(1024):
  sys.stdout.write("x" * (1 << 20))
"""
  result = run(code, output_bytes=1000)
  assert (result.finish, result.stdout) == ("output_limit", "x" * 1000)
  assert result.seconds < 5


def test_both_outputs_share_the_limit():
  code = "import sys; print('a' * 600, flush=True); print('b' * 600, file=sys.stderr)"
  result = run(code, output_bytes=1000)
  assert result.finish == "output_limit"
  assert len(result.stdout + result.stderr) == 1000


def test_bytes_that_are_no_text_are_replaced():
  result = run("import sys; sys.stdout.buffer.write(b'\\xff\\x00a')")
  assert (result.finish, result.stdout) == ("ok", "\ufffd\0a")


def test_a_program_that_kills_itself():
  result = run("import os; os.kill(os.getpid(), 9)")
  assert (result.finish, result.exit_code) == ("killed", -9)
  assert "SIGKILL" in result.reason


@pytest.mark.parametrize("victim", ["os.getppid()", "1", "-1"])
def test_a_program_that_kills_others_ends_only_its_call(victim, protections):
  if "processes" not in protections:
    pytest.skip("the system gives no process namespace")
  code = f"import os; print('a', flush=True); os.kill({victim}, 9); print('b')"
  result = run(code)
  assert result.stdout.startswith("a\n")
  assert result.finish in ("ok", "killed", "error")
  assert run("print(1)").stdout == "1\n"


# Bounded, so that a jail without limits fails the test and not the machine.
FORKS = """
import os, time
for _ in range(150):
  if os.fork() == 0:
    time.sleep(60)
time.sleep(60)
"""


def test_forks_are_limited():
  result = run(FORKS, processes=8)
  assert result.finish in ("error", "killed"), result
  assert "BlockingIOError" in result.stderr or "8 processes" in result.reason


def test_a_fork_bomb_is_bounded(protections):
  if "user" not in protections:
    pytest.skip("the system gives no user of its own, so the kernel limits no forks")
  start = time.monotonic()
  result = run("import os\nwhile True: os.fork()", processes=8, wall_s=1)
  assert result.finish != "ok"
  assert time.monotonic() - start < 5


DAEMON = """
import os, subprocess, sys
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    os.execv("/bin/sleep", ["sleep", sys.argv[1]])
  os._exit(0)
os.wait()
print("done")
"""


def test_a_daemon_does_not_outlive_its_call():
  mark = f"86.{os.getpid()}"
  argv = [sys.executable, "-c", DAEMON, mark]
  result = Jail().run(argv)
  assert (result.finish, result.stdout) == ("ok", "done\n")
  assert not hostile.is_running(mark)


def test_the_scratch_folder_and_its_files_are_gone(monkeypatch):
  made, make = [], tempfile.mkdtemp
  monkeypatch.setattr(tempfile, "mkdtemp", lambda *a: made.append(make(*a)) or made[-1])
  code = "import os; os.mkdir('a'); open('a/b', 'w').write('x'); os.chmod('a', 0)"
  assert run(code).finish == "ok"
  assert "tunix-jail-" in made[0]
  assert not any(os.path.lexists(path) for path in made)


def test_files_are_limited(protections):
  result = run("open('a', 'wb').write(bytes(2 << 20))", file_bytes=1 << 20)
  assert "File too large" in result.stderr
  if "files" in protections:
    code = "for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))"
    result = run(code, disk_bytes=4 << 20)
    assert "No space left" in result.stderr


def test_the_network_is_refused(protections):
  if "network" not in protections:
    pytest.skip("the system gives neither a network namespace nor a filter of calls")
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
    assert run(code).finish == "error"
    assert run(code, network=True).finish == "ok"


def test_secrets_of_the_trainer_are_out_of_sight(monkeypatch, tmp_path, protections):
  if not {"files", "user"} <= set(protections):
    pytest.skip("the system gives no root of its own")
  secret = tmp_path / "secret"
  secret.write_text("key-1234")
  monkeypatch.setenv("TOKEN", "key-1234")
  code = f"""
import os, pathlib
seen = [repr(os.environ)]
for path in [*pathlib.Path("/proc").glob("*/environ"), pathlib.Path({str(secret)!r})]:
  try:
    seen.append(path.read_text())
  except OSError:
    pass
print("key-1234" in "".join(seen))
for path in ("/usr/x", "/x", {str(tmp_path / "x")!r}):
  try:
    open(path, "w")
  except OSError as error:
    print(error.errno)
"""
  result = run(code)
  # EROFS twice; the folder does not exist in the jail.
  assert result.stdout == "False\n30\n30\n2\n", result
  assert secret.read_text() == "key-1234"


def test_a_readable_folder_can_be_read_only(tmp_path, protections):
  if "files" not in protections:
    pytest.skip("the system gives no root of its own")
  tmp_path.chmod(0o755)
  (tmp_path / "a").write_text("hello")
  code = (
    f"print(open({str(tmp_path / 'a')!r}).read()); open({str(tmp_path / 'b')!r}, 'w')"
  )
  result = run(code, readable=(str(tmp_path),))
  assert result.stdout == "hello\n"
  assert "Read-only" in result.stderr or "Permission denied" in result.stderr
  assert not (tmp_path / "b").exists()


def test_a_program_that_does_not_exist():
  result = Jail().run(["/bin/no-such-program"])
  assert result.finish == "error"
  assert "/bin/no-such-program cannot be started" in result.reason


def test_calls_wait_for_a_place():
  jail = Jail(JailSettings(workers=2))
  ends = []

  def call():
    # The wait for a place is no part of the limit of the wall clock.
    result = jail.run(["/bin/sleep", "0.2"])
    ends.append((result.finish, result.seconds < 5))

  threads = [threading.Thread(target=call) for _ in range(5)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert ends == [("ok", True)] * 5


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"wall_s": 0}, "wall_s is 0"),
    ({"wall_s": float("nan")}, "wall_s is nan"),
    ({"memory_bytes": 0}, "memory_bytes is 0"),
    ({"workers": -1}, "workers is -1"),
    ({"require": ("fire",)}, "require has"),
    ({"readable": ("data",)}, "absolute"),
  ],
)
def test_settings_are_checked(settings, message):
  with pytest.raises(ValueError, match=message):
    JailSettings(**settings)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0"])
def test_files_stay_in_the_working_folder(name):
  with pytest.raises(ValueError, match="files has"):
    Jail().run(["/bin/true"], files={name: "x"})


# The program refuses calls of the system to itself, so that its jails have what a
# container without rights has.
BARE = f"""
import logging, sys
from tunix.sandbox import syscalls
from tunix.sandbox.jail import Jail, JailSettings
syscalls.filter_calls(network=True)
logging.basicConfig()
jail = Jail(JailSettings(processes=8, wall_s=20))
for code in ("print(1)", {FORKS!r}):
  print(jail.run([sys.executable, "-c", code]).finish)
result = jail.run([sys.executable, "-c", {DAEMON!r}, sys.argv[1]])
print(result.finish, result.stdout.strip(), *result.protections)
try:
  strict = Jail(JailSettings(require=("processes",)))
  strict.run(["/bin/touch", "/tmp/jail-" + sys.argv[1]])
except RuntimeError as error:
  print(error)
"""


def test_a_system_without_namespaces():
  mark = f"87.{os.getpid()}"
  out = subprocess.run(
    [sys.executable, "-c", BARE, mark],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=60,
  )
  lines = out.stdout.splitlines()
  assert lines[0] == "ok", out
  assert lines[1] in ("error", "killed")
  assert lines[2].startswith("ok done calls network")
  assert "processes" not in lines[2]
  assert re.match(r"require has \['processes'\]", lines[3])
  assert out.stderr.count("runs without the protections") == 1
  assert not hostile.is_running(mark)
  assert not pathlib.Path(f"/tmp/jail-{mark}").exists()


def test_missing_protections_are_reported_once(caplog, protections):
  jail = Jail()
  with caplog.at_level(logging.WARNING):
    jail.run(["/bin/true"])
    jail.run(["/bin/true"])
  is_bare = len(protections) < 5
  assert len(caplog.records) == is_bare
