"""Reward functions that go wrong, where the workers of a pool can import them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time


def lengths(prompts, completions):
  return [float(len(c)) for c in completions]


def echo(prompts, completions, score):
  return score


def hang(prompts, completions):
  time.sleep(3600)


def hang_on_h(prompt, completion):
  while completion == "h":
    pass
  return 1.0


def busy_in_c(prompts, completions):
  return [float(sum(1 for _ in range(3)) + len(str(9 ** (10**9))))]


def refuses_to_die(prompts, completions):
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  time.sleep(3600)


def raises(prompts, completions):
  raise ValueError("no such answer")


def leaves(prompts, completions):
  os._exit(7)


def exits(prompts, completions):
  sys.exit(3)


def closes_everything(prompts, completions):
  os.closerange(3, 1 << 16)
  time.sleep(3600)


def floods(prompts, completions):
  write_to_all(b"\xff" * 100_000)
  time.sleep(3600)


def eats_memory(prompts, completions):
  return [float(len(bytearray(1 << 34)))] * len(completions)


def eats_a_little(prompts, completions):
  return [float(len(bytearray(1 << 26)))] * len(completions)


def starts_a_child_and_hangs(prompts, completions, pid_file):
  child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
  with open(pid_file[0], "w") as file:
    file.write(str(child.pid))
  time.sleep(3600)


def forks_and_leaves(prompts, completions):
  if os.fork():
    os._exit(0)
  time.sleep(3600)


def unpicklable_result(prompts, completions):
  return [lambda: 1.0 for _ in completions]


def own_pid_after_a_while(prompts, completions):
  time.sleep(0.1)
  return [float(os.getpid())] * len(completions)


def platform(prompts, completions):
  return [float(os.environ["JAX_PLATFORMS"] == "cpu")] * len(completions)


async def slow_lengths(prompts, completions):
  await asyncio.sleep(0.01)
  return lengths(prompts, completions)


async def slow_length(prompt, completion):
  await asyncio.sleep(0.01)
  return len(completion)


def write_to_all(message):
  for descriptor in range(3, 1 << 12):  # the tests' own process may have many open
    with contextlib.suppress(OSError):
      os.write(descriptor, message)


def write_answer_twice(prompts, completions):
  write_to_all(b"\0\0\0\0\0\0\0\3[1]")
  return [1.0] * len(completions)


def killed_until(path, loads):
  """What loads as `lengths`, in the process that has loaded it so many times before."""
  with open(path, "a") as file:
    file.write("x")
  if os.path.getsize(path) < loads:
    os.kill(os.getpid(), signal.SIGKILL)
  return lengths


class Unloadable:
  """Pickles; loading it calls a function instead."""

  __name__ = "unloadable"

  def __init__(self, function=raises, *arguments):
    self._instead = (function, arguments or (None, None))

  def __call__(self, prompts, completions):
    return [1.0]

  def __reduce__(self):
    return self._instead
