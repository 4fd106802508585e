"""The argument parser of the subcommands, and the options that several of them have."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from tunix.cli.settings.export import Dtype
from tunix.cli.settings.options import Section, Values
from tunix.cli.settings.spelling import did_you_mean
from tunix.generate.drawing.options import SamplingOptions
from tunix.utils import checks
from tunix.utils.setting import setting, shared_values


class Parser(argparse.ArgumentParser):
  """An ArgumentParser that raises ValueError instead of exiting.

  It takes no abbreviations of options. A command with sections is read by `read` or
  `read_known`; then files can set its options too.

  Args:
    prog: the command, such as "tunix serve".
    description: what the command does.
    *sections: dataclasses whose fields are options.
    config: name of the option that names files.
  """

  def __init__(
    self, prog: str, description: str, *sections: Section, config: str = "config"
  ):
    super().__init__(prog=prog, description=description, allow_abbrev=False)
    self._sections, self._config = sections, config
    bare = ""
    for section in sections:
      title = (section.kind.__doc__ or "").split("\n")[0].rstrip(".")
      group = self.add_argument_group(title)
      for option in section.options().values():
        bare += option.add(group)
    if sections:
      self.usage = f"{prog}{bare} [--OPTION VALUE ...]"
      self.add_argument(
        f"--{config}",
        metavar="FILE[,FILE]",
        default="",
        help="YAML files with lines `OPTION: VALUE`. Later files override earlier "
        "ones, and arguments override files.",
      )

  def error(self, message: str) -> NoReturn:
    raise ValueError(f"{message}; see {self.prog} --help")

  def read(self, argv: Sequence[str]) -> Values:
    """Returns the options that files and arguments set.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: an unknown option, or a value of another type.
    """
    given, rest = self._parsed(argv)
    # Before any value is read: one that follows an unknown option may be a secret.
    if unknown := [word.partition("=")[0] for word in rest if word.startswith("-")]:
      see = f"see {self.prog} --help"
      remedy = did_you_mean(unknown[0], self._option_string_actions, see)
      raise ValueError(f"the option {unknown[0]} is unknown: {remedy}")
    if rest:
      self.error(f"{rest[0]!r} is one argument too many")
    return self._values(given)

  def read_known(self, argv: Sequence[str]) -> tuple[Values, list[str]]:
    """Returns the options that are set, and the arguments that are no options.

    Raises:
      FileNotFoundError, ValueError: as for `read`.
    """
    given, rest = self._parsed(argv)
    return self._values(given), rest

  def _parsed(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    # Intermixed: a plain parse takes no optional argument without a name after a flag.
    args, rest = self.parse_known_intermixed_args(list(argv))
    return vars(args), rest

  def _values(self, given: dict[str, Any]) -> Values:
    values = Values(self.prog, self._sections)
    for file in filter(None, given[self._config].split(",")):
      values.read_file(file)
    values.read_flags(given)
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
  """The adapter, the tokenizer and the dtype of a model.

  Attributes:
    adapter: PEFT folder.
    tokenizer: folder of the tokenizer; null: that of the adapter, or of the model.
    dtype: dtype of the computation; null: that of the checkpoint.
  """

  adapter: str | None = setting(None, path="read")
  tokenizer: str | None = setting(None, path="read")
  dtype: Dtype | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """The options of sampling.

  Attributes:
    max_new_tokens: tokens of a completion.
    temperature: 0 is greedy.
    seed: makes sampled output repeatable.
    top_k: number of the most likely tokens to sample from.
    top_p: total probability of the most likely tokens to sample from.
    min_p: smallest probability of a token to sample, as a share of the largest one.
    stop_strings: texts that end a completion.

  Raises:
    TypeError, ValueError: a number is out of range, or options exclude each other.
  """

  max_new_tokens: int | None = None
  temperature: float = 0.0
  seed: int | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  stop_strings: tuple[str, ...] | None = setting(None, option="stop")

  def __post_init__(self):
    checks.fields(self, max_new_tokens=checks.COUNT)
    if self.seed is not None and not self.temperature:
      raise ValueError(
        f"seed is {self.seed}, but --temperature 0 samples nothing; raise the "
        "temperature, or omit the seed"
      )
    SamplingOptions(max_generation_steps=1, **self.options)

  @property
  def options(self) -> dict[str, Any]:
    """The options that are set, by their names in `SamplingOptions`."""
    values = shared_values(SamplingOptions, self)
    # In a command, `images` says whether the vision tower is loaded.
    values.pop("images", None)
    return {name: x for name, x in values.items() if x is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples(Sampling):
  """The options of sampling, with several completions of a prompt.

  Attributes:
    num_samples: completions of each prompt.
  """

  num_samples: int | None = None
