"""The argument parser of the subcommands, and the options of sampling."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from tunix.generate.drawing.options import SamplingOptions
from tunix.utils import checks

_SAMPLING = (
  *("temperature", "seed", "top_k", "top_p", "min_p", "num_samples", "stop_strings"),
  *("beam_size", "length_penalty"),
)


class Parser(argparse.ArgumentParser):
  """An ArgumentParser that raises ValueError instead of exiting.

  It takes no abbreviations of options.
  """

  def __init__(self, prog: str, description: str):
    super().__init__(prog=prog, description=description, allow_abbrev=False)

  def error(self, message: str) -> NoReturn:
    raise ValueError(f"{message}; see {self.prog} --help")


def add_sampling(parser: argparse.ArgumentParser, *, samples: bool = True) -> None:
  """Adds the options of sampling.

  Args:
    parser: the parser.
    samples: whether a prompt may have several completions (`--num_samples`).
  """
  add = parser.add_argument
  add("--max_new_tokens", type=int, metavar="N", help="tokens of a completion")
  add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
  add("--seed", type=int, help="makes sampled output repeatable")
  add("--top_k", type=int, metavar="K", help="sample from the K most likely tokens")
  add(
    "--top_p",
    type=float,
    metavar="P",
    help="sample from the most likely tokens with a total probability of P",
  )
  add(
    "--min_p",
    type=float,
    metavar="P",
    help="sample from tokens at least P times as likely as the most likely one",
  )
  if samples:
    add("--num_samples", type=int, metavar="N", help="completions of each prompt")
  add(
    "--stop",
    dest="stop_strings",
    metavar="TEXT",
    nargs="+",
    help="texts that end a completion",
  )


def check_sampling(args: argparse.Namespace) -> None:
  """Checks the options of sampling.

  Raises:
    ValueError: a number out of range, or options that exclude each other.
  """
  if args.max_new_tokens is not None:
    checks.number("--max_new_tokens", args.max_new_tokens, checks.COUNT, whole=True)
  if args.seed is not None and not args.temperature:
    raise ValueError(
      f"--seed is {args.seed}, but --temperature 0 samples nothing; raise the "
      "temperature, or omit the seed"
    )
  try:
    SamplingOptions(max_generation_steps=1, **sampling_options(args))
  except ValueError as error:
    is_option = str(error).partition(" ")[0] in _SAMPLING
    raise ValueError(f"{'--' * is_option}{error}") from error


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
  """Returns the sampling options that are set, by their names in `SamplingOptions`."""
  values = {name: getattr(args, name, None) for name in _SAMPLING}
  return {name: value for name, value in values.items() if value is not None}


def add_admission(made: argparse.ArgumentParser) -> None:
  """Adds what `serve` and `route` admit, and how they end."""
  add = made.add_argument
  add("--max_queue", type=int, default=256, help="requests that wait; then 429")
  add(
    "--proxy",
    metavar="ADDRESS",
    action="append",
    help="address of a proxy or router, whose requests have no limit of their own. "
    "May be given several times",
  )
  add(
    "--drain_timeout", type=float, default=30.0, help="seconds to finish after SIGTERM"
  )
