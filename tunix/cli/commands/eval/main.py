"""`tunix eval`: log-likelihood, pairwise accuracy, and rewards of completions."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import jax

import tunix
from tunix.cli.commands.eval import generation, likelihood, pairs, results
from tunix.cli.commands.eval.results import Section
from tunix.cli.commands.eval.scores import Task
from tunix.cli.commands.parts.arguments import ModelOptions, Parser, Samples
from tunix.cli.make import fingerprints, loading, model_folders, rewards
from tunix.cli.run import folder as run_folder, processes as several
from tunix.cli.settings import options
from tunix.cli.settings.run import DistributedSettings
from tunix.data import image_parts
from tunix.data.reading import files
from tunix.data.records import IMAGES_COLUMN, PROMPT_ROWS
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.adapters import files as adapter_files
from tunix.models.transformer.model import Transformer
from tunix.rl.reward.rewards import RewardManager
from tunix.utils import checks, terminal
from tunix.utils.setting import field_values, known_values, named_values, setting

_DESCRIPTION = """\
evaluates a model: --data measures log-likelihood, --pairs pairwise accuracy, --prompts
completions, with mean rewards and pass@k if --reward names reward functions"""

_SAMPLING = ("seed", "top_k", "top_p", "min_p", "num_samples", "stop_strings")
# Option without which others have no effect -> those others.
_USERS = {
  "prompts": ("reward", "temperature", *_SAMPLING),
  "pairs": ("reference", "per_token"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(Samples, ModelOptions):
  """The model, the files and the options of sampling.

  Attributes:
    model: Hugging Face folder, GGUF file, or folder of a run; for `pairs` a reward
      model.
    data: file of fine-tuning records: measures log-likelihood.
    pairs: file of preference pairs: measures pairwise accuracy.
    prompts: file of prompts with columns: samples completions.
    out: folder for tables, records and a page of samples.
    batch_size: rows of a batch.
    max_length: tokens of a row; null: no limit.
    show: records on the page.
    chat: whether text prompts become user turns; auto: if there is a chat template.
    template_args: further variables of the chat template.
    images: loads the vision tower; null: see docs/guides/images.md. Without it, records
      with images are refused.
    reference: pairs: subtracts the log-probabilities of this model.
    per_token: pairs: divides log-probabilities by the length.
    reward: prompts: exact_match, pkg.mod:fn, /path/file.py:fn, as in reward.functions.
    weights: weights of the functions; null: 1.
    workers: processes that run functions.
    threshold: smallest reward of a completion that passes; null: 1.
    pass_at: the k of pass@k; null: 1, 2, 4, ..., up to `num_samples`.
  """

  model: str = setting(path="read", positional=True)
  data: str | None = setting(None, path="read")
  pairs: str | None = setting(None, path="read")
  prompts: str | None = setting(None, path="read")
  out: str | None = setting(None, path="written")
  batch_size: int = 8
  max_length: int | None = None
  show: int = 64
  chat: Literal["auto", "yes", "no"] = "auto"
  template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
  images: bool | None = None
  reference: str | None = setting(None, path="read")
  per_token: bool = False
  reward: tuple[str, ...] = ()
  weights: tuple[float, ...] | None = None
  workers: int | None = None
  threshold: float | None = None
  pass_at: tuple[int, ...] | None = None
  max_new_tokens: int = 128

  def __post_init__(self):
    if self.data is None and self.pairs is None and self.prompts is None:
      raise ValueError("nothing to evaluate; give --data, --pairs or --prompts")
    checks.fields(
      self,
      batch_size=checks.COUNT,
      show=checks.COUNT,
      max_length=checks.Range(2),
      workers=checks.NOT_NEGATIVE,
    )
    super().__post_init__()
    values = field_values(self)
    for user, names in _USERS.items():
      for name in names:
        if values[user] is None and values[name]:
          raise ValueError(f"{name} has no effect without --{user}; omit it")
    for name in ("pass_at", "weights", "workers", "threshold"):
      if values[name] is not None and not self.reward:
        raise ValueError(f"{name} has no effect without --reward; omit it")
    if self.max_length is not None and self.data is None and self.pairs is None:
      raise ValueError("max_length has no effect without --data or --pairs; omit it")
    if (self.num_samples or 1) > 1 and not self.temperature:
      raise ValueError(
        f"num_samples is {self.num_samples}, but at --temperature 0 all samples are "
        "equal; raise the temperature"
      )


def main(argv: Sequence[str]) -> None:
  """Runs `tunix eval`.

  Raises:
    FileNotFoundError, ImportError: there is no such model, file or function.
    ValueError: arguments that contradict each other, or an invalid record.
    OSError: the results cannot be written.
  """
  values = parser().read(argv)
  args, settings = values.build(EvalOptions), values.build(DistributedSettings)
  if args.out is not None:
    run_folder.check_writable("--out", pathlib.Path(args.out))
  model, adapter = run_folder.export_of(args.model, args.adapter)
  args = dataclasses.replace(args, model=model, adapter=adapter)
  ks = _ks(args)
  several.join(settings)
  if jax.process_count() > 1:
    _compare(args, settings)
  rewarded = rewards.RewardSettings(
    functions=args.reward,
    weights=args.weights,
    workers=args.workers or 0,
  )
  manager = rewards.build_rewards(rewarded)
  try:
    if manager is not None and args.prompts is not None:
      records = files.open_file(args.prompts, PROMPT_ROWS)
      records.validate()
      first = PROMPT_ROWS.read(records[0], records.where(0))
      columns = dict.fromkeys(first.extra)
      reads_images = model_folders.image_reader(args.model, args.images) is not None
      # Without a reader the scan refuses the image, and says why.
      if reads_images or image_parts.sources(first.prompt):
        columns[IMAGES_COLUMN] = None
      rewards.check_columns(manager, list(columns))
    tokenizer = model_folders.load_tokenizer(
      args.model, args.adapter, args.tokenizer, name="MODEL"
    )
    model = model_folders.load_model(args.model, args.adapter, args.dtype, args.images)
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


def _evaluate(
  args: EvalOptions,
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
      images=model_folders.image_reader(args.model, args.images),
    )

  sections = []
  if args.data is not None:
    sections.append(likelihood.evaluate(task(args.data), max_length=args.max_length))
  if args.pairs is not None:
    reference = None
    if args.reference is not None:
      reference = model_folders.load_model(
        args.reference, dtype=args.dtype, images=args.images
      )
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
        options=steps | args.options,
      )
    )
  return sections


def _check_model(args: EvalOptions, model: Transformer) -> None:
  """Refuses a reward model where a language model is needed."""
  for name in known_values(args, ("data", "prompts")):
    if model.config.num_scores is not None:
      raise ValueError(
        f"--{name} needs a language model, but {args.model} is a reward model; use it "
        "with --pairs"
      )


def _ks(args: EvalOptions) -> list[int]:
  """Returns the k of pass@k; by default 1, 2, 4, ... up to --num_samples."""
  most = args.num_samples or 1
  if args.pass_at:
    for k in args.pass_at:
      if not 1 <= k <= most:
        raise ValueError(
          f"--pass_at is {k}; expected 1 to the {most} completions of a prompt "
          "(--num_samples)"
        )
    return [*args.pass_at]
  return [2**i for i in range(most.bit_length())]


def _compare(args: EvalOptions, settings: DistributedSettings) -> None:
  """Refuses processes whose arguments or files differ."""
  about = _about(args)
  models = fingerprints.of_models(named_values(args, ("model", "reference")))
  files = about["sha256"] | models
  if args.adapter is not None:
    folder = pathlib.Path(args.adapter)
    files["adapter"] = fingerprints.of_file(str(folder / adapter_files.WEIGHTS_FILE))
  several.agree(settings, {k: str(v) for k, v in about["arguments"].items()}, files)


def _about(args: EvalOptions) -> dict[str, Any]:
  """Returns the version, the arguments, and the digests of the files."""
  paths = known_values(args, ("data", "pairs", "prompts"))
  files = {name: fingerprints.of_file(path) for name, path in paths.items()}
  arguments = dataclasses.asdict(args)
  return {"tunix": tunix.__version__, "arguments": arguments, "sha256": files}


def parser() -> Parser:
  """Returns the parser of the arguments."""
  processes = options.Section(DistributedSettings, several.PREFIX)
  return Parser("tunix eval", _DESCRIPTION, options.Section(EvalOptions), processes)
