"""argparse whose errors are exceptions, so that they come out as one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from tunix.generate.options import SamplingOptions
from tunix.utils import checks

_SAMPLING = (
  *("temperature", "seed", "top_k", "top_p", "min_p", "num_samples", "stop_strings"),
  *("beam_size", "length_penalty"),
)


class Parser(argparse.ArgumentParser):
  """An ArgumentParser that raises ValueError instead of exiting, and that takes no
  abbreviations."""

  def __init__(self, prog: str, description: str):
    super().__init__(prog=prog, description=description, allow_abbrev=False)

  def error(self, message: str) -> NoReturn:
    raise ValueError(f"{message}; see {self.prog} --help")


def add_sampling(parser: argparse.ArgumentParser, *, samples: bool = True) -> None:
  """The arguments that say how completions are drawn; `samples`: several a prompt."""
  parser.add_argument("--max_new_tokens", type=int, default=128, metavar="N")
  parser.add_argument(
    "--temperature", type=float, default=0.0, help="0, the default, is greedy"
  )
  parser.add_argument("--seed", type=int, help="repeats a sampled output")
  parser.add_argument(
    "--top_k", type=int, metavar="K", help="draw from the K most likely tokens"
  )
  parser.add_argument(
    "--top_p",
    type=float,
    metavar="P",
    help="draw from the most likely tokens that make up the probability P",
  )
  parser.add_argument(
    "--min_p",
    type=float,
    metavar="P",
    help="draw from tokens at least P times as likely as the best",
  )
  if samples:
    parser.add_argument(
      "--num_samples", type=int, metavar="N", help="completions a prompt"
    )
  parser.add_argument(
    "--stop",
    dest="stop_strings",
    metavar="TEXT",
    nargs="+",
    help="texts that end a completion",
  )


def check_sampling(args: argparse.Namespace) -> None:
  """Refuses what the sampler's own options cannot see.

  Raises:
    ValueError: a number out of range, or a seed with nothing drawn.
  """
  if args.max_new_tokens is not None:
    checks.number("--max_new_tokens", args.max_new_tokens, checks.COUNT, whole=True)
  if args.seed is not None and not args.temperature:
    raise ValueError(
      "--seed is given and nothing is drawn at --temperature 0: raise the temperature, "
      "or leave the seed out"
    )
  try:
    SamplingOptions(max_generation_steps=1, **sampling_options(args))
  except ValueError as error:
    is_option = str(error).partition(" ")[0] in _SAMPLING
    raise ValueError(f"{'--' * is_option}{error}") from error


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
  """What was asked for of the sampler's options; `SamplingOptions` checks it."""
  values = {name: getattr(args, name, None) for name in _SAMPLING}
  return {name: value for name, value in values.items() if value is not None}
