"""Every option of a call reaches an engine, or its answer, or is refused by name."""

import dataclasses

import pytest

from tests import toys_text
from tests.generate.fake_engine import FakeEngine
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.external.rows import filter_values
from tunix.generate.sglang_jax_sampler import SglangJaxSampler
from tunix.generate.vllm_async_driver import VllmAsyncDriver
from tunix.generate.vllm_sampler import VllmSampler
from tunix.models.images.prompt_images import PromptImages

TOKENIZER = toys_text.chat_tokenizer("chatml")
IDS = [*TOKENIZER.encode("The river runs"), TOKENIZER.eos_id()]
DRAW = {"temperature": 1.0}

# Another value, and what else has to be asked for with it.
OPTIONS = {
  "max_generation_steps": (30, {}),
  "max_prompt_length": (20, {}),
  "echo": (True, {}),
  "return_logits": (True, {}),
  "return_routes": (True, {}),
  "eos_tokens": ([3], {}),
  "forbidden_tokens": ([1], {}),
  "temperature": (0.5, {}),
  "top_p": (0.5, DRAW),
  "top_k": (3, DRAW),
  "min_p": (0.5, DRAW),
  "beam_size": (2, {}),
  "seed": (1, DRAW),
  "pad_output": (True, {}),
  "num_samples": (2, {}),
  "stop_strings": ("walks", {}),
  "return_logprobs": (True, {}),
  "include_eos": (True, {}),
  "length_penalty": (2.0, {"beam_size": 2}),
  "exact": (True, {"return_logprobs": True}),
  "first_prompt": (1, DRAW),
  "images": ([PromptImages(None, (1,), (b"a",))], {}),
  "engine_options": ({"regex": "a"}, {}),
}


def vllm(body):
  choice = {
    "token_ids": IDS,
    "logprobs": {"token_logprobs": [-1.0] * len(IDS)},
    "finish_reason": "stop",
    "stop_reason": IDS[-1],
  }
  return {"choices": [{"index": i, **choice} for i in range(body["n"])]}


def sglang(body):
  finish = {"type": "stop", "matched": IDS[-1]}
  known = [[-1.0, token, None] for token in IDS]
  return {"meta_info": {"output_token_logprobs": known, "finish_reason": finish}}


ANSWERS = {
  "/v1/models": {"data": [{"id": "toy"}]},
  "/v1/completions": vllm,
  "/get_model_info": {"is_generation": True},
  "/generate": sglang,
}


@pytest.fixture(scope="module")
def server():
  with FakeEngine(ANSWERS) as server:
    yield server


def outcome(server, sampler, options):
  """What the engine was asked and what came back; or why it was not asked."""
  server.asked.clear()
  try:
    out = sampler([[5]], **{"max_generation_steps": 20, **options})
  except ValueError as error:
    return str(error)
  return repr(server.asked) + repr(out)


@pytest.mark.parametrize(
  ("make", "draw"),
  [
    # Seeded where that is honored, or calls would differ by chance.
    (lambda url: VllmSampler(url, TOKENIZER, logprob_kind="raw"), {**DRAW, "seed": 0}),
    (lambda url: SglangJaxSampler(url, TOKENIZER), DRAW),
  ],
  ids=["vllm", "sglang_jax"],
)
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SamplingOptions)])
def test_no_option_is_passed_over(server, make, draw, name):
  value, needs = OPTIONS[name]
  base = {**draw, **needs} if needs is DRAW else needs
  sampler = make(server.url)
  asked = outcome(server, sampler, {**base, name: value})
  if "does not honor" in asked:
    assert name in asked or (name, "beam_size") == ("length_penalty", *needs)
  else:
    assert asked != outcome(server, sampler, base)


def test_a_filter_that_an_engine_does_not_have_is_refused():
  draws = {"max_generation_steps": 1, "temperature": 1.0}
  both = SamplingOptions(**draws, top_p=0.5, min_p=0.1)
  with pytest.raises(ValueError, match="Other does not honor min_p: leave that out"):
    filter_values(both, "Other", top_p=1.0, top_k=0)
  off = SamplingOptions(**draws, top_p=0.5, min_p=0.0)
  assert filter_values(off, "Other", top_p=1.0, top_k=0) == {"top_p": 0.5, "top_k": 0}


def test_futures_of_single_prompts(server):
  sampler = VllmSampler(server.url, TOKENIZER, logprob_kind="raw")
  with VllmAsyncDriver(sampler, max_inflight=3) as driver:
    futures = [driver.submit([5], 20, seed=seed) for seed in range(8)]
    wrong = driver.submit([5], 20, beam_size=2)
    assert [len(future.result().tokens) for future in futures] == [1] * 8
    with pytest.raises(ValueError, match="beam_size"):
      wrong.result()
  with pytest.raises(RuntimeError, match="shutdown"):
    driver.submit([5], 20)
  with pytest.raises(ValueError, match="max_inflight is 0"):
    VllmAsyncDriver(sampler, max_inflight=0)
