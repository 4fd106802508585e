"""Distillation on samples of the student; the teacher scores every token.

A batch is a batch of prompts. The student samples completions with its weights at that
step, and is trained on them as on any other rows. With `LogitStrategy(divergence="jsd",
beta=..., alpha=1.0)` this is GKD (arXiv:2306.13649), whose lambda is
`on_policy_fraction`. `PolicyGradientStrategy` computes the reverse KL by its policy
gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from flax import nnx

from tunix.data import render, rows
from tunix.data.chat import Rendered
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.strategies.base_strategy import BaseStrategy
from tunix.distillation.strategies.policy_gradient import PolicyGradientStrategy
from tunix.generate.drawing.params import SamplingParams
from tunix.generate.engine_sampler import sampler_of
from tunix.perf.trace import NoopTracer
from tunix.sft.losses import batch_fields
from tunix.sft.metrics_logger import MetricsLogger
from tunix.utils import checks, mesh as mesh_lib

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
    seed: seed of all samples. They depend only on the seed and the step, so that a
      resumed run samples the same completions.
  """

  max_prompt_length: int
  max_completion_length: int
  on_policy_fraction: float = 1.0
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
      on_policy_fraction=checks.SHARE,
      # At temperature 0 the completions would not be samples of the student.
      sampling_temperature=checks.POSITIVE,
    )
    SamplingParams.__post_init__(self)


class Prompts(NamedTuple):
  """A batch of prompts in the layout of `data.rows.columns`; completions are optional.

  Attributes:
    prompt_ids, prompt_mask: int32 [B, P], padded on the left.
    completion_ids, completion_mask: int32 [B, C], padded on the right, or None.
  """

  prompt_ids: np.ndarray
  prompt_mask: np.ndarray
  completion_ids: np.ndarray | None = None
  completion_mask: np.ndarray | None = None


class OnPolicyDistillationTrainer(DistillationTrainer):
  """Distils on completions that the student samples.

  A batch is a dict with "prompts" (texts or lists of token ids). If
  `on_policy_fraction` is below 1, it also has "completions": texts, or token ids if the
  prompts are ids. Texts become the same tokens as in fine-tuning, with an EOS at the
  end; ids are used unchanged. Evaluations use the completions of their batches, or
  sample them if there are none.

  Args:
    student_model, teacher_model, strategy, optimizer: see DistillationTrainer.
    training_config: an OnPolicyConfig.
    metrics_logger, perf_tracer: see DistillationTrainer.
    tokenizer: tokenizer of both models: a TokenizerAdapter, or a tokenizer that one can
      wrap.
    tokenizers: see DistillationTrainer.

  Raises:
    TypeError: `training_config` is not an OnPolicyConfig.
    ValueError: a PolicyGradientStrategy gets tokens that are not samples of the
      student's distribution, or see DistillationTrainer.
  """

  def __init__(
    self,
    student_model: nnx.Module,
    teacher_model: nnx.Module,
    strategy: BaseStrategy,
    optimizer: Any = None,
    training_config: OnPolicyConfig | None = None,
    metrics_logger: MetricsLogger | None = None,
    *,
    tokenizer: Any,
    tokenizers: tuple[Any, Any] | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    if not isinstance(training_config, OnPolicyConfig):
      raise TypeError(
        f"training_config is a {type(training_config).__name__}, expected an "
        "OnPolicyConfig(max_prompt_length=..., max_completion_length=...)"
      )
    _check_policy(strategy, training_config)
    self.on_policy = training_config
    self._limits = rows.SideBySide(
      max_prompt_length=training_config.max_prompt_length,
      max_completion_length=training_config.max_completion_length,
    )
    self.sampler = sampler_of(student_model, tokenizer)
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

  def _read(self, batch: Any) -> Prompts:
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
    rendered = [self._rendered(*pair, where=f"row {n}") for n, pair in pairs]
    return Prompts(**rows.columns(rendered, names, self._limits, pad_id=0))

  def _prepare_inputs(self, batch: Prompts) -> Prompts:
    return batch  # the teacher scores it in _prepare_window, with its completions

  def _rendered(self, prompt: Any, completion: Any, *, where: str) -> Rendered:
    """Tokenizes a prompt and its optional completion, within the limits."""
    tokenizer, texts = self.sampler.tokenizer, (prompt, completion)
    if all(isinstance(text, str) for text in texts):
      row = render.tokenise(prompt, [completion], tokenizer, where=where, chat=False)
    else:  # the prompt is ids, or there is no completion
      ids = self.sampler.tokenize(prompt)
      completions = [] if completion is None else [completion]
      row = render.tokenise(ids, completions, tokenizer, where=where)
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
      out.append(super()._prepare_inputs(_joined(batch)))
    return super()._prepare_window(out)

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
    with mesh_lib.off_planned():  # where no random key can be made
      out = self.sampler(
        [ids[mask > 0] for ids, mask in pairs],
        config.max_completion_length,
        max_prompt_length=config.max_prompt_length,
        **{**config.rules(), "seed": key},
        include_eos=True,
        first_prompt=first,
      )
    tokens = list(out.tokens)
    trained = [np.ones_like(ids) for ids in tokens]
    length = config.max_completion_length
    ids, mask = rows.stack_completions(tokens, trained, length, pad_id=0)
    return batch._replace(completion_ids=ids, completion_mask=mask)


def _joined(batch: Prompts) -> dict[str, np.ndarray]:
  """Returns the tokens of each row without gaps; the completion is trained.

  Prompts are padded on the left and completions on the right. A stable sort by padding
  moves the tokens of both to the front of the row and keeps their order.
  """
  assert batch.completion_ids is not None and batch.completion_mask is not None
  mask = np.concatenate([batch.prompt_mask, batch.completion_mask], axis=1)
  ids = mask * np.concatenate([batch.prompt_ids, batch.completion_ids], axis=1)
  trained = mask.copy()
  trained[:, : batch.prompt_ids.shape[1]] = 0
  tokens_first = np.argsort(mask == 0, axis=1, kind="stable")
  move = lambda x: np.take_along_axis(x, tokens_first, axis=1)
  return {"input_tokens": move(ids), "input_mask": move(trained)}


def _check_policy(strategy: Any, config: OnPolicyConfig) -> None:
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
