"""`tunix eval`: log-likelihood, pairwise accuracy, and rewards of completions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

import tunix
from tunix.cli.commands.eval import generation, likelihood, pairs, results
from tunix.cli.commands.eval.results import Section
from tunix.cli.commands.eval.scores import Task
from tunix.cli.commands.parts import arguments
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.make import fingerprints, loading, rewards
from tunix.cli.run import folder as run_folder, processes as several
from tunix.cli.settings import keys
from tunix.cli.settings.run import DistributedSettings
from tunix.data.reading import files
from tunix.data.records import PROMPT_ROWS
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.adapters import files as adapter_files
from tunix.models.transformer.model import Transformer
from tunix.rl.reward.rewards import RewardManager
from tunix.utils import checks, terminal

_SAMPLING = ("seed", "top_k", "top_p", "min_p", "num_samples", "stop_strings")

_DESCRIPTION = """\
evaluates a model: --data measures log-likelihood, --pairs pairwise accuracy, --prompts
completions, with mean rewards and pass@k if --reward names reward functions"""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix eval`.

  Raises:
    FileNotFoundError, ImportError: there is no such model, file or function.
    ValueError: arguments that contradict each other, or an invalid record.
    OSError: the results cannot be written.
  """
  args = _parsed(argv)
  _check(args)
  ks = _ks(args)
  settings = _processes(args)
  several.join(settings)
  if jax.process_count() > 1:
    _compare(args, settings)
  rewarded = rewards.RewardSettings(
    functions=tuple(args.reward),
    weights=args.weights and tuple(args.weights),
    workers=args.workers or 0,
  )
  manager = rewards.build_rewards(rewarded)
  try:
    if manager is not None:
      records = files.open_file(args.prompts, PROMPT_ROWS)
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
    return  # all processes have the same results, and the first one writes them
  print(terminal.shown(results.terminal(sections)))
  if args.out is not None:
    folder = pathlib.Path(args.out)
    results.write(folder, sections, _about(args))
    print(f"\ntables and records are in {folder}, samples in {folder / results.PAGE}")


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
  """Returns the arguments; `--model` has replaced MODEL."""
  args = parser().parse_args(argv)
  named = vars(args).pop("named")
  if (named is None) == (args.model is None):
    found = "missing" if named is None else f"{args.model}, and --model is {named}"
    raise ValueError(
      f"MODEL is {found}; give one model folder, MODEL or --model FOLDER"
    )
  args.model, args.adapter = run_folder.export_of(named or args.model, args.adapter)
  return args


def _evaluate(
  args: argparse.Namespace,
  model: Transformer,
  tokenizer: TokenizerAdapter,
  manager: RewardManager | None,
  ks: Sequence[int],
) -> list[Section]:
  def task(path: str) -> Task:
    return Task(
      model=model,
      tokenizer=tokenizer,
      path=path,
      batch_size=args.batch_size,
      chat={"auto": None, "yes": True, "no": False}[args.chat],
      template_args=args.template_args,
      shown=args.show,
    )

  sections = []
  if args.data is not None:
    sections.append(likelihood.evaluate(task(args.data), max_length=args.max_length))
  if args.pairs is not None:
    reference = None
    if args.reference is not None:
      reference = loading.load_model(args.reference, dtype=args.dtype)
    sections.append(
      pairs.evaluate(
        task(args.pairs),
        reference=reference,
        per_token=args.per_token,
        max_length=args.max_length,
      )
    )
  if args.prompts is not None:
    steps = {"max_generation_steps": args.max_new_tokens}
    sections.append(
      generation.evaluate(
        task(args.prompts),
        rewards=manager,
        threshold=1.0 if args.threshold is None else args.threshold,
        ks=ks,
        options=steps | arguments.sampling_options(args),
      )
    )
  return sections


def _check(args: argparse.Namespace) -> None:
  if args.data is None and args.pairs is None and args.prompts is None:
    raise ValueError("nothing to evaluate; give --data, --pairs or --prompts")
  for name in ("batch_size", "show"):
    checks.number(f"--{name}", getattr(args, name), checks.COUNT, whole=True)
  two = checks.Range(2)
  checks.number("--max_length", args.max_length, two, whole=True, optional=True)
  checks.number("--threshold", args.threshold, optional=True)
  if args.out is not None:
    run_folder.check_writable("--out", pathlib.Path(args.out))
  arguments.check_sampling(args)
  users = {
    "prompts": ("reward", "temperature", *_SAMPLING),
    "pairs": ("reference", "per_token"),
  }
  for user, names in users.items():
    for name in names:
      if getattr(args, user) is None and getattr(args, name):
        raise ValueError(f"--{name} has no effect without --{user}; omit it")
  for name in ("pass_at", "weights", "workers", "threshold"):
    if getattr(args, name) is not None and not args.reward:
      raise ValueError(f"--{name} has no effect without --reward; omit it")
  if args.max_length is not None and args.data is None and args.pairs is None:
    raise ValueError("--max_length has no effect without --data or --pairs; omit it")
  if (args.num_samples or 1) > 1 and not args.temperature:
    raise ValueError(
      f"--num_samples is {args.num_samples}, but at --temperature 0 all samples are "
      "equal; raise the temperature"
    )


def _check_model(args: argparse.Namespace, model: Transformer) -> None:
  """Refuses a reward model where a language model is needed."""
  for name in ("data", "prompts"):
    if getattr(args, name) is not None and model.config.num_scores is not None:
      raise ValueError(
        f"--{name} needs a language model, but {args.model} is a reward model; use it "
        "with --pairs"
      )


def _ks(args: argparse.Namespace) -> list[int]:
  """Returns the k of pass@k; by default 1, 2, 4, ... up to --num_samples."""
  most = args.num_samples or 1
  if args.pass_at:
    for k in args.pass_at:
      if not 1 <= k <= most:
        raise ValueError(
          f"--pass_at is {k}; expected 1 to the {most} completions of a prompt "
          "(--num_samples)"
        )
    return args.pass_at
  return [2**i for i in range(most.bit_length())]


def _processes(args: argparse.Namespace) -> DistributedSettings:
  names = (field.name for field in dataclasses.fields(DistributedSettings))
  values = {name: getattr(args, several.PREFIX + name) for name in names}
  given = {name: value for name, value in values.items() if value is not None}
  return DistributedSettings(**given)


def _compare(args: argparse.Namespace, settings: DistributedSettings) -> None:
  """Refuses processes whose arguments or files differ."""
  about = _about(args)
  models = {name: getattr(args, name) for name in ("model", "reference")}
  files = about["sha256"] | fingerprints.of_models(models)
  if args.adapter is not None:
    folder = pathlib.Path(args.adapter)
    files["adapter"] = fingerprints.of_file(str(folder / adapter_files.WEIGHTS_FILE))
  several.agree(settings, {k: str(v) for k, v in about["arguments"].items()}, files)


def _about(args: argparse.Namespace) -> dict[str, Any]:
  """Returns the version, the arguments, and the digests of the files."""
  files = {
    name: fingerprints.of_file(getattr(args, name))
    for name in ("data", "pairs", "prompts")
    if getattr(args, name) is not None
  }
  given = {k: v for k, v in vars(args).items() if not k.startswith(several.PREFIX)}
  return {"tunix": tunix.__version__, "arguments": given, "sha256": files}


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser("tunix eval", _DESCRIPTION)
  add = made.add_argument
  folder = "Hugging Face folder or folder of a run; a reward model for --pairs"
  add("model", metavar="MODEL", nargs="?", help=folder)
  add("--model", dest="named", metavar="FOLDER", help="another way to write MODEL")
  add("--adapter", metavar="FOLDER", help="PEFT folder")
  add("--tokenizer", metavar="FOLDER", help="default: the adapter's or the model's")
  add("--data", metavar="FILE", help="fine-tuning records: measures log-likelihood")
  add("--pairs", metavar="FILE", help="preference pairs: measures pairwise accuracy")
  add("--prompts", metavar="FILE", help="prompts with columns: samples completions")
  add("--out", metavar="FOLDER", help="write tables, records and a page of samples")
  add("--batch_size", type=int, default=8, metavar="N", help="rows of a batch")
  add("--max_length", type=int, metavar="N", help="tokens of a row; default: no limit")
  add("--show", type=int, default=64, metavar="N", help="records on the page")
  add(
    "--chat",
    choices=("auto", "yes", "no"),
    default="auto",
    help="whether text prompts become user turns; auto: if there is a chat template",
  )
  add(
    "--template_args",
    type=_mapping,
    default={},
    metavar="JSON",
    help="further variables of the chat template",
  )
  add("--reference", metavar="FOLDER", help="pairs: subtract this model's log-probs")
  add("--per_token", action="store_true", help="pairs: divide log-probs by the length")
  add(
    "--reward",
    metavar="FUNCTION",
    nargs="+",
    default=[],
    help="prompts: exact_match, pkg.mod:fn, /path/file.py:fn, as in reward.functions",
  )
  add("--weights", type=float, nargs="+", metavar="W", help="of functions; default: 1")
  add("--workers", type=int, metavar="N", help="processes that run functions")
  add(
    "--threshold",
    type=float,
    metavar="REWARD",
    help="smallest reward of a completion that passes; default: 1",
  )
  add("--pass_at", type=int, nargs="+", metavar="K", help="default: 1, 2, 4, ...")
  arguments.add_sampling(made)
  made.set_defaults(max_new_tokens=128)
  add("--dtype", choices=("float32", "bfloat16", "float16"))
  for name, key in keys.of(DistributedSettings).items():
    kind = str if name == "coordinator" else int
    add(f"--{several.PREFIX}{name}", type=kind, metavar="VALUE", help=key.meaning)
  return made


def _mapping(text: str) -> dict[str, Any]:
  try:
    value = json.loads(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
  if not isinstance(value, dict):
    raise argparse.ArgumentTypeError(f"{text} is {type(value).__name__}, not an object")
  return value
