"""Every trainer takes a tracer and uses it."""

import pytest

from tests import optimizers, toys
from tests.distillation import trainers as distillation
from tests.generate.toy_ids import Ids
from tests.sft.dpo import preferences
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
)
from tunix.distillation.strategies import LogitStrategy
from tunix.models import heads
from tunix.perf.trace import PerfTracer
from tunix.sft.dpo.dpo_trainer import (
  DPOTrainer,
  DPOTrainingConfig,
  ORPOTrainer,
  ORPOTrainingConfig,
)
from tunix.sft.dpo.kto_trainer import KTOConfig, KTOTrainer
from tunix.sft.dpo.reward_trainer import RewardConfig, RewardTrainer

SHORT = {"pbar_description": None, "max_prompt_length": 8}
PAIRS = {**SHORT, "max_response_length": 6}


def dpo(**options):
  config = DPOTrainingConfig(**PAIRS)
  models = preferences.model(), preferences.model(1)
  return DPOTrainer(*models, optimizers.sgd(0.1), config, **options)


def orpo(**options):
  config = ORPOTrainingConfig(**PAIRS)
  return ORPOTrainer(preferences.model(), None, optimizers.sgd(0.1), config, **options)


def kto(**options):
  models = preferences.model(), preferences.model(1)
  return KTOTrainer(*models, optimizers.sgd(0.1), KTOConfig(**PAIRS), **options)


def reward(**options):
  model = heads.with_scores(preferences.model())
  return RewardTrainer(model, optimizers.sgd(0.1), RewardConfig(**PAIRS), **options)


def distilled(**options):
  config = TrainingConfig(pbar_description=None)
  models = toys.model(), distillation.teacher()
  return DistillationTrainer(
    *models, LogitStrategy(), optimizers.sgd(0.1), config, **options
  )


def on_policy(**options):
  return OnPolicyDistillationTrainer(
    toys.model(),
    distillation.teacher(),
    LogitStrategy(),
    optimizers.sgd(0.1),
    OnPolicyConfig(**SHORT, max_completion_length=6),
    tokenizer=Ids(),
    **options,
  )


@pytest.mark.parametrize("make", [dpo, orpo, kto, reward, distilled, on_policy])
def test_a_trainer_uses_its_tracer(make):
  tracer = PerfTracer()
  trainer = make(perf_tracer=tracer)
  assert trainer.perf_tracer is tracer


def test_what_a_reference_says_is_prepared():
  spans = []

  def export(query):
    spans.extend(query.main().all_groups("data").get())
    return {}

  dpo(perf_tracer=PerfTracer(export_fn=export)).train([preferences.pairs()])
  assert [inner.name for span in spans for inner in span.inner] == ["prepare"]
