"""One global batch gives one gradient, however it is cut and wherever it runs."""

import pytest

from tests import drills, toys
from tests.distillation import trainers
from tunix.distillation.strategies import (
  AttentionProjectionStrategy,
  FeaturePoolingStrategy,
  LogitStrategy,
)
from tunix.models.transformer.attention.layer import Attention
from tunix.models.transformer.decoder_layer import DecoderLayer

STRATEGIES = {
  "logit": lambda: LogitStrategy(divergence="jsd", beta=0.4),
  "top-k": lambda: LogitStrategy(distill_top_k=5),
  "pooling": lambda: FeaturePoolingStrategy(feature_layer=DecoderLayer),
  "projection": lambda: AttentionProjectionStrategy(attention_layer=Attention),
}


@pytest.mark.parametrize(
  ("name", "lora_rank"),
  [
    ("logit", 0),
    pytest.param("logit", 2, marks=pytest.mark.slow),
    pytest.param("top-k", 0, marks=pytest.mark.slow),
    pytest.param("pooling", 0, marks=pytest.mark.slow),
    pytest.param("projection", 2, marks=pytest.mark.slow),
    pytest.param("pooling", 2, marks=pytest.mark.slow),
    pytest.param("projection", 0, marks=pytest.mark.slow),
  ],
)
def test_split_invariance(name, lora_rank, mesh_fsdp8):
  drills.check_split_invariance(
    lambda parts: trainers.trainer(
      STRATEGIES[name](),
      student=toys.model(lora_rank=lora_rank),
      gradient_accumulation_steps=parts,
    ),
    whole := toys.batch(0, rows=32),
    toys.cut,
    packed=toys.packed(whole) if name == "logit" else None,
    meshes=(mesh_fsdp8,),
  )
