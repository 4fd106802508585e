"""Distillation on samples of the student; the teacher scores every token.

A batch is a batch of prompts. The student samples completions with its weights at that
step, and is trained on them as on any other rows. With `LogitStrategy(divergence="jsd",
beta=..., alpha=1.0)` this is GKD (arXiv:2306.13649), whose lambda is
`on_policy_fraction`. `PolicyGradientStrategy` computes the reverse KL by its policy
gradient.

The teacher may read another prompt than the student, which has more to say. With the
student as that teacher this is self-distillation, see `teachers.SelfTeacher`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from tunix.data import render, rows
from tunix.data.chat import Rendered
from tunix.distillation import prompts as prompts_lib
from tunix.distillation.alignment import TextAlignment
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.prompts import Prompts as Prompts
from tunix.distillation.strategies.base_strategy import BaseStrategy
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.distillation.strategies.policy_gradient import (
  PolicyGradientStrategy,
  SpanScores,
)
from tunix.distillation.teacher_cache import TeacherCache
from tunix.distillation.teachers import SelfTeacher, Teachers, TextTeacher
from tunix.generate.drawing.params import SamplingParams
from tunix.generate.engine_sampler import sampler_of
from tunix.generate.tokenizer_adapter import adapted
from tunix.models import calling
from tunix.models.images.prompt_images import PromptImages
from tunix.perf.trace import NoopTracer
from tunix.sft import averages
from tunix.sft.loop import trainer_arguments
from tunix.sft.loop.trainer_arguments import Optimizer
from tunix.sft.losses import batch_fields
from tunix.sft.metrics_logger import MetricsLogger
from tunix.utils import checks, mesh as mesh_lib, terminal

_EVALUATION = 2**32 - 1  # the step number that seeds the samples of evaluations


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(SamplingParams, TrainingConfig):
  """Settings of an on-policy distillation, and the rules of the student's samples.

  Attributes:
    max_prompt_length: largest number of tokens of a prompt. A longer prompt keeps its
      BOS and its last tokens.
    max_completion_length: largest number of tokens that the student samples, and that
      are kept of a completion in the batch.
    on_policy_fraction: probability that the student samples the completions of a step
      (GKD's lambda). The other steps use the completions of the batch.
    sampling_temperature: the rule `temperature` of `SamplingParams`, above 0.
    max_teacher_prompt_length: largest number of tokens of a prompt that only the
      teacher reads; None: no such prompts. A longer one is an error, because a part of
      it would be another hint.
    seed: seed of all samples. They depend only on the seed and the step, so that a
      resumed run samples the same completions.
  """

  max_prompt_length: int
  max_completion_length: int
  on_policy_fraction: float = 1.0
  max_teacher_prompt_length: int | None = None
  sampling_temperature: float = 1.0
  temperature: float = dataclasses.field(init=False, default=1.0)
  seed: int = 0

  _keywords: ClassVar = {"temperature": "sampling_temperature"}

  def __post_init__(self):
    TrainingConfig.__post_init__(self)
    checks.fields(
      self,
      max_prompt_length=checks.COUNT,
      max_completion_length=checks.COUNT,
      max_teacher_prompt_length=checks.COUNT,
      on_policy_fraction=checks.SHARE,
      # At temperature 0 the completions would not be samples of the student.
      sampling_temperature=checks.POSITIVE,
    )
    SamplingParams.__post_init__(self)


class OnPolicyDistillationTrainer(DistillationTrainer):
  """Distils on completions that the student samples.

  A batch is a dict with "prompts" (texts or lists of token ids). If
  `on_policy_fraction` is below 1, it also has "completions": texts, or token ids if the
  prompts are ids. Texts become the same tokens as in fine-tuning, with an EOS at the
  end; ids are used unchanged. Evaluations use the completions of their batches, or
  sample them if there are none.

  If the batch has "teacher_prompts", texts or ids, the teacher reads them in place of
  the prompts, before the same completions. With `Teachers` a batch has "teachers".

  Prompts with images are ids with their soft tokens. The batch then has "images", the
  argument `images` of the model's call with one row for each prompt, and blank rows for
  prompts without images. Prompts of the teacher have the images of the same row.

  Args:
    student_model, strategy, optimizer: see DistillationTrainer.
    teacher_model: see DistillationTrainer; or a SelfTeacher, Teachers, or a
      TextTeacher.
    training_config: an OnPolicyConfig.
    metrics_logger, perf_tracer: see DistillationTrainer.
    tokenizer: tokenizer of the student, and of a teacher that is no TextTeacher: a
      TokenizerAdapter, or a tokenizer that one can wrap.
    tokenizers: see DistillationTrainer.

  Raises:
    TypeError: `training_config` is not an OnPolicyConfig.
    ValueError: a PolicyGradientStrategy gets tokens that are not samples of the
      student's distribution, a SelfTeacher or TextTeacher has no prompts of its
      own, a TextTeacher another strategy or a tokenizer that cannot be aligned, or see
      DistillationTrainer.
  """

  _teachers = (nnx.Module, TeacherCache, SelfTeacher, Teachers, TextTeacher)

  def __init__(
    self,
    student_model: nnx.Module,
    teacher_model: object,
    strategy: BaseStrategy,
    optimizer: Optimizer | None = None,
    training_config: OnPolicyConfig | None = None,
    metrics_logger: MetricsLogger | None = None,
    *,
    tokenizer: object,
    tokenizers: tuple[Any, Any] | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    if not isinstance(training_config, OnPolicyConfig):
      raise TypeError(
        f"training_config is {checks.type_of(training_config)}, expected an "
        "OnPolicyConfig(max_prompt_length=..., max_completion_length=...)"
      )
    _check_policy(strategy, training_config)
    _check_teacher(teacher_model, strategy, training_config)
    if isinstance(teacher_model, SelfTeacher) and teacher_model.weights == "average":
      own = trainer_arguments.resolve_optimizer(optimizer, training_config)
      optimizer = averages.averaging(own, teacher_model.rate)
    self.on_policy = training_config
    self._limits = rows.SideBySide(
      max_prompt_length=training_config.max_prompt_length,
      max_completion_length=training_config.max_completion_length,
    )
    self.sampler = sampler_of(student_model, tokenizer)
    soft = calling.config_value(student_model, "soft_token")
    self._soft_token = -1 if soft is None else soft  # no prompt has the id -1
    self._alignment = None
    if isinstance(teacher_model, TextTeacher):
      self._alignment = TextAlignment(
        self.sampler.tokenizer,
        adapted(teacher_model.tokenizer),
        training_config.eos_tokens or (),
      )
    super().__init__(
      student_model,
      teacher_model,
      strategy,
      optimizer,
      training_config,
      metrics_logger,
      tokenizers=tokenizers,
      perf_tracer=perf_tracer,
    )

  def _read(self, batch: object) -> Prompts:
    if isinstance(batch, Prompts):
      return batch
    fields = batch_fields(batch)
    if "prompts" not in fields:
      raise ValueError(
        f"the batch has {sorted(fields)}, without prompts: add texts or token ids "
        'under "prompts"'
      )
    prompts, completions = fields["prompts"], fields.get("completions")
    names = [] if completions is None else ["completion"]
    if completions is None:
      completions = [None] * len(prompts)
    if len(completions) != len(prompts):
      raise ValueError(
        f"the batch has {len(prompts)} prompts and {len(completions)} completions: "
        "give one for each"
      )
    pairs = enumerate(zip(prompts, completions))
    images = fields.get("images")
    rendered = [
      self._rendered(*pair, where=f"row {n}", may_cut=images is None)
      for n, pair in pairs
    ]
    columns = rows.columns(rendered, names, self._limits, pad_id=0)
    own = self._teacher_fields(fields, len(prompts))
    batch = Prompts(**columns, **own, images=images)
    self._check_images(batch)
    return batch

  def _check_images(self, batch: Prompts) -> None:
    """Refuses images that cannot be those of their prompts.

    Raises:
      ValueError: the images have another number of rows, prompts without images have
        soft tokens, or a teacher's prompt has others than its student's; or a teacher
        reads another tokenizer.
    """
    counts = np.sum(batch.prompt_ids == self._soft_token, axis=1)
    if batch.images is None:
      if np.any(counts):
        raise ValueError(
          f"row {np.flatnonzero(counts)[0]} has tokens of images (id "
          f'{self._soft_token}) and the batch no "images"; add them'
        )
      return
    if self._alignment is not None:
      raise ValueError(
        "the batch has images and teacher_model is a TextTeacher, which reads text "
        "alone; expected prompts without images"
      )
    sizes = {np.shape(x)[0] for x in jax.tree.leaves(batch.images) if np.ndim(x)}
    if sizes != {len(counts)}:
      raise ValueError(
        f"images have {sorted(sizes)} rows; expected {len(counts)}, one for each "
        "prompt, and blank ones where a prompt has none"
      )
    own = batch.teacher_prompt_ids
    if own is not None and not np.array_equal(
      counts, np.sum(own == self._soft_token, axis=1)
    ):
      raise ValueError(
        "a teacher's prompt has another number of tokens of images than its student's; "
        "expected equal ones, because both see the same images"
      )

  def _teacher_fields(self, fields: Any, count: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch that only the teacher reads."""
    out: dict[str, np.ndarray] = {}
    if not self._needs_teacher:
      return out
    if isinstance(self.teacher_model, Teachers):
      out["teacher"] = self.teacher_model.numbers(fields.get("teachers"), count)
    limit = self.on_policy.max_teacher_prompt_length
    prompts = fields.get("teacher_prompts")
    if (limit is None) != (prompts is None) or len(prompts or ()) not in (0, count):
      number = "no" if prompts is None else len(prompts)
      raise ValueError(
        f"the batch has {terminal.counted(count, 'prompt')} and {number} "
        "teacher_prompts, and "
        f"max_teacher_prompt_length is {limit}: set both, with one for each prompt, or "
        "neither"
      )
    if limit is None or prompts is None:
      return out
    ids = [self._teacher_ids(prompt) for prompt in prompts]
    if (longest := max(map(len, ids))) > limit:
      raise ValueError(
        f"a prompt of the teacher has {longest} tokens and max_teacher_prompt_length "
        f"is {limit}. Raise it, or leave the row out"
      )
    names = ("teacher_prompt_ids", "teacher_prompt_mask")
    return out | dict(zip(names, rows.stack_prompts(ids, limit, 0)))

  def _teacher_ids(self, prompt: Any) -> np.ndarray:
    if self._alignment is not None and isinstance(prompt, str):
      prompt = self._alignment.teacher.tokenize(prompt, add_eos=False)
    return np.asarray(self.sampler.tokenize(prompt), np.int32)

  def _prepare_inputs(self, batch: Prompts) -> Prompts:
    return batch  # the teacher scores it in _prepare_window, with its completions

  def _rendered(
    self, prompt: Any, completion: Any, *, where: str, may_cut: bool
  ) -> Rendered:
    """Tokenizes a prompt and its optional completion, within the limits.

    Raises:
      ValueError: the prompt is longer and must not be cut.
    """
    tokenizer, texts = self.sampler.tokenizer, (prompt, completion)
    if all(isinstance(text, str) for text in texts):
      row = render.tokenise(prompt, [completion], tokenizer, where=where, chat=False)
    else:  # the prompt is ids, or there is no completion
      ids = self.sampler.tokenize(prompt)
      completions = [] if completion is None else [completion]
      row = render.tokenise(ids, completions, tokenizer, where=where)
    if not may_cut and len(row.prompt) > self.on_policy.max_prompt_length:
      raise ValueError(
        f"{where}: the prompt has {len(row.prompt)} tokens and max_prompt_length is "
        f"{self.on_policy.max_prompt_length}; expected at most as many in a batch with "
        "images, whose tokens cannot be cut. Raise it, or leave the row out"
      )
    fitted = self._limits.fit(row, "truncate", tokenizer.bos_id())
    assert fitted is not None  # "truncate" drops no rows
    return fitted

  def _prepare_window(self, batches: list[Prompts]) -> list[Any]:
    step = _EVALUATION if self._evaluating else self.train_steps
    is_sampled = self._is_sampled(step, batches)
    first, out = 0, []
    for batch in batches:
      if is_sampled:
        batch = self._sampled(batch, step, first)
      first += len(batch.prompt_ids)
      out.append(super()._prepare_inputs(self._taught(batch)))
    return super()._prepare_window(out)

  def _taught(self, batch: Prompts) -> dict[str, Any]:
    """Returns the rows, with the output of a teacher that reads other rows."""
    if self._alignment is not None and self._needs_teacher:
      return self._taught_by_text(batch, self._alignment)
    rows_of = prompts_lib.joined(batch)
    seen = prompts_lib.seen_by_teacher(batch)
    if seen is None or not self._needs_teacher:
      return rows_of
    return rows_of | {"teacher_output": self._teacher_output(seen)}

  def _taught_by_text(self, batch: Prompts, alignment: TextAlignment) -> dict[str, Any]:
    ids, mask = batch.completion_ids, batch.completion_mask
    assert ids is not None and mask is not None
    readings = [alignment.read(row[own != 0]) for row, own in zip(ids, mask)]
    rows_of, seen, ends = prompts_lib.spanned(batch, readings, 2 * ids.shape[1])
    return rows_of | {"teacher_output": SpanScores(self._teacher_output(seen), ends)}

  @property
  def _needs_teacher(self) -> bool:
    return not self._evaluating or self.strategy.evaluates_with_teacher

  def _score(self, teacher: Any, batch: Any) -> Any:
    if isinstance(teacher, SelfTeacher):
      is_average = teacher.weights == "average"
      return super()._score(self._state.merged(average=is_average), batch)
    if isinstance(teacher, TextTeacher):
      return super()._score(teacher.model, batch)
    if not isinstance(teacher, Teachers):
      return super()._score(teacher, batch)
    rest, outs = dict(batch), []
    numbers = rest.pop(prompts_lib.TEACHER)
    for number, model in enumerate(teacher.models.values()):
      own = numbers == number
      # Several processes run every program together.
      if own.any() or jax.process_count() > 1:
        outs.append(super()._score(model, rest | {prompts_lib.OWN: own}))
    return functools.reduce(functools.partial(jax.tree.map, operator.add), outs)

  def _make_teacher_score(self) -> Callable[..., Any]:
    score = super()._make_teacher_score()

    def placed(model: nnx.Module, batch: object) -> Any:
      if not isinstance(batch, Mapping):
        return score(model, batch)
      names = (prompts_lib.PLACES, prompts_lib.OWN, prompts_lib.SPAN_ENDS)
      given = {name: batch[name] for name in names if name in batch}
      out = score(model, {k: x for k, x in batch.items() if k not in given})
      return jax.tree.map(functools.partial(prompts_lib.selected, **given), out)

    return placed

  def _is_sampled(self, step: int, batches: list[Prompts]) -> bool:
    """Returns True if the student samples the completions of this step."""
    have_completions = all(batch.completion_ids is not None for batch in batches)
    if self._evaluating:
      return not have_completions
    share = self.on_policy.on_policy_fraction
    if share < 1 and not have_completions:
      raise ValueError(
        f"on_policy_fraction is {share} and a batch has no completions for the other "
        'steps: add them under "completions", or set the fraction to 1'
      )
    # All processes must make the same choice, and so must a resumed run. The choice
    # therefore depends only on the seed and the step.
    return np.random.default_rng((self.on_policy.seed, step)).random() < share

  def _sampled(self, batch: Prompts, step: int, first: int) -> Prompts:
    """Adds the student's completions to a batch; `first` numbers its first prompt."""
    config = self.on_policy
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    self._module.hand_back()  # the sampler reads the weights of the caller's module
    pairs = zip(batch.prompt_ids, batch.prompt_mask)
    prompts = [ids[mask > 0] for ids, mask in pairs]
    with mesh_lib.off_planned():  # where no random key can be made
      out = self.sampler(
        prompts,
        config.max_completion_length,
        max_prompt_length=config.max_prompt_length,
        **{**config.rules(), "seed": key},
        include_eos=True,
        first_prompt=first,
        images=self._images(batch.images, prompts),
      )
    tokens = list(out.tokens)
    trained = [np.ones_like(ids) for ids in tokens]
    length = config.max_completion_length
    ids, mask = rows.stack_completions(tokens, trained, length, pad_id=0)
    return batch._replace(completion_ids=ids, completion_mask=mask)

  def _images(self, images: Any, prompts: list[np.ndarray]) -> list[Any] | None:
    """Returns the images of each prompt for the sampler."""
    if images is None:
      return None
    rows_of = [jax.tree.map(lambda x, n=n: x[n], images) for n in range(len(prompts))]
    counts = [int(np.sum(ids == self._soft_token)) for ids in prompts]
    return list(map(PromptImages.of_row, rows_of, counts))


def _check_policy(strategy: BaseStrategy, config: OnPolicyConfig) -> None:
  if not isinstance(strategy, PolicyGradientStrategy):
    return
  drawn = (config.on_policy_fraction, config.temperature)
  if drawn != (1, strategy.temperature) or config.filters:
    filters = "".join(f", {name}={value}" for name, value in config.filters.items())
    raise ValueError(
      f"PolicyGradientStrategy(temperature={strategy.temperature}) with "
      f"on_policy_fraction={drawn[0]}, sampling_temperature={drawn[1]}{filters}: its "
      "gradient is correct only for tokens sampled from the student's distribution at "
      "that temperature; set the fraction to 1, the temperatures equal, and no filter"
    )


def _check_teacher(
  teacher: object, strategy: BaseStrategy, config: OnPolicyConfig
) -> None:
  """Refuses a teacher or a prompt of its own that the strategy cannot use."""
  has_prompts = config.max_teacher_prompt_length is not None
  if isinstance(teacher, SelfTeacher | TextTeacher) and not has_prompts:
    raise ValueError(
      f"teacher_model is {checks.type_of(teacher)}, which reads prompts of its own, "
      "and max_teacher_prompt_length None. Set it, and add teacher_prompts to batches"
    )
  if isinstance(teacher, TeacherCache) and has_prompts:
    raise ValueError(
      "teacher_model is a TeacherCache and max_teacher_prompt_length is set: a cache "
      "has no rows with other prompts. Give the teacher's model"
    )
  moves = has_prompts or isinstance(teacher, SelfTeacher | Teachers)
  kinds = (PolicyGradientStrategy,)
  if not isinstance(teacher, TextTeacher):  # whose distributions are over other tokens
    kinds = (LogitStrategy, *kinds)
  if moves and not isinstance(strategy, kinds):
    raise ValueError(
      f"strategy is {type(strategy).__name__} and the teacher, with prompts of its own "
      f"or not a single model, {checks.type_of(teacher)}. Use "
      f"{' or '.join(kind.__name__ for kind in kinds)}"
    )
