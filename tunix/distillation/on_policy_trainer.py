"""On-policy distillation: the student writes, the teacher judges every token.

A batch is prompts; the student completes them with the weights that it has at that
step, and the rows train it like any others. With `LogitStrategy(divergence="jsd",
beta=..., alpha=1.0)` this is GKD (arXiv:2306.13649), its lambda is
`on_policy_fraction`; `PolicyGradientStrategy` is the other form.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from tunix.data import render, rows
from tunix.data.chat import Rendered
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.strategies.base_strategy import BaseStrategy
from tunix.distillation.strategies.policy_gradient import PolicyGradientStrategy
from tunix.generate.sampler import Sampler
from tunix.perf.trace import NoopTracer
from tunix.sft.losses import batch_fields
from tunix.sft.metrics_logger import MetricsLogger
from tunix.utils import checks

_EVALUATION = 2**32 - 1  # the "step" whose draws evaluations make


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(TrainingConfig):
  """Settings of an on-policy distillation.

  Attributes:
    max_prompt_length: tokens; of a longer prompt the end is kept, behind its BOS.
    max_completion_length: most tokens that the student writes, and that are kept of a
      given completion.
    on_policy_fraction: share of the steps whose completions the student writes, drawn
      step by step (GKD's lambda); the others take those of the batch.
    sampling_temperature: above 0.
    top_p, top_k: see `Sampler`; None is off.
    seed: of the draws; with the step it decides them all, so that a resumed run draws
      the same.
  """

  max_prompt_length: int
  max_completion_length: int
  on_policy_fraction: float = 1.0
  sampling_temperature: float = 1.0
  top_p: float | None = None
  top_k: int | None = None
  seed: int = 0

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self,
      max_prompt_length=checks.COUNT,
      max_completion_length=checks.COUNT,
      on_policy_fraction=checks.SHARE,
      # The most likely tokens alone are no sample of the student.
      sampling_temperature=checks.POSITIVE,
      top_k=checks.COUNT,
      top_p=checks.Range(0, 1, beyond=True),
      seed=checks.SEED,
    )


class Prompts(NamedTuple):
  """A batch as `data.rows.columns` lays it out, int32; completions may be missing.

  Attributes:
    prompt_ids, prompt_mask: [B, P], filled up on the left.
    completion_ids, completion_mask: [B, C], filled up on the right.
  """

  prompt_ids: np.ndarray
  prompt_mask: np.ndarray
  completion_ids: np.ndarray | None = None
  completion_mask: np.ndarray | None = None


class OnPolicyDistillationTrainer(DistillationTrainer):
  """Distils on completions that the student writes itself.

  Batches are dicts with "prompts" (texts or lists of ids) and, where on_policy_fraction
  is below 1, "completions" (texts, which end with an EOS, or ids; ids for prompts of
  ids). Texts become the tokens that fine-tuning trains; ids are taken as they are.
  Evaluations use the completions of their batches, or the student's if there are none.

  Args:
    student_model, teacher_model, strategy, optimizer: see DistillationTrainer.
    training_config: an OnPolicyConfig.
    metrics_logger, perf_tracer: see DistillationTrainer.
    tokenizer: of both models: a TokenizerAdapter, or what one can wrap.

  Raises:
    TypeError: a config of another kind.
    ValueError: a PolicyGradientStrategy with tokens that the student did not draw from
      its own distribution, or see DistillationTrainer.
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
    self.sampler = Sampler(student_model, tokenizer)
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
    return self._prepare_inputs(batch)

  def _prepare_inputs(self, batch: Any) -> Prompts:
    if isinstance(batch, Prompts):
      return batch
    fields = batch_fields(batch)
    if "prompts" not in fields:
      raise ValueError(
        f"the batch has {sorted(fields)}, without prompts: give texts or token ids "
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
    read = [self._rendered(*pair, where=f"row {n}") for n, pair in pairs]
    return Prompts(**rows.columns(read, names, self._limits, pad_id=0))

  def _rendered(self, prompt: Any, completion: Any, *, where: str) -> Rendered:
    """A prompt with its completion, or with none, as tokens within the limits."""
    tokenizer, texts = self.sampler.tokenizer, (prompt, completion)
    if all(isinstance(text, str) for text in texts):
      row = render.tokenise(prompt, [completion], tokenizer, where=where, chat=False)
    else:  # ids are taken as they are
      ids = self.sampler.tokenize(prompt)
      completions = [] if completion is None else [completion]
      row = render.tokenise(ids, completions, tokenizer, where=where)
    fitted = self._limits.fit(row, "truncate", tokenizer.bos_id())
    assert fitted is not None  # nothing is dropped
    return fitted

  def _prepare_window(self, batches: list[Prompts]) -> list[Any]:
    step = _EVALUATION if self._evaluating else self.train_steps
    writes = self._writes(step, batches)
    first, out = 0, []
    for batch in batches:
      if writes:
        batch = self._written(batch, step, first)
      first += len(batch.prompt_ids)
      out.append(super()._prepare_inputs(_joined(batch)))
    return super()._prepare_window(out)

  def _writes(self, step: int, batches: list[Prompts]) -> bool:
    """Whether the student writes the completions of this step."""
    have_completions = all(batch.completion_ids is not None for batch in batches)
    if self._evaluating:
      return not have_completions
    share = self.on_policy.on_policy_fraction
    if share < 1 and not have_completions:
      raise ValueError(
        f"on_policy_fraction is {share}, and a batch has no completions for the other "
        'steps: give them under "completions", or set the fraction to 1'
      )
    return np.random.default_rng((self.on_policy.seed, step)).random() < share

  def _written(self, batch: Prompts, step: int, first: int) -> Prompts:
    """The student's completions of prompts `first`, `first + 1`, ... of the step."""
    config = self.on_policy
    self._module.hand_back()  # the sampler reads the caller's module
    pairs = zip(batch.prompt_ids, batch.prompt_mask)
    out = self.sampler(
      [ids[mask > 0] for ids, mask in pairs],
      config.max_completion_length,
      max_prompt_length=config.max_prompt_length,
      temperature=config.sampling_temperature,
      top_p=config.top_p,
      top_k=config.top_k,
      seed=jax.random.fold_in(jax.random.key(config.seed), step),
      include_eos=True,
      first_prompt=first,
    )
    tokens = list(out.tokens)
    trained = [np.ones_like(ids) for ids in tokens]
    length = config.max_completion_length
    ids, mask = rows.stack_completions(tokens, trained, length, pad_id=0)
    return batch._replace(completion_ids=ids, completion_mask=mask)


def _joined(batch: Prompts) -> dict[str, np.ndarray]:
  """Prompt and completion behind each other from slot 0; the completion is trained."""
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
  drawn = (config.on_policy_fraction, config.sampling_temperature)
  filtered = config.top_p is not None or config.top_k is not None
  if drawn != (1, strategy.temperature) or filtered:
    raise ValueError(
      f"PolicyGradientStrategy(temperature={strategy.temperature}) with "
      f"on_policy_fraction={drawn[0]}, sampling_temperature={drawn[1]}, top_p="
      f"{config.top_p}, top_k={config.top_k}: its gradient is right for tokens drawn "
      "from the student's distribution at that temperature alone; set the fraction to "
      "1, the temperatures equal, and no filter"
    )
