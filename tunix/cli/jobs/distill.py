"""The job distill: a student model learns the distributions of a teacher."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.cli.jobs import sft
from tunix.cli.jobs.distill_settings import DistillRun, DistillSettings, StudentRollout
from tunix.cli.jobs.job import Job, Loaded, length_of
from tunix.cli.make import (
  data as build_data,
  fingerprints,
  loading,
  model_folders,
  objects,
)
from tunix.cli.make.data import RunData
from tunix.cli.settings import keys, mesh as mesh_axes
from tunix.cli.settings.data import RowSettings
from tunix.data.records import SFT
from tunix.distillation import vocabulary
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
  Prompts,
)
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.distillation.strategies.policy_gradient import PolicyGradientStrategy
from tunix.distillation.teacher_cache import TeacherCache
from tunix.distillation.teachers import SelfTeacher, Teachers, TextTeacher
from tunix.generate.sizes import batching
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import backbone, calling
from tunix.utils import terminal
from tunix.utils.setting import known_values, named_values

# Keys of the section -> arguments of the strategy.
_STRATEGY = {
  "temperature": "temperature",
  "alpha": "alpha",
  "top_k": "distill_top_k",
  "divergence": "divergence",
  "jsd_beta": "beta",
}
# Arguments of OnPolicyConfig -> keys.
_ON_POLICY = {
  "on_policy_fraction": "distill.on_policy_fraction",
  "sampling_temperature": "rollout.temperature",
  "temperature": "rollout.temperature",
  "max_prompt_length": "rollout.max_prompt_length",
  "max_completion_length": "rollout.max_tokens_to_generate",
}
_JSD_BETA = 0.5  # weighs both models equally
# A teacher whose unembedding is not one fixed table is compared by its top tokens.
_TOP_K = 100
_SELF = {"temperature": 1.0, "alpha": 1.0, "divergence": "reverse_kl"}


def strategy(
  config: DistillRun, vocab_size: int = _TOP_K
) -> LogitStrategy | PolicyGradientStrategy:
  """Builds the strategy that compares student and teacher.

  Args:
    config: settings of the run.
    vocab_size: bounds the default of top_k.

  Raises:
    ValueError: an option is out of its range.
  """
  values = known_values(config.distill, _STRATEGY)
  options = {_STRATEGY[name]: value for name, value in values.items()}
  section = config.distill
  with keys.under("distill", DistillSettings):
    if section.strategy == "policy_gradient":
      temperature = options.get("temperature", config.rollout.temperature)
      return PolicyGradientStrategy(temperature=temperature)
    if section.divergence == "jsd":
      options.setdefault("beta", _JSD_BETA)
    if section.self_teacher is not None:
      options = _SELF | options
    if section.self_teacher in ("average", "current") or section.teachers:
      options.setdefault("distill_top_k", min(_TOP_K, vocab_size))
    return LogitStrategy(**options)


def check(config: DistillRun) -> None:
  """Refuses settings that cannot train, before anything is loaded.

  Raises:
    ValueError: as for `strategy`; a policy gradient with a changed sampling
      distribution; keys that are not read; or neither teacher nor cache.
  """
  strategy(config)
  section = config.distill
  if section.strategy == "policy_gradient":
    _check_sampling(config)
  if config.is_on_policy:
    _on_policy_options(config)
    owner, defaults, reader = config.data, RowSettings(), "rollout.max_prompt_length"
    names, prefix = ("max_length", "packing"), "data"
  else:
    owner, defaults, reader = config.rollout, StudentRollout(), "data.max_length"
    names, prefix = list(keys.of(StudentRollout)), "rollout"
  usual = named_values(defaults, names)
  for name, value in named_values(owner, names).items():
    if value != usual[name]:
      raise ValueError(
        f"{prefix}.{name} is {value!r} and distill.on_policy_fraction "
        f"{section.on_policy_fraction if config.is_on_policy else 'is not set'}: rows "
        f"follow {reader}, leave {prefix}.{name} out"
      )
  if config.data.pad_to in ("shared", "longest") and not config.follows_lengths:
    raise ValueError(
      f"data.pad_to is {config.data.pad_to!r} and distill.cache is {section.cache!r}, "
      "which finds rows by their padded tokens. Leave data.pad_to out"
    )
  sources = (section.teacher, section.cache, section.self_teacher)
  if all(source is None for source in sources) and not section.teachers:
    raise ValueError(
      "distill.teacher is not set. Give --distill.teacher=FOLDER, or --distill.cache "
      "with the outputs of a teacher, or --distill.self_teacher=average"
    )


def _check_sampling(config: DistillRun) -> None:
  """Refuses a policy gradient on completions of another distribution."""
  sampling, temperature = config.rollout, config.distill.temperature
  for name, value in sampling.filters.items():
    raise ValueError(
      f"rollout.{name} is {value} and distill.strategy 'policy_gradient', which "
      "needs samples of the student's whole distribution. Leave it out"
    )
  if temperature not in (None, sampling.temperature):
    raise ValueError(
      f"distill.temperature is {temperature}, rollout.temperature "
      f"{sampling.temperature} and distill.strategy 'policy_gradient', which needs the "
      "temperature of the sampling. Leave distill.temperature out"
    )


def _on_policy_options(config: DistillRun, **options: object) -> OnPolicyConfig:
  sampling = config.rollout
  with build_data.naming(_ON_POLICY):
    return OnPolicyConfig.of(
      sampling,
      max_prompt_length=sampling.max_prompt_length,
      max_completion_length=sampling.max_tokens_to_generate,
      on_policy_fraction=config.distill.on_policy_fraction or 0.0,
      max_teacher_prompt_length=config.distill.max_teacher_prompt_length
      if config.distill.has_teacher_prompts
      else None,
      seed=config.seed if sampling.seed is None else sampling.seed,
      **options,
    )


def as_prompts(
  batch: Mapping[str, np.ndarray], teachers: Sequence[str] = ()
) -> dict[str, Any]:
  """Converts a batch of `rows.SideBySide` to the input of the on-policy trainer.

  Args:
    batch: the batch.
    teachers: names of the teachers, if the batch has numbers of teachers.

  Returns:
    Token ids of the prompts, and of the completions and the teacher's prompts if the
    batch has some, without padding and without rows of padding; images, and names of
    teachers.
  """
  real = np.flatnonzero(batch["weights"])

  def ids(name: str) -> list[np.ndarray]:
    tokens, mask = batch[f"{name}_ids"], batch[f"{name}_mask"] != 0
    return [tokens[row][mask[row]] for row in real]

  names = {"prompts": "prompt", "completions": "completion"}
  names |= {"teacher_prompts": "teacher_prompt"}
  out: dict[str, Any] = {
    ours: ids(name) for ours, name in names.items() if f"{name}_ids" in batch
  }
  if "images" in batch:
    out["images"] = jax.tree.map(lambda x: x[real], batch["images"])
  if teachers:
    out["teachers"] = [teachers[number] for number in batch["teacher"][real]]
  return out


def _build_data(
  config: DistillRun, tokenizer: TokenizerAdapter, scans: Any = None
) -> RunData:
  """Builds the data, and compares the tokenizers of student and teacher.

  Raises:
    FileNotFoundError, ValueError: as for `build_data.build_data`, or the teacher has
      another tokenizer.
  """
  section = config.distill
  folders = [section.teacher] if section.teacher else section.teachers.values()
  for teacher in folders:
    if objects.is_name(teacher) or section.align is not None:
      continue
    vocabulary.check_tokenizers(tokenizer, TokenizerAdapter.from_pretrained(teacher))
  data = build_data.build_data(config, tokenizer, scans)
  if any(report.image_tokens != 0 for report in data.reports.values()):
    _check_images(config, folders)
  if not config.is_on_policy:
    return data
  convert = functools.partial(as_prompts, teachers=tuple(section.teachers))
  train, held_out = (
    None if part is None else part.map(convert)  # pyright: ignore
    for part in (data.train, data.eval)
  )
  named = {f"teachers.{name}": folder for name, folder in section.teachers.items()}
  prints = data.fingerprints | fingerprints.of_models(named)
  if (reads := section.teacher_tokenizer) is not None:
    files = fingerprints.of_tokenizer(reads, str(section.teacher))
    prints["teacher_tokenizer"] = fingerprints.digest((files, reads.chat_template))
  return dataclasses.replace(data, train=train, eval=held_out, fingerprints=prints)


def _check_images(config: DistillRun, teachers: Iterable[str]) -> None:
  """Refuses teachers that do not see the images of the records as the student does.

  Raises:
    ValueError: a teacher reads text alone, or has another image processor.
  """
  student = loading.ModelLoader(config).image_reader()
  for folder in filter(lambda name: not objects.is_name(name), teachers):
    reader = model_folders.image_reader(folder, config.model.images)
    if reader is None or student is None or reader.processor != student.processor:
      which = "no vision tower" if reader is None else "another image processor"
      raise ValueError(
        f"distill.teacher is {folder}, which has {which}, and the records have images; "
        "expected a teacher with the student's image processor. Choose a teacher of "
        "the student's family, or leave the images out of the records"
      )


def _build(run: Loaded) -> DistillationTrainer:
  """Builds the trainer and restores its checkpoint.

  Raises:
    FileNotFoundError, ValueError: the teacher is missing, does not fit the student, or
      is not the teacher of the cache.
  """
  config: DistillRun = run.config
  section = config.distill
  compared = strategy(config, calling.vocab_size(run.model) or _TOP_K)
  teacher = _teacher(run)
  if section.cache is not None:
    if run.of_shapes:
      raise ValueError(
        f"distill.cache is {section.cache!r}, which a plan cannot read. Leave it out: "
        "the plan then has the teacher's program that fills the cache"
      )
    assert isinstance(compared, LogitStrategy)  # checked by DistillSettings
    teacher = TeacherCache(
      section.cache,
      teacher,
      top_k=section.top_k,
      temperature=compared.how.temperature,
      data_sharding_axis=mesh_axes.data_axes(config.mesh),
    )
  options, logger = run.training_options(), run.logger()
  if config.is_on_policy:
    on_policy = _on_policy_options(config, **options)
    if run.of_shapes:  # steps in which the student writes take more memory and time
      on_policy = dataclasses.replace(on_policy, on_policy_fraction=1.0)
    return OnPolicyDistillationTrainer(
      run.model,
      teacher,
      compared,
      run.optimizer,
      on_policy,
      logger,
      tokenizer=run.tokenizer,
    )
  return DistillationTrainer(
    run.model, teacher, compared, run.optimizer, TrainingConfig(**options), logger
  )


def _teacher(run: Loaded) -> Any:
  """Loads the teacher, or the teachers; None if a cache alone has its outputs."""
  section = run.config.distill
  load = functools.partial(run.models.load, dtype=section.teacher_dtype)
  if section.teachers:
    return Teachers({name: load(folder) for name, folder in section.teachers.items()})
  if section.self_teacher == "initial":
    first = run.models.reference(None)
    return backbone.reference_of(run.model) if first is None else first
  if section.self_teacher is not None:
    rate = {} if section.average_rate is None else {"rate": section.average_rate}
    return SelfTeacher(weights=section.self_teacher, **rate)
  if section.teacher is None:
    return None
  teacher, reads = load(section.teacher), section.teacher_tokenizer
  return teacher if reads is None else TextTeacher(model=teacher, tokenizer=reads)


def _source(config: DistillRun) -> str:
  """Returns the words for the teacher in the lines of a run."""
  section = config.distill
  if section.self_teacher is not None:
    return f"itself ({section.self_teacher} weights) with a demonstration"
  return str(section.teacher or ", ".join(section.teachers) or section.cache)


def _batch(config: DistillRun) -> str:
  section = config.distill
  if config.is_on_policy:
    return (
      f"{terminal.counted(config.training.global_batch_size, 'prompt')} a step; in "
      f"{section.on_policy_fraction:.0%} of the steps the student writes, with at most "
      f"{terminal.counted(config.rollout.max_tokens_to_generate, 'token')}; taught by "
      f"{_source(config)}"
    )
  return f"{sft.rows(config)}, taught by {_source(config)}"


_ROLLOUT = length_of("rollout", "max_prompt_length", "max_tokens_to_generate")


def _length(config: DistillRun) -> tuple[str, int]:
  return _ROLLOUT(config) if config.is_on_policy else sft.row_length(config)


def _example(config: DistillRun) -> Any:
  """Returns a global batch of full rows, or of prompts for the student."""
  if not config.is_on_policy:
    return sft.example(config)
  return _prompts(config, config.rollout.max_prompt_length)


def _shorter(config: DistillRun) -> list[Any]:
  if not config.is_on_policy:
    return []
  sizes = config.rollout.max_prompt_length, config.rollout.max_tokens_to_generate
  return [_prompts(config, length) for length in batching.shorter_prompts(*sizes)]


def _prompts(config: DistillRun, length: int) -> Prompts:
  """Returns a global batch of prompts of one length, padded on the left."""
  width = config.rollout.max_prompt_length
  ids = np.zeros((config.training.global_batch_size, width), np.int32)
  mask = np.broadcast_to(np.arange(width) >= width - length, ids.shape)
  mask = mask.astype(ids.dtype)
  more: dict[str, Any] = {}
  if config.distill.teachers:
    more["teacher"] = np.arange(len(ids), dtype=np.int32) % len(config.distill.teachers)
  if config.distill.has_teacher_prompts:
    own = np.zeros((len(ids), config.distill.max_teacher_prompt_length), np.int32)
    more |= {"teacher_prompt_ids": own, "teacher_prompt_mask": np.ones_like(own)}
  return Prompts(prompt_ids=ids, prompt_mask=mask, **more)


DISTILL = Job(
  summary="distillation from a teacher",
  records=(SFT,),
  first_values={
    "data.max_length": 1024,
    "data.num_epochs": 3,
    "distill.teacher": "my-teacher",
  },
  settings=DistillRun,
  check=check,
  data=_build_data,
  build=_build,
  results={"loss": "loss"},
  batch=_batch,
  length=_length,
  rollout=lambda config: config.rollout if config.is_on_policy else None,
  example=_example,
  shorter=_shorter,
)
