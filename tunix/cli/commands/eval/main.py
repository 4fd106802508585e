"""`tunix eval`: log-likelihood, pairwise accuracy, and answers judged by functions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

import tunix
from tunix.cli.build import loading, rewards
from tunix.cli.commands.arguments import (
  Parser,
  add_sampling,
  check_sampling,
  sampling_options,
)
from tunix.cli.commands.eval import generation, likelihood, pairs, results
from tunix.cli.commands.eval.results import Section
from tunix.cli.run import fingerprints, folder as run_folder, processes as several
from tunix.cli.settings.run import DistributedSettings
from tunix.data.jsonl import JsonlRecords
from tunix.data.records import PROMPT_ROWS
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import adapter_files
from tunix.models.transformer.model import Transformer
from tunix.utils import checks

_DRAWING = ("seed", "top_k", "top_p", "min_p", "num_samples", "stop_strings")

_DESCRIPTION = """\
what is given says what is measured: --data log-likelihood, --pairs pairwise accuracy,
--prompts answers, with pass@k where --reward names scoring functions"""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix eval`.

  Raises:
    FileNotFoundError, ImportError: there is no such model, file or function.
    ValueError: arguments that contradict each other, or something about the data.
    OSError: the results cannot be written.
  """
  args = _parse(argv)
  _check(args)
  ks = _ks(args)
  told = _processes(args)
  several.join(told)
  if jax.process_count() > 1:
    _compare(args, told)
  settings = rewards.RewardSettings(
    functions=tuple(args.reward),
    weights=args.weights and tuple(args.weights),
    workers=args.workers or 0,
  )
  manager = rewards.build_rewards(settings)
  try:
    if manager is not None:
      records = JsonlRecords(args.prompts, PROMPT_ROWS)
      records.validate()
      first = PROMPT_ROWS.read(records[0], records.where(0))
      rewards.check_columns(manager, list(first.extra))
    tokenizer = loading.load_tokenizer(
      args.model, args.adapter, args.tokenizer, name="MODEL"
    )
    model = loading.load_model(args.model, args.adapter, args.dtype)
    loading.check_vocabulary(model, tokenizer)
    _check_model(args, model)
    sections = _evaluate(args, model, tokenizer, manager, ks)
  finally:
    if manager is not None:
      manager.close()
  if jax.process_index() != 0:
    return  # one writes, and all know the same
  print(results.terminal(sections))
  if args.out is not None:
    folder = pathlib.Path(args.out)
    results.write(folder, sections, _about(args))
    print(f"\ntables and records are in {folder}, samples in {folder / results.PAGE}")


def _evaluate(
  args: argparse.Namespace,
  model: Transformer,
  tokenizer: TokenizerAdapter,
  manager: Any,
  ks: Sequence[int],
) -> list[Section]:
  shared: dict[str, Any] = {
    "batch_size": args.batch_size,
    "chat": {"auto": None, "yes": True, "no": False}[args.chat],
    "template_args": args.template_args,
    "shown": args.show,
  }
  sections = []
  if args.data is not None:
    sections.append(
      likelihood.evaluate(
        model, tokenizer, args.data, max_length=args.max_length, **shared
      )
    )
  if args.pairs is not None:
    reference = (
      None
      if args.reference is None
      else loading.load_model(args.reference, dtype=args.dtype)
    )
    sections.append(
      pairs.evaluate(
        model,
        tokenizer,
        args.pairs,
        reference=reference,
        per_token=args.per_token,
        max_length=args.max_length,
        **shared,
      )
    )
  if args.prompts is not None:
    sections.append(
      generation.evaluate(
        model,
        tokenizer,
        args.prompts,
        rewards=manager,
        threshold=1.0 if args.threshold is None else args.threshold,
        ks=ks,
        max_new_tokens=args.max_new_tokens,
        options=sampling_options(args),
        **shared,
      )
    )
  return sections


def _check(args: argparse.Namespace) -> None:
  if args.data is None and args.pairs is None and args.prompts is None:
    raise ValueError("there is nothing to evaluate: give --data, --pairs or --prompts")
  for name in ("batch_size", "show"):
    checks.number(f"--{name}", getattr(args, name), checks.COUNT, whole=True)
  two = checks.Range(2)
  checks.number("--max_length", args.max_length, two, whole=True, optional=True)
  checks.number("--threshold", args.threshold, optional=True)
  if args.out is not None:
    _check_folder(pathlib.Path(args.out))
  check_sampling(args)
  belongs = {
    "prompts": ("reward", "temperature", *_DRAWING),
    "pairs": ("reference", "per_token"),
  }
  for owner, names in belongs.items():
    for name in names:
      if getattr(args, owner) is None and getattr(args, name):
        raise ValueError(f"--{name} is given without --{owner}, and would do nothing")
  for name in ("pass_at", "weights", "workers", "threshold"):
    if getattr(args, name) is not None and not args.reward:
      raise ValueError(f"--{name} is given without --reward, and would do nothing")
  if args.max_length is not None and args.data is None and args.pairs is None:
    raise ValueError("--max_length is given without --data or --pairs")
  if (args.num_samples or 1) > 1 and not args.temperature:
    raise ValueError(
      f"--num_samples is {args.num_samples} at --temperature 0, where all of them are "
      "equal: raise the temperature"
    )


def _check_folder(folder: pathlib.Path) -> None:
  """Refuses what is no folder and cannot become one, before anything is measured."""
  run_folder.check_writable("--out", folder)


def _check_model(args: argparse.Namespace, model: Transformer) -> None:
  """Refuses to read or to write text with a model that gives scores."""
  for name in ("data", "prompts"):
    if getattr(args, name) is not None and model.config.num_scores is not None:
      raise ValueError(
        f"--{name} needs a language model, and {args.model} gives scores: it can judge "
        "--pairs"
      )


def _ks(args: argparse.Namespace) -> list[int]:
  """Of pass@k: those asked for, or 1, 2, 4, ... up to the samples of a prompt."""
  most = args.num_samples or 1
  if args.pass_at:
    for k in args.pass_at:
      if not 1 <= k <= most:
        raise ValueError(
          f"--pass_at has {k}: it must be from 1 to the {most} completions of a prompt "
          "(--num_samples)"
        )
    return args.pass_at
  return [2**i for i in range(most.bit_length())]


def _processes(args: argparse.Namespace) -> DistributedSettings:
  names = (field.name for field in dataclasses.fields(DistributedSettings))
  values = {name: getattr(args, several.PREFIX + name) for name in names}
  given = {name: value for name, value in values.items() if value is not None}
  return DistributedSettings(**given)


def _compare(args: argparse.Namespace, told: DistributedSettings) -> None:
  """Refuses processes that would not measure the same."""
  about = _about(args)
  models = {name: getattr(args, name) for name in ("model", "reference")}
  files = about["sha256"] | fingerprints.of_models(models)
  if args.adapter is not None:
    folder = pathlib.Path(args.adapter)
    files["adapter"] = fingerprints.of_file(str(folder / adapter_files.WEIGHTS_FILE))
  several.agree(told, {k: str(v) for k, v in about["arguments"].items()}, files)


def _about(args: argparse.Namespace) -> dict[str, Any]:
  """What was evaluated and how; files by their content."""
  files = {
    name: fingerprints.of_file(getattr(args, name))
    for name in ("data", "pairs", "prompts")
    if getattr(args, name) is not None
  }
  given = {k: v for k, v in vars(args).items() if not k.startswith(several.PREFIX)}
  return {"tunix": tunix.__version__, "arguments": given, "sha256": files}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = Parser("tunix eval", _DESCRIPTION)
  add = parser.add_argument
  add("model", metavar="MODEL", help="Hugging Face folder; a reward model for --pairs")
  add("--adapter", metavar="FOLDER", help="PEFT folder")
  add("--tokenizer", metavar="FOLDER", help="the adapter's or the model's if not given")
  add("--data", metavar="FILE", help="records of fine-tuning: how likely they are")
  add("--pairs", metavar="FILE", help="preference pairs: which response is preferred")
  add("--prompts", metavar="FILE", help="prompts with columns: what is answered")
  add("--out", metavar="FOLDER", help="write tables, records and a page of samples")
  add("--batch_size", type=int, default=8, metavar="N", help="rows at a time")
  add("--max_length", type=int, metavar="N", help="tokens of a row; none if not given")
  add("--show", type=int, default=64, metavar="N", help="records on the page")
  add(
    "--chat",
    choices=("auto", "yes", "no"),
    default="auto",
    help="whether plain prompts are turns; auto: when there is a chat template",
  )
  add(
    "--template_args",
    type=_mapping,
    default={},
    metavar="JSON",
    help="further names that the chat template reads",
  )
  add("--reference", metavar="FOLDER", help="pairs: subtract this model's log-probs")
  add("--per_token", action="store_true", help="pairs: log-probs per token")
  add(
    "--reward",
    metavar="FUNCTION",
    nargs="+",
    default=[],
    help="prompts: exact_match, pkg.mod:fn, /path/file.py:fn, as reward.functions",
  )
  add("--weights", type=float, nargs="+", metavar="W", help="one a function; all 1")
  add("--workers", type=int, metavar="N", help="processes of functions")
  add(
    "--threshold",
    type=float,
    metavar="REWARD",
    help="a completion passes when its reward is at least this; 1 by default",
  )
  add("--pass_at", type=int, nargs="+", metavar="K", help="by default 1, 2, 4, ...")
  add_sampling(parser)
  add("--dtype", choices=("float32", "bfloat16", "float16"))
  add(
    "--distributed.coordinator",
    metavar="HOST:PORT",
    help="of process 0, or auto: several processes share the rows",
  )
  add("--distributed.num_processes", type=int, metavar="N", help="that are started")
  add("--distributed.process_id", type=int, metavar="I", help="of this one, from 0")
  add("--distributed.timeout_s", type=int, metavar="S", help="to wait for the others")
  add("--distributed.heartbeat_s", type=int, metavar="S", help="until one is given up")
  add("--distributed.stall_s", type=int, metavar="S", help="for one call of a reward")
  return parser.parse_args(argv)


def _mapping(text: str) -> dict[str, Any]:
  try:
    value = json.loads(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from error
  if not isinstance(value, dict):
    raise argparse.ArgumentTypeError(f"{text} is no object of names and values")
  return value
