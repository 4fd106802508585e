"""The head of the distribution that tokens are drawn from, as the engine records it."""

import numpy as np
import pytest

from tests import toys
from tests.generate.toy_ids import Ids
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest

SIZES = {"slots": 2, "max_tokens": 24, "page_tokens": 4, "prefill_tokens": 8}


@pytest.fixture(scope="module")
def engine():
  made = Engine(toys.model(num_layers=1), Ids(), EngineConfig(**SIZES, record_head=3))
  yield made
  made.close()


def drawn(engine, **rules):
  rules = {"temperature": 1.0, "seed": 3, "logprobs": True, "stop_ids": ()} | rules
  prompt = np.arange(1, 6, dtype=np.int32)
  (rows,) = engine.run(
    [EngineRequest(prompt=prompt, max_tokens=5, num_samples=2, **rules)]
  )
  return rows


def test_at_temperature_1_it_is_the_head_of_the_model(engine):
  for row in drawn(engine, top_logprobs=3):
    np.testing.assert_array_equal(row.head_ids, row.top_ids)
    np.testing.assert_allclose(row.head_probs, np.exp(row.top_logps), rtol=1e-5)


def test_temperature_and_filters_are_those_of_the_draw(engine):
  for row in drawn(engine, temperature=0.7, top_k=2):
    assert (row.head_probs[:, 2] == 0).all()  # kept: two tokens
    np.testing.assert_allclose(row.head_probs.sum(1), 1, rtol=1e-5)
    at = row.head_ids == row.ids[:, None]
    assert (at[:, :2].sum(1) == 1).all()
    got = np.where(at[:, :2], row.head_probs[:, :2], 0).sum(1)
    np.testing.assert_allclose(got, np.exp(row.sampling_logps), rtol=1e-5)


def test_greedy_tokens_and_requests_without_scores_have_none(engine):
  assert not any(row.head_probs.any() for row in drawn(engine, temperature=0.0))
  assert all(row.head_ids is None for row in drawn(engine, logprobs=False))
