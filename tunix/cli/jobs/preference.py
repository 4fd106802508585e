"""The jobs dpo, orpo, kto and reward: learning from preferences."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar, Literal

import numpy as np

from tunix.cli.build import data as build_data
from tunix.cli.build.data import RunData
from tunix.cli.jobs.job import Job, Loaded, length_of
from tunix.cli.run import fingerprints
from tunix.cli.settings.run import StreamRun
from tunix.data.records import LABELLED, PAIRS, Kind
from tunix.data.scan import Report
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer
from tunix.sft.config import TrainingConfig
from tunix.sft.dpo.dpo_trainer import DPOTrainer, ORPOTrainer
from tunix.sft.dpo.kto_trainer import KTOTrainer
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.preference_config import (
  DPOTrainingConfig,
  KTOConfig,
  ORPOTrainingConfig,
  RewardConfig,
)
from tunix.sft.dpo.reward_trainer import RewardTrainer

# n_D desirable_weight / (n_U undesirable_weight), arXiv:2402.01306, section 4.2.
_BALANCE = (1.0, 4 / 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseSettings:
  """Which completions are trained on.

  Attributes:
    max_prompt_length: most tokens of a prompt; data.overlong says what happens to
      longer ones.
    max_response_length: most tokens of a response, its end included.
    unusable: what happens to records with an empty completion, or with two equal ones.
  """

  # The section `training` has the trainer's other settings.
  hidden: ClassVar[tuple[str, ...]] = (
    *(field.name for field in dataclasses.fields(TrainingConfig)),
    "bad_rows",
  )

  max_prompt_length: int = 512
  max_response_length: int = 512
  unusable: Literal["error", "drop"] = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOSettings(ResponseSettings, DPOTrainingConfig):
  """DPOTrainingConfig, with places of the reference.

  Attributes:
    loss: sigmoid, hinge, ipo, simpo, cpo, ...: docs/guides/preference.md has them all.
    reference: folder of the reference. null: the model itself before the training (with
      adapters the same weights without them, else a second copy).
    reference_logps: folder of the reference's log-probabilities, which are computed
      once, before the training, and read from then on: no second model is held.
  """

  hidden: ClassVar[tuple[str, ...]] = ("algorithm", "lambda_orpo")

  reference: str | None = None
  reference_logps: str | None = None

  def __post_init__(self):
    super().__post_init__()
    for name in ("reference", "reference_logps"):
      if (value := getattr(self, name)) is None:
        continue
      if self.reference_free:
        raise ValueError(
          f"{name} is {value!r} and preference.reference_free true: nothing would be "
          "compared with it; leave one of them out"
        )
      if not self.spec.needs_reference:
        raise ValueError(
          f"{name} is {value!r} and the loss {self.loss!r} has no reference: leave it "
          "out"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPOSettings(ResponseSettings, ORPOTrainingConfig):
  """ORPOTrainingConfig."""

  hidden: ClassVar[tuple[str, ...]] = (
    *("algorithm", "loss", "beta", "label_smoothing", "options", "reference_free"),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOSettings(ResponseSettings, KTOConfig):
  """KTOConfig, with the place of the reference.

  Attributes:
    reference: folder of the reference. null: the model itself before the training (with
      adapters the same weights without them, else a second copy).
  """

  reference: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelSettings(ResponseSettings, RewardConfig):
  """RewardConfig."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceRun(StreamRun):
  """What the jobs that learn from preferences share.

  Attributes:
    preference: how completions are compared (docs/guides/preference.md).
  """

  instead: ClassVar[dict[str, str]] = {
    "data.max_length": "use preference.max_prompt_length and max_response_length",
  }

  records: ClassVar[Kind] = PAIRS

  preference: ResponseSettings = ResponseSettings()

  def kind(self, *, training: bool) -> Kind:
    """Pairs or labelled completions, always."""
    del training
    return self.records

  def row_keys(self, kind: Kind) -> dict[str, str]:
    """Prompt and completion have a length each."""
    del kind
    return {
      "max_prompt_length": "preference.max_prompt_length",
      "max_completion_length": "preference.max_response_length",
      "unusable": "preference.unusable",
    }

  @property
  def drops(self) -> bool:
    """Whether records may be left out."""
    return super().drops or self.preference.unusable == "drop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPORun(PreferenceRun):
  """DPO, and the other losses of pairs."""

  job: Literal["dpo"] = "dpo"
  preference: DPOSettings = DPOSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPORun(PreferenceRun):
  """ORPO."""

  job: Literal["orpo"] = "orpo"
  preference: ORPOSettings = ORPOSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTORun(PreferenceRun):
  """KTO."""

  records: ClassVar[Kind] = LABELLED

  job: Literal["kto"] = "kto"
  preference: KTOSettings = KTOSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardRun(PreferenceRun):
  """A reward model: a head of scores."""

  fits_adapter: ClassVar[bool] = False

  job: Literal["reward"] = "reward"
  preference: RewardModelSettings = RewardModelSettings()


def trainer_config(section: Any, options: dict[str, Any]) -> Any:
  """The section as its trainer takes it."""
  return dataclasses.replace(section, **options)


def build_compared_data(
  config: Any, tokenizer: TokenizerAdapter, known: Any = None
) -> RunData:
  """The data, with the reference among the fingerprints.

  Raises:
    FileNotFoundError, ValueError: see `build_data.build_data`, or there is no such
      reference.
  """
  data = build_data.build_data(config, tokenizer, known)
  data.fingerprints.update(
    fingerprints.of_models({"reference": config.preference.reference})
  )
  return data


def build_labelled_data(
  config: Any, tokenizer: TokenizerAdapter, known: Any = None
) -> RunData:
  """The data of the job kto.

  Raises:
    FileNotFoundError, ValueError: see `build_data.build_data`; or all completions have
      one label, from which KTO learns nothing but to raise or to lower all of them.
  """
  data = build_compared_data(config, tokenizer, known)
  report: Report = data.reports["train"]
  if not report.desirable or not report.undesirable:
    label = "true" if report.desirable else "false"
    raise ValueError(
      f"{config.data.train}: all {report.kept} completions have the label {label}, and "
      "KTO compares both kinds: add the other, or use the job sft for good ones alone"
    )
  return data


def balance_note(config: KTORun, report: Report) -> str | None:
  """What to do about labels of which one kind outweighs the other; None: nothing."""
  made = config.preference
  assert report.desirable
  share = report.desirable / report.undesirable
  ratio = made.desirable_weight * share / made.undesirable_weight
  low, high = _BALANCE
  if low <= ratio <= high:
    return None
  name = "undesirable_weight" if share > 1 else "desirable_weight"
  value = share if share > 1 else 1 / share
  return (
    f"note: desirable completions weigh {ratio:.2f} times what undesirable ones do: "
    f"KTO's paper keeps to 1 to 1.33: preference.{name}={value:.3g} (and the other "
    "weight 1) makes it 1"
  )


def _build_dpo(run: Loaded) -> DPOTrainer:
  options, places = _options(run), run.config.preference
  reference, logps = None, None
  if places.reference_logps is not None:
    logps, reference = _logps(run, options)
  elif options.spec.needs_reference:
    reference = run.reference(places.reference)
  return DPOTrainer(
    run.model,
    reference,
    run.optimizer,
    options,
    metrics_logger=run.logger(),
    reference_logps=logps,
  )


def _build_orpo(run: Loaded) -> ORPOTrainer:
  return ORPOTrainer(
    run.model, None, run.optimizer, _options(run), metrics_logger=run.logger()
  )


def _build_kto(run: Loaded) -> KTOTrainer:
  reference = run.reference(run.config.preference.reference)
  return KTOTrainer(
    run.model, reference, run.optimizer, _options(run), metrics_logger=run.logger()
  )


def _build_reward(run: Loaded) -> RewardTrainer:
  return RewardTrainer(
    run.model, run.optimizer, _options(run), metrics_logger=run.logger()
  )


def _options(run: Loaded) -> Any:
  return trainer_config(run.config.preference, run.training_options())


def _logps(
  run: Loaded, options: DPOTrainingConfig
) -> tuple[PrecomputedLogps, Transformer | None]:
  """The reference's log-probabilities, and the reference if it is not the model."""
  places = run.config.preference
  reference = None if places.reference is None else run.reference(places.reference)
  if (written := _written(places.reference_logps)) is not None:
    return written, reference
  batches = itertools.chain.from_iterable(
    build_data.batches(run.config, run.tokenizer, records, training=False, whole=True)
    for records in build_data.open_records(run.config).values()
  )
  # The model has not learnt anything yet: it is put back by the trainer.
  source = run.model if reference is None else reference
  logps = PrecomputedLogps.write(places.reference_logps, source, batches, options)
  return logps, reference


def _written(folder: str) -> PrecomputedLogps | None:
  """What an earlier run has written. A writer that was killed leaves a file of another
  name, which is none."""
  try:
    return PrecomputedLogps(folder)
  except FileNotFoundError:
    return None


def _batch(config: PreferenceRun) -> str:
  sizes, limits = config.training, config.preference
  what = "labelled completions" if config.job == "kto" else "pairs"
  return (
    f"{config.job}: {sizes.global_batch_size} {what} of at most "
    f"{limits.max_prompt_length} + {limits.max_response_length} tokens, "
    f"in {sizes.micro_batches} micro-batches"
  )


def _balance(config: KTORun, data: RunData) -> list[str]:
  note = balance_note(config, data.reports["train"])
  return [] if note is None else [note]


def _example(config: Any) -> dict[str, np.ndarray]:
  """A global batch of pairs of full length.

  Raises:
    ValueError: the loss needs the scores of one micro-batch before the step of another.
  """
  training, limits = config.training, config.preference
  spec = getattr(limits, "spec", None)
  if spec is not None and spec.coupled and training.micro_batches > 1:
    raise ValueError(
      f"preference.loss is {limits.loss!r}, which compares the pairs of several "
      "micro-batches: that is not planned yet; plan it with one micro-batch"
    )
  rows = training.global_batch_size
  batch: dict[str, np.ndarray] = {"weights": np.ones(rows, np.float32)}
  lengths = {"prompt": limits.max_prompt_length}
  lengths |= dict.fromkeys(("chosen", "rejected"), limits.max_response_length)
  for token, (name, length) in enumerate(lengths.items()):  # equal pairs are refused
    batch[f"{name}_ids"] = np.full((rows, length), token, np.int32)
    batch[f"{name}_mask"] = np.ones((rows, length), np.int32)
  return batch


def _labelled_example(config: KTORun) -> dict[str, np.ndarray]:
  """A global batch of labelled completions of full length."""
  limits, rows = config.preference, config.training.global_batch_size
  lengths = {
    "prompt": limits.max_prompt_length,
    "completion": limits.max_response_length,
  }
  batch = {
    "labels": np.arange(rows) % 2 == 0,
    "weights": np.ones(rows, np.float32),
  }
  for name, length in lengths.items():
    batch[f"{name}_ids"] = np.zeros((rows, length), np.int32)
    batch[f"{name}_mask"] = np.ones((rows, length), np.int32)
  return batch


_PAIRS = {"loss": "loss", "accuracy": "rewards/accuracy"}
_LENGTH = length_of("preference", "max_prompt_length", "max_response_length")
_FIRST = {"preference.max_prompt_length": 512, "preference.max_response_length": 512}

# A pair is two.
_PAIR_SEQUENCES = lambda config: 2 * config.training.global_batch_size

DPO = Job(
  summary="DPO and the other losses of pairs; preference.loss chooses one",
  records=(PAIRS,),
  first_values=_FIRST,
  settings=DPORun,
  data=build_compared_data,
  build=_build_dpo,
  results=_PAIRS,
  batch=_batch,
  length=_LENGTH,
  example=_example,
  sequences=_PAIR_SEQUENCES,
)
ORPO = Job(
  summary="ORPO, from pairs and without a reference model",
  records=(PAIRS,),
  first_values=_FIRST,
  settings=ORPORun,
  build=_build_orpo,
  results=_PAIRS,
  batch=_batch,
  length=_LENGTH,
  example=_example,
  sequences=_PAIR_SEQUENCES,
)
KTO = Job(
  summary="KTO, from completions labelled good or bad",
  records=(LABELLED,),
  first_values=_FIRST,
  settings=KTORun,
  data=build_labelled_data,
  build=_build_kto,
  results={"loss": "loss", "margin": "rewards/margin"},
  batch=_batch,
  length=_LENGTH,
  notes=_balance,
  example=_labelled_example,
)
REWARD = Job(
  summary="a reward model from pairs",
  records=(PAIRS,),
  first_values=_FIRST,
  settings=RewardRun,
  build=_build_reward,
  results=_PAIRS,
  batch=_batch,
  length=_LENGTH,
  example=_example,
  sequences=_PAIR_SEQUENCES,
)
