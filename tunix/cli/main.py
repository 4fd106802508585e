"""The `tunix` command: finds the subcommand, and says in one line what went wrong."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import tunix

# Name -> (module with main(argv), what the command does). Modules are imported when
# their command is called; a leading dot means the package tunix.cli.commands.
COMMANDS = {
  "train": (".train", "fine-tune a model; again: resume"),
  "generate": (".generate", "continue prompts with a model"),
  "chat": (".chat", "talk with a model"),
  "parity": (".parity", "compare log-probs of decoding with scored ones"),
  "eval": (".eval.main", "measure a model on files of data"),
  "export": (".export", "write a run's model or adapter to a folder"),
  "plan": (".plan", "compile a run for chips that need not be here"),
  "doctor": (".doctor", "look whether this machine can train"),
  "report": (".report", "show runs as a page: curves, settings, samples"),
  "data": (".data", "show what a run would train on, and check it"),
  "init": (".init", "write a configuration to start from"),
  "completion": (".completion", "print completions for bash, zsh or fish"),
  "quickstart": (
    "tunix.examples.quickstart.main",
    "the whole way, without a download",
  ),
}

BAD_INPUT = 2
FAILED = 1

# What a user can cause; the rest are our faults and keep their traceback.
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

  0: done. 2: bad input. 1: a failure during the run. 130 and 143: stopped by Ctrl-C
  and SIGTERM. `--debug` lets errors through with their traceback.
  """
  words = list(sys.argv[1:] if argv is None else argv)
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
      # Threads of a save that failed, or that read data ahead, are still at work for
      # nothing, and would be heard of while the interpreter shuts down.
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code)
  return code


def usage() -> str:
  """The help text."""
  lines = ["usage: tunix COMMAND ...", ""]
  lines += [f"  {name:12}{what}" for name, (_, what) in COMMANDS.items()]
  lines += ["", "tunix COMMAND --help says more; --debug shows tracebacks"]
  return "\n".join(lines)


def _load(command: str) -> ModuleType:
  if command not in COMMANDS:
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
    raise ValueError(f"the command {command!r} is unknown: {remedy}")
  return importlib.import_module(COMMANDS[command][0], "tunix.cli.commands")


def _guarded(command: str, argv: list[str], quiet: contextlib.ExitStack) -> int:
  """Runs a command; what a user can cause becomes one line on standard error."""
  try:
    module = _load(command)
    # Only now: absl must have made its logger itself.
    quiet.enter_context(_quiet_orbax())
    return module.main(argv) or 0
  except BrokenPipeError:
    # The reader of our output went away (`| head`): nothing to say, nowhere to say it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
  except KeyboardInterrupt as stop:
    signum = getattr(stop, "signum", signal.SIGINT)
    what = f"{stop}; the same command resumes" if str(stop) else "stopped"
    print(f"tunix: {what}", file=sys.stderr)
    return 128 + int(signum)
  except _INPUT_ERRORS as error:
    _complain(_said(error))
    return BAD_INPUT
  except _RUN_ERRORS as error:
    _complain(_with_remedy(error))
    return FAILED


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
  """Silences what orbax tells about a save that fails, besides raising it to us: the
  traceback in every thread that it passes, in absl's log, and one for every write that
  tensorstore finishes after the first failed, through sys.unraisablehook."""
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
  print("tunix: error: " + " ".join(message.split()), file=sys.stderr)


def _said(error: Exception) -> str:
  """What an error says, without the number that Python puts before it."""
  if isinstance(error, OSError) and error.filename and error.strerror:
    remedy = ": name a place that can be written" if error.errno in _CLOSED else ""
    return f"{error.filename}: {error.strerror}{remedy}"
  return str(error)


def _with_remedy(error: Exception) -> str:
  text = _said(error)
  if getattr(error, "errno", None) in _NO_SPACE:
    return f"{text}: make room and run the same command again"
  if "RESOURCE_EXHAUSTED" in text:
    first = text.splitlines()[0]
    return f"{first}: lower training.micro_batch_size or data.max_length, or use remat"
  return text


if __name__ == "__main__":
  sys.exit(main())
