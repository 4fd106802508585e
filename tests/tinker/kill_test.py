"""kill -9 of the server, and of clients, while tenants train over the socket."""

import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

from tests import forks
from tests.tinker.serving import base, rows
from tests.tinker.state import journal_test
from tunix.tinker.client import AdamParams, Datum, ServiceClient
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state import state_file
from tunix.tinker.state.runs import Run
from tunix.utils import array_codec
from tunix.utils.record_file import RecordFile

tinker = pytest.importorskip("tinker")
ROOT = pathlib.Path(__file__).parents[2]
SAVE_EVERY = 4


def batch(tenant: int, step: int):
  return rows(1000 * tenant + step, 5 + tenant % 3, 9, 12)


class Server:
  """A server process that is killed and started again on one port."""

  def __init__(self, root: pathlib.Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
      self._port = free.getsockname()[1]
    self._root, self.kills = root, 0
    self._process = self._start()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self._port}"

  def _start(self) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.tinker.drill_server", str(self._root)]
    process = forks.popen(
      [*command, str(self._port)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving")
    return process

  def kill(self) -> None:
    os.kill(self._process.pid, signal.SIGKILL)
    self._process.wait()
    self._process.stdout.close()
    self.kills += 1
    self._process = self._start()

  def end(self) -> None:
    self._process.terminate()
    self._process.wait(60)
    self._process.stdout.close()


class Tenant(threading.Thread):
  """One client of the SDK; it can be killed, and goes on from its last checkpoint.

  It ends after `steps`, or at its first checkpoint after `ends` is set.
  """

  def __init__(self, number: int, steps: int, url: str, kill_rate: float):
    super().__init__(daemon=True)
    self.number, self._steps, self._url = number, steps, url
    self.ends = threading.Event()
    self._random = random.Random(number)
    self._kill_rate = kill_rate
    self.path, self.step, self.error = None, 0, None
    self._clients = []

  def run(self) -> None:
    try:
      self._train()
      for client in self._clients:  # else their heartbeats go on
        client.close("success").result(60)
    except BaseException as error:  # it belongs to the test's thread
      self.error = error

  def _train(self) -> None:
    step, trainer = 0, None
    while step < self._steps:
      if trainer is None:
        client = tinker.ServiceClient(base_url=self._url, api_key=f"tml-{self.number}")
        self._clients.append(client)
        trainer, life = self._trainer(client), self._random.randrange(10**6)
        step = self.step
      given = [
        tinker.Datum(
          model_input=tinker.ModelInput.from_ints(x.tolist()),
          loss_fn_inputs={"target_tokens": y},
        )
        for x, y in batch(self.number, step)
      ]
      trainer.forward_backward(given, "cross_entropy")
      trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
      step += 1
      if step % SAVE_EVERY == 0 or step == self._steps:
        saved = trainer.save_state(f"{life}-{step}").result()
        self.path, self.step = saved.path, step
        if self.ends.is_set():
          return
      elif self._random.random() < self._kill_rate:
        trainer = None  # the process is gone: only its last checkpoint is known

  def _trainer(self, client):
    if self.path is None:
      made = client.create_lora_training_client("toy", rank=8, seed=self.number)
    else:
      made = client.create_training_client_from_state_with_optimizer(self.path)
    return made.result()


def alone(tenant: int, steps: int, folder: pathlib.Path) -> bytes:
  """Trains a tenant in this process, without kills; returns its arrays."""
  settings = TinkerSettings(root=folder, lora_alpha=8.0)
  with ServiceClient(base(), settings=settings) as client:
    trainer = client.create_lora_training_client(rank=8, seed=tenant)
    for step in range(steps):
      given = [Datum(x, {"target_tokens": y}) for x, y in batch(tenant, step)]
      trainer.forward_backward(given, "cross_entropy")
      trainer.optim_step(AdamParams(learning_rate=1e-2))
    return arrays_at(folder, trainer.save_state("end").result())


def arrays_at(root: pathlib.Path, path: str) -> bytes:
  run, kind, name = path.removeprefix("tinker://").split("/")
  folder = root / "checkpoints" / run.replace(":", "%3A") / kind / name
  _, arrays = state_file.read(folder / "state")
  return b"".join(
    np.ascontiguousarray(arrays[name]).tobytes() for name in sorted(arrays)
  )


def drill(folder, *, tenants, steps, kills=None, seconds=None, pause, kill_rate):
  """Kills a server of several tenants, whose folder an earlier version has begun."""
  journal_test.unpack(folder / "served")
  before = journal_test.folder_of(folder / "served")
  server = Server(folder / "served")
  choose = random.Random(0)
  with contextlib.ExitStack() as stack:
    stack.callback(server.end)
    threads = [Tenant(i, steps, server.url, kill_rate) for i in range(tenants)]
    for thread in threads:
      thread.start()
    until = None if seconds is None else time.monotonic() + seconds
    while any(x.is_alive() for x in threads):
      time.sleep(choose.uniform(*pause))
      is_over = server.kills >= kills if until is None else time.monotonic() > until
      if is_over:
        break
      steps_before = [x.step for x in threads]
      server.kill()
      # On a slow machine no checkpoint fits between two kills. Every second kill waits
      # for one, and the other kills hit a server that starts or compiles.
      if server.kills % 2:
        wait_for_a_checkpoint(threads, steps_before, until)
    for thread in threads:
      if until is not None:
        thread.ends.set()
    for thread in threads:
      thread.join(600)
      assert not thread.is_alive() and thread.error is None, thread.error
  for thread in threads:
    found = arrays_at(folder / "served", thread.path)
    assert thread.step == steps or until is not None
    assert found == alone(thread.number, thread.step, folder / f"alone{thread.number}")
  old = Run(before, TinkerSettings())
  assert old.result(7).error is None and old.pending == 1
  return server.kills


def wait_for_a_checkpoint(threads, before, until):
  while any(x.is_alive() for x in threads) and before == [x.step for x in threads]:
    if until is not None and time.monotonic() > until:
      return
    time.sleep(0.2)


def test_a_killed_server_applies_each_step_once(tmp_path):
  kills = drill(tmp_path, tenants=2, steps=40, kills=2, pause=(1.0, 2.0), kill_rate=0.0)
  assert kills == 2


STUCK = """
import pathlib, sys, threading
from tests.serve.fake_engine import FakeDriver, FakeEngine
from tests.tinker.serving import base
from tunix.serve import server
from tunix.serve.settings import ServeSettings
from tunix.tinker import app
from tunix.tinker.work.executor import Executor
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings

def execute(*_):
  print("begun", flush=True)
  threading.Event().wait()

server._GRACE = server._LAST = 0.1
Executor.execute = execute
engine = FakeEngine()
engine.hold_at = 0
driver = FakeDriver(engine).start()
settings = TinkerSettings(root=pathlib.Path(sys.argv[1]), wait_seconds=60)
service = Service(base(), settings, name="toy", driver=driver)
server.serve(
  driver,
  ServeSettings(port=0, drain_timeout=0.2),
  more=app.routes(service),
  on_start=lambda address: print(address, flush=True),
  on_stop=service.close,
  ends_process=True,
)
"""


def test_a_stop_ends_in_time_whatever_runs_and_costs_no_start(tmp_path):
  process = subprocess.Popen(
    [sys.executable, "-c", STUCK, str(tmp_path)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  url = process.stdout.readline().strip() + "/api/v1/"
  post = lambda path, **body: httpx.post(url + path, json=body, timeout=60).json()
  session = post("create_session")["session_id"]
  prompt = {"chunks": [{"tokens": [1, 2]}]}
  post("create_sampling_session", session_id=session, sampling_session_seq_id=0)
  sampler = f"{session}:sample:0"
  post("asample", sampling_session_id=sampler, seq_id=0, prompt=prompt)
  lora, number = {"rank": 1}, {"session_id": session, "model_seq_id": 0}
  post("create_model", lora_config=lora, base_model="toy", **number)
  assert process.stdout.readline().strip() == "begun"
  begin = time.monotonic()
  process.terminate()
  assert process.wait(60) == 0
  assert time.monotonic() - begin < 5
  process.stdout.close()
  (run,) = [Run(x, TinkerSettings()) for x in (tmp_path / "runs").iterdir()]
  assert (run.next()[1].kind, run.begin(0)) == ("create_model", 0)
  run.close()
  journal = RecordFile(tmp_path / "samples/requests", reads=True)
  read = [array_codec.from_bytes(x) for x in journal.records()]
  journal.close()
  assert [meta.get("count") for meta, _ in read] == [None, 1, 0]


@pytest.mark.slow
def test_eight_tenants_and_random_kills(tmp_path):
  """Ten minutes by default; TUNIX_DRILL_SECONDS sets another length."""
  seconds = float(os.environ.get("TUNIX_DRILL_SECONDS", "600"))
  kills = drill(
    tmp_path,
    tenants=8,
    steps=int(20 * seconds),  # more than fit: the time ends the tenants
    seconds=seconds,
    pause=(3.0, 15.0),
    kill_rate=0.02,
  )
  assert kills >= 3
