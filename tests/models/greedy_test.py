"""The engine continues texts as `transformers` does without a cache (goldens)."""

import numpy as np
import pytest

from tests.generate import toy_ids
from tests.models import checkpoints
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.models.automodel import AutoModel

NAMES = [name for name in checkpoints.NAMES if "greedy" in checkpoints.expected(name)]


@pytest.mark.parametrize("name", NAMES)
def test_two_samples_of_each_prompt(name):
  want = checkpoints.expected(name)
  model = AutoModel.from_pretrained(checkpoints.GOLDEN / name)
  config = EngineConfig(slots=4, max_tokens=48, prefill_tokens=16)
  engine = Engine(model, toy_ids.Ids(), config)
  prompts = [row[keep] for row, keep in zip(want["tokens"], want["mask"] == 1)]
  steps = want["greedy"].shape[1]
  rows = engine.run(
    [
      EngineRequest(prompt=prompt, max_tokens=steps, stop_ids=(), num_samples=2)
      for prompt in prompts
    ]
  )
  for samples, tokens in zip(rows, want["greedy"]):
    for sample in samples:
      np.testing.assert_array_equal(sample.tokens, tokens)
