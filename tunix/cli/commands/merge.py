"""`tunix merge`: merges models, or adapters of one base, into one folder."""

from __future__ import annotations

import logging
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.run import folder as run_folder
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel, folder_merging
from tunix.models.adapters import combining, files as adapter_files
from tunix.utils import checks

_log = logging.getLogger(__name__)

# Method -> (formula, its options and their defaults).
_METHODS: dict[str, tuple[Callable[..., np.ndarray], dict[str, Any]]] = {
  "linear": (folder_merging.linear, {"weights": None}),
  "slerp": (folder_merging.slerp, {"t": 0.5}),
  "ties": (folder_merging.ties, {"base": None, "weights": None, "density": 0.5}),
  "dare": (
    folder_merging.dare,
    {"base": None, "weights": None, "density": 0.5, "seed": 0},
  ),
}
Name = str | os.PathLike[str]


def main(argv: Sequence[str]) -> None:
  """Runs `tunix merge`, see `merge` for the errors."""
  args = vars(parser().parse_args(argv))
  merge(**args)
  print(f"{len(args['models'])} models are merged into {args['output']}")


def merge(
  models: Sequence[Name],
  output: Name,
  *,
  method: str = "linear",
  base: Name | None = None,
  weights: Sequence[float] | None = None,
  t: float | None = None,
  density: float | None = None,
  seed: int | None = None,
) -> None:
  """Writes the merge of models, or of adapters of one base, as a folder.

  Args:
    models: folders, hub ids or runs of models with the same tensors, or PEFT folders.
    output: the folder to write, new or empty.
    method: "linear", "slerp", "ties" or "dare"; "linear" for adapters.
    base: for ties and dare: the model that all models were trained from.
    weights: one number for each model, for slerp none; None: 1 / number of models.
    t: for slerp: 0 is the first model, 1 the second; None: 0.5.
    density: for ties and dare: share of a difference's entries to keep; None: 0.5.
    seed: for dare; None: 0.

  Raises:
    FileNotFoundError: there is no such model.
    TypeError, ValueError: an option is out of range or of another method, or the models
      cannot be merged, see `folder_merging.merge_folders`.
    OSError: the disk is full; there is no output then.
  """
  given = {"base": base, "weights": weights, "t": t, "density": density, "seed": seed}
  options = _options(method, given)
  checks.listed("models", models, object)
  if len(models) < 2 or (method == "slerp" and len(models) > 2):
    expected = "exactly 2" if method == "slerp" else "2 or more"
    raise ValueError(f"models are {len(models)} in number; {method} merges {expected}")
  target = pathlib.Path(output).expanduser()
  if target.is_dir() and any(target.iterdir()):
    raise ValueError(f"output is {output}, which is not empty; give a new folder")
  origin = options.pop("base", None)
  names = [*models, *([] if origin is None else [origin])]
  places = [_resolved(name) for name in names]
  are_adapters = [(x / adapter_files.CONFIG_FILE).is_file() for x in places]
  if any(are_adapters) and not (all(are_adapters) and method == "linear"):
    raise ValueError(
      f"{names[are_adapters.index(True)]} is an adapter; expected models, or only "
      "adapters with the method linear. `tunix export --kind merged` writes a model"
    )
  if "weights" in options:
    options["weights"] = _weights(weights, len(models), method, any(are_adapters))
  if any(are_adapters):
    combining.merge_adapters(places, target, options["weights"])
    return
  for place in places[1:]:
    _warn_of_tokens(places[0], place)
  folders, origin = places[: len(models)], None if origin is None else places[-1]
  folder_merging.merge_folders(folders, target, _METHODS[method][0], options, origin)


def _resolved(name: Name) -> pathlib.Path:
  model, adapter = run_folder.export_of(str(name), None)
  return automodel.resolve_folder(adapter or model)


def _warn_of_tokens(*folders: pathlib.Path) -> None:
  """Logs a warning if the `tokenizer.json` of two folders differ in tokens."""
  if not all((folder / "tokenizer.json").is_file() for folder in folders):
    return
  loaded = [TokenizerAdapter.from_pretrained(folder).tokenizer for folder in folders]
  ours, theirs = (tokenizer.get_vocab().items() for tokenizer in loaded)
  if tokens := sorted(dict(ours ^ theirs)):
    _log.warning(
      "%s and %s have different ids for %s (%d tokens in all): rows of the embedding "
      "that mean different tokens are merged",
      *(*folders, ", ".join(map(repr, tokens[:3])), len(tokens)),
    )


def _options(method: str, given: dict[str, Any]) -> dict[str, Any]:
  """Returns the options of a method, and refuses those of other methods."""
  if method not in _METHODS:
    raise ValueError(f"method is {method!r}; expected one of {', '.join(_METHODS)}")
  options = dict(_METHODS[method][1])
  for name, value in given.items():
    if value is not None and name not in options:
      raise ValueError(
        f"{name} is {value!r}, which {method} does not have; its options are "
        f"{', '.join(options)}"
      )
  options |= {name: value for name, value in given.items() if value is not None}
  checks.number("t", options.get("t"), checks.SHARE, optional=True)
  share = checks.Range(0, 1, beyond=True)
  checks.number("density", options.get("density"), share, optional=True)
  checks.number("seed", options.get("seed"), checks.SEED, whole=True, optional=True)
  if options.get("base", "") is None:
    raise ValueError(
      f"base is missing; {method} merges differences from the model that all models "
      "were trained from. Give its folder"
    )
  return options


def _weights(
  weights: Sequence[float] | None, count: int, method: str, are_adapters: bool
) -> list[float]:
  """Returns the weights of the models; None stands for equal ones."""
  if weights is None:
    return [1 / count] * count
  checks.listed("weights", weights, float)
  values = [float(w) for w in weights]
  expected = ""
  if len(values) != count:
    expected = f"{count} numbers, one for each model"
  elif not any(values) or (method == "ties" and min(values) < 0):
    expected = "one that is not 0, and for ties none below 0"
  elif method == "linear" and not are_adapters and abs(math.fsum(values) - 1) > 0.005:
    expected = "the sum 1, because another sum scales the whole model"
  if expected:
    raise ValueError(f"weights are {values}; expected {expected}")
  return values


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser("tunix merge", "merges models, or adapters of one base, into one")
  add = made.add_argument
  add(
    "models", nargs="+", metavar="MODEL", help="folder, run or hub id; or PEFT folders"
  )
  add("--output", "-o", required=True, metavar="FOLDER", help="new folder to write")
  add("--method", choices=tuple(_METHODS), default="linear", help="default: linear")
  add("--base", metavar="MODEL", help="ties, dare: the model before training")
  add("--weights", type=float, nargs="+", metavar="W", help="default: equal weights")
  add("--t", type=float, help="slerp: from 0 (first model) to 1; default: 0.5")
  add("--density", type=float, help="ties, dare: share that is kept; default: 0.5")
  add("--seed", type=int, help="dare; default: 0")
  return made
