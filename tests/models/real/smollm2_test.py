"""SmolLM2 135M, a real model, against the golden numbers of transformers and PEFT."""

import json

import jax
import numpy as np
import pytest

import tunix
from tests.models.real import smollm2
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter

pytestmark = [pytest.mark.slow, pytest.mark.real]


@pytest.fixture(scope="module")
def file():
  try:
    return smollm2.file()
  except smollm2.Missing as error:
    pytest.skip(str(error))


@pytest.fixture(scope="module")
def golden():
  return json.loads(smollm2.GOLDEN.read_text())


@pytest.fixture
def model(file):
  return tunix.AutoModel.from_pretrained(file, dtype="float32")


@pytest.mark.ci
def test_numbers_of_transformers_and_peft(file, golden, model, tmp_path):
  tokenizer = TokenizerAdapter.from_pretrained(file)
  ids = [tokenizer.encode(text) for text in smollm2.PROMPTS]
  assert ids == golden["ids"]
  # One program: a causal model's logits do not depend on the padding after a row.
  longest = max(map(len, ids))
  rows = np.array([row + [0] * (longest - len(row)) for row in ids], np.int32)
  logits = np.asarray(jax.jit(lambda tokens: model(tokens)[0])(rows))
  last = logits[np.arange(len(ids)), [len(row) - 1 for row in ids]]
  np.testing.assert_allclose(last[:, :: smollm2.EVERY], golden["logits"], atol=2e-3)

  assert golden["lead"] > 1e-2  # rounding decides no token
  out = Sampler(model, tokenizer)([np.array(ids[0])], smollm2.NEW_TOKENS)
  assert out.tokens[0].tolist() == golden["greedy"]

  adapter = tmp_path / "adapter"
  smollm2.write_adapter(adapter)
  records = [
    record | {"completion": record["completion"] + smollm2.END}
    for record in smollm2.RECORDS
  ]
  result = tunix.sft(
    model=tunix.load_adapter(model, adapter),
    tokenizer=str(file),
    data={"train": records * 2, "shuffle": False, "chat": False},
    learning_rate=smollm2.LEARNING_RATE,
    optimizer={"name": "adamw", "args": {"b2": 0.999, "weight_decay": 0.0}},
    global_batch_size=len(records),
    max_steps=2,
    max_length=32,
  )
  np.testing.assert_allclose(
    result.history["train/loss"][1], golden["losses"], rtol=1e-4
  )
