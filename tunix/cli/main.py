"""The `tunix` command: runs a subcommand, and prints an error as one line."""

from __future__ import annotations

import contextlib
import difflib
import errno
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import tunix
from tunix.utils import terminal

# Name -> (module with main(argv), summary). A module is imported when its command runs;
# a leading dot stands for the package tunix.cli.commands.
COMMANDS = {
  "train": (".train", "train a model; the same command again resumes"),
  "generate": (".generate", "continue prompts with a model"),
  "chat": (".chat", "talk to a model"),
  "serve": (".serve", "answer HTTP requests with a model"),
  "rollouts": (".rollouts", "sample for a run of RL on a host of its own"),
  "route": (".route", "pass HTTP requests on to several servers"),
  "parity": (".parity", "compare log-probabilities of decoding and scoring"),
  "eval": (".eval.main", "measure a model on files of data"),
  "export": (".export", "write a run's model or adapter to a folder"),
  "merge": (".merge", "merge models, or adapters of one base, into one"),
  "replay": (".replay", "repeat a run of RL and compare weights and metrics"),
  "plan": (".plan", "compile a run for devices that this machine lacks"),
  "doctor": (".doctor", "check whether this machine can train"),
  "report": (".report", "write runs as a page: curves, settings, samples"),
  "data": (".data", "show and check the data of a run"),
  "init": (".init", "write a configuration to start from"),
  "completion": (".completion", "print a completion script for a shell"),
  "quickstart": (
    "tunix.examples.quickstart.main",
    "train a small model on sums, without a download",
  ),
}

BAD_INPUT = 2
FAILED = 1

# Imports and tracing make millions of objects, of which few become garbage. With
# Python's 700 new objects between two looks, they take a tenth more processor time.
GC_THRESHOLD = (10_000, 10, 10)

# Errors that users cause. Other errors are faults of tunix and keep their traceback.
_INPUT_ERRORS = (
  ValueError,
  FileNotFoundError,
  NotADirectoryError,
  IsADirectoryError,
  ImportError,
)
_RUN_ERRORS = (OSError, RuntimeError)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a subcommand; returns the exit code.

  Args:
    argv: the arguments; None: those of the process. `--debug` shows tracebacks.

  Returns: 0: done. 2: bad input. 1: a failure during the run. 130 and 143: stopped by
    Ctrl-C and SIGTERM.
  """
  words = list(sys.argv[1:] if argv is None else argv)
  if argv is None:
    gc.set_threshold(*GC_THRESHOLD)
  debug = "--debug" in words
  words = [word for word in words if word != "--debug"]
  if not words or words[0] in ("-h", "--help", "help"):
    print(usage())
    return 0 if words else BAD_INPUT
  if words[0] == "--version":
    print(f"tunix {tunix.__version__}")
    return 0
  if debug:
    return _load(words[0]).main(words[1:]) or 0
  with contextlib.ExitStack() as quiet:
    code = _guarded(words[0], words[1:], quiet)
    if code in (FAILED, BAD_INPUT) and argv is None:
      # Threads of a failed save, or that read data ahead, still run. They would print
      # errors while the interpreter shuts down.
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code)
  return code


def train_job(job: str, argv: Sequence[str] | None = None) -> int:
  """Runs `tunix train --job=JOB`; returns the exit code, as `main`.

  Args:
    job: name of the job.
    argv: arguments of `tunix train`; None: those of the process.
  """
  return main(["train", f"--job={job}", *(sys.argv[1:] if argv is None else argv)])


def usage() -> str:
  """Returns the help text."""
  lines = ["usage: tunix COMMAND ...", ""]
  lines += [f"  {name:12}{summary}" for name, (_, summary) in COMMANDS.items()]
  lines += ["", "tunix COMMAND --help explains a command; --debug shows tracebacks"]
  return "\n".join(lines)


def _load(command: str) -> ModuleType:
  if command not in COMMANDS:
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
    raise ValueError(f"the command {command!r} is unknown: {remedy}")
  return importlib.import_module(COMMANDS[command][0], "tunix.cli.commands")


def _guarded(command: str, argv: list[str], quiet: contextlib.ExitStack) -> int:
  """Runs a command; an error that a user caused becomes one line on standard error."""
  try:
    module = _load(command)
    # After the import, because absl must create its logger first.
    quiet.enter_context(_quiet_orbax())
    code = module.main(argv) or 0
    sys.stdout.flush()  # here, where a reader that has gone away is no error
    return code
  except BrokenPipeError:
    # The reader of the output has ended (`| head`), so nothing can be printed.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
  except KeyboardInterrupt as stop:
    signum = getattr(stop, "signum", signal.SIGINT)
    message = f"{stop}; the same command resumes" if str(stop) else "stopped"
    print(f"tunix: {message}", file=sys.stderr)
    return 128 + int(signum)
  except _INPUT_ERRORS as error:
    _complain(_message(error))
    return BAD_INPUT
  except _RUN_ERRORS as error:
    _complain(_with_remedy(error))
    return FAILED


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
  """Silences the tracebacks that orbax prints for a save that fails.

  orbax raises the error, and also logs it through absl in each thread. tensorstore
  reports every write that ends after the first failure to sys.unraisablehook.
  """
  logger = logging.getLogger("absl")
  level, hook = logger.level, sys.unraisablehook

  def without_late_writes(report: Any) -> None:
    if str(report.exc_value) != "Event loop is closed":
      hook(report)

  logger.setLevel(logging.CRITICAL)
  sys.unraisablehook = without_late_writes
  try:
    yield
  finally:
    logger.setLevel(level)
    sys.unraisablehook = hook


def _complain(message: str) -> None:
  line = "tunix: error: " + " ".join(message.split())
  print(terminal.shown(line, sys.stderr), file=sys.stderr)


def _message(error: Exception) -> str:
  """Returns the message of an error, without the errno of an OSError."""
  if isinstance(error, OSError) and error.filename and error.strerror:
    remedy = ": choose a place that is writable" if error.errno in _CLOSED else ""
    return f"{error.filename}: {error.strerror}{remedy}"
  return str(error)


def _with_remedy(error: Exception) -> str:
  text = _message(error)
  if getattr(error, "errno", None) in _NO_SPACE:
    return f"{text}: make room and run the same command again"
  if "RESOURCE_EXHAUSTED" in text:
    first = text.splitlines()[0]
    return (
      f"{first}: lower training.micro_batch_size (of RL: rl.train_micro_batch_size) or "
      "the longest rows (data.max_length; rollout.max_tokens_to_generate), or set "
      "model.remat=block"
    )
  return text


if __name__ == "__main__":
  sys.exit(main())
