"""The contract with vLLM's HTTP interface, as vLLM 0.32 keeps it: the fake gives what
that version gave. tests/engines/vllm_test.py asks the real one."""

import time

import numpy as np
import pytest

from tests import toys, toys_text
from tests.generate.fake_engine import FakeEngine
from tunix.generate.external.http import Refused
from tunix.generate.external.rows import EngineError
from tunix.generate.vllm_sampler import VllmSampler
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained

TOKENIZER = toys_text.chat_tokenizer("chatml")
EOS = TOKENIZER.eos_id()
WORDS = TOKENIZER.encode("The river runs")
SERVED = {"data": [{"id": "toy"}]}


def info(mode):
  return {"vllm_config": {"model_config": {"logprobs_mode": mode}}}


def choice(tokens, index=0, reason="length", why=None, logprobs=None):
  """A completion; its log-probs are -0.5, -1.5, ... unless others are given."""
  known = [-0.5 - i for i in range(len(tokens))] if logprobs is None else logprobs
  return {
    "index": index,
    "text": "the engine's own text is not used",
    "token_ids": tokens,
    "logprobs": {"token_logprobs": known},
    "finish_reason": reason,
    "stop_reason": why,
  }


def engine(*choices, mode="raw_logprobs", **answers):
  known = {
    "/v1/models": SERVED,
    "/server_info?config_format=json": info(mode),
    "/v1/completions": {"choices": list(choices)},
  }
  return FakeEngine(known | answers)


def sampler_of(server, **options):
  return VllmSampler(server.url, TOKENIZER, timeout_s=30.0, **options)


def test_a_request_says_everything():
  with engine(choice([1, 2])) as server:
    sampler_of(server)([[5, 6], [7]], [3, 4], return_logprobs=True)
    bodies = sorted(server.bodies("/v1/completions"), key=lambda b: b["max_tokens"])
  assert bodies[0] == {
    "model": "toy",
    "prompt": [5, 6],
    "max_tokens": 3,
    "n": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": [],
    "stop_token_ids": [EOS],
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": 0,
  }
  assert (bodies[1]["prompt"], bodies[1]["max_tokens"]) == ([7], 4)


@pytest.mark.parametrize(
  ("options", "fields"),
  [
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"temperature": 1.0, "top_p": 0.9}, {"top_p": 0.9}),
    ({"temperature": 1.0, "top_k": 3}, {"top_k": 3}),
    ({"temperature": 1.0, "min_p": 0.1}, {"min_p": 0.1}),
    ({"eos_tokens": [3, 4]}, {"stop_token_ids": [3, 4]}),
    ({"eos_tokens": []}, {"stop_token_ids": []}),
    ({"stop_strings": "runs"}, {"stop": ["runs"]}),
    ({"engine_options": {"min_tokens": 2}}, {"min_tokens": 2}),
  ],
)
def test_options_reach_the_request(options, fields):
  with engine(choice([1])) as server:
    sampler_of(server)([[5]], 3, **options)
    (body,) = server.bodies("/v1/completions")
  assert {name: body[name] for name in fields} == fields
  assert "logprobs" not in body


def test_seeds_are_of_the_call_and_of_the_prompt():
  def drawn(seed, **more):
    with engine(choice([1])) as server:
      sampler_of(server)([[5], [6]], 3, temperature=1.0, seed=seed, **more)
      bodies = server.bodies("/v1/completions")
    return [b["seed"] for b in sorted(bodies, key=lambda b: b["prompt"])]

  assert drawn(1) == drawn(1)
  assert len({*drawn(1), *drawn(2), *drawn(None), *drawn(None)}) == 8
  assert all(0 <= seed < 2**62 for seed in drawn(3))
  assert drawn(3, first_prompt=1)[0] == drawn(3)[1]


def test_text_and_tokens_are_what_our_sampler_would_give():
  with engine(choice([*WORDS, EOS], reason="stop", why=EOS)) as server:
    sampler = sampler_of(server)
    plain = sampler(["hello"], 8, return_logprobs=True)
    whole = sampler(["hello"], 8, include_eos=True, return_logprobs=True)
    padded = sampler(["hello"], 8, pad_output=True, return_logprobs=True)
    echoed = sampler(["hello"], 8, echo=True)
  assert plain.text == ["The river runs"]
  assert plain.tokens[0].tolist() == WORDS and plain.tokens[0].dtype == np.int32
  assert plain.finish_reasons == ["eos"]
  assert plain.logprobs[0].tolist() == [-0.5 - i for i in range(len(WORDS))]
  assert plain.padded_prompt_tokens.shape == (1, 16)
  assert whole.text == plain.text and whole.tokens[0].tolist() == [*WORDS, EOS]
  assert len(whole.logprobs[0]) == len(WORDS) + 1
  filled = [*WORDS, *[TOKENIZER.pad_id() or 0] * (8 - len(WORDS))]
  assert padded.tokens.tolist() == [filled]
  assert padded.logprobs.shape == (1, 8) and padded.logprobs[0, -1] == 0
  assert echoed.text == ["helloThe river runs"]
  assert echoed.tokens[0].tolist() == [
    *TOKENIZER.tokenize("hello", add_eos=False),
    *WORDS,
  ]


def test_a_stop_string_ends_the_text_and_stays_in_the_tokens():
  with engine(choice(WORDS, reason="stop", why="runs")) as server:
    out = sampler_of(server)([[5]], 8, stop_strings=["runs"])
    assert out.text == ["The river "]
    assert out.tokens[0].tolist() == WORDS and out.finish_reasons == ["stop"]
    # The engine's text may differ from ours: that it stopped is a fact.
    out = sampler_of(server)([[5]], 8, stop_strings=["walks"])
    assert (out.text, out.finish_reasons) == (["The river runs"], ["stop"])


def test_samples_come_group_by_group():
  def answer(body):
    first = body["prompt"][0]
    return {
      "choices": [choice([first, i], index=i) for i in reversed(range(body["n"]))]
    }

  with engine(**{"/v1/completions": answer}) as server:
    sampler = sampler_of(server)
    drawn = sampler([[5], [6]], 2, num_samples=2, temperature=1.0)
    greedy = sampler([[5], [6]], 2, num_samples=2)
    assert {b["n"] for b in server.bodies("/v1/completions")} == {1, 2}
  assert [x.tolist() for x in drawn.tokens] == [[5, 0], [5, 1], [6, 0], [6, 1]]
  assert [x.tolist() for x in greedy.tokens] == [[5, 0], [5, 0], [6, 0], [6, 0]]
  assert drawn.padded_prompt_tokens[:, -1].tolist() == [5, 5, 6, 6]


@pytest.mark.parametrize(
  ("mode", "options", "own", "drawn"),
  [
    ("raw_logprobs", {"temperature": 1.0}, -0.5, -0.5),
    ("raw_logprobs", {"temperature": 0.5}, -0.5, None),
    ("raw_logprobs", {"temperature": 1.0, "top_k": 2}, -0.5, None),
    ("raw_logprobs", {}, -0.5, 0.0),
    ("processed_logprobs", {"temperature": 1.0}, -0.5, -0.5),
    ("processed_logprobs", {"temperature": 0.5}, None, -0.5),
    ("processed_logprobs", {"temperature": 1.0, "min_p": 0.2}, None, -0.5),
    ("processed_logprobs", {}, -0.5, 0.0),
  ],
)
def test_log_probs_are_given_as_what_they_are(mode, options, own, drawn):
  with engine(choice([1]), mode=mode) as server:
    out = sampler_of(server)([[5]], 1, return_logprobs=True, **options)
    without = sampler_of(server)([[5]], 1, **options)
  found = [
    None if x is None else x[0][0] for x in (out.logprobs, out.sampling_logprobs)
  ]
  assert found == [own, drawn]
  assert without.logprobs is None and without.sampling_logprobs is None


def test_the_kind_of_log_probs_must_be_known():
  silent = {"/server_info?config_format=json": 404}
  with engine(choice([1]), **silent) as server:
    with pytest.raises(ValueError, match=r"Give logprob_kind=.*DEV_MODE=1"):
      sampler_of(server)
    assert sampler_of(server, logprob_kind="processed").logprob_kind == "processed"
  with (
    engine(mode="raw_logits") as server,
    pytest.raises(ValueError, match="gives raw_logits: start it with"),
  ):
    sampler_of(server)


@pytest.mark.parametrize(
  ("options", "name"),
  [
    ({"return_logits": True}, "return_logits"),
    ({"forbidden_tokens": [1]}, "forbidden_tokens"),
    ({"beam_size": 2}, "beam_size"),
  ],
)
def test_what_vllm_does_not_honour_is_refused(options, name):
  with engine() as server, pytest.raises(ValueError, match=f"not honor {name}"):
    sampler_of(server)([[5]], 3, **options)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda s: s([], 3), "no prompts"),
    (lambda s: s([[5, 6]], 3, 1), "max_prompt_length is 1"),
    (lambda s: s([[5]], 0), "max_generation_steps is 0"),
    (lambda s: s([[5]], 3, engine_options={"n": 2}), r"engine_options has \['n'\]"),
  ],
)
def test_calls_that_make_no_sense_are_refused(call, message):
  with engine() as server, pytest.raises(ValueError, match=message):
    call(sampler_of(server))
  with engine() as server:
    assert server.bodies("/v1/completions") == []


@pytest.mark.parametrize(
  ("answer", "message"),
  [
    ({"choices": []}, "not 1 completions"),
    ([], "not 1 completions"),
    (
      {"choices": [choice([1]) | {"token_ids": None}]},
      "does not know return_token_ids",
    ),
    ({"choices": [choice([1], reason="abort")]}, "'abort', neither stop nor length"),
    ({"choices": [choice([1, 2], logprobs=[-1.0])]}, "1 log-probs for 2 tokens"),
    (b"<html>", "is not JSON"),
    (500, r"failed \(500\): no such thing"),
  ],
)
def test_an_answer_that_cannot_be_used_is_named(answer, message):
  with (
    engine(**{"/v1/completions": answer}) as server,
    pytest.raises(EngineError, match=message),
  ):
    sampler_of(server)([[5]], 3, return_logprobs=True)


def test_what_the_server_refuses_is_said_in_its_words():
  with (
    engine(**{"/v1/completions": 400}) as server,
    pytest.raises(Refused, match="refuses: no such thing as /v1/completions"),
  ):
    sampler_of(server)([[5]], 3)


def test_a_dead_engine_is_named():
  with engine(choice([1])) as server:
    sampler = sampler_of(server)
  with pytest.raises(EngineError, match=r"gives no answer \(ConnectionRefused"):
    sampler([[5]], 3)
  with pytest.raises(EngineError, match="that the engine is running"):
    sampler_of(server)


def test_an_engine_that_hangs_is_given_up():
  hang = {"/v1/completions": lambda body: time.sleep(3600)}
  with engine(**hang) as server:
    sampler = VllmSampler(server.url, TOKENIZER, timeout_s=0.5)
    with pytest.raises(EngineError, match=r"did not answer within 0.5 s"):
      sampler([[5]], 3)


def test_the_model_must_be_the_one_that_is_served():
  with engine(**{"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}}) as server:
    assert sampler_of(server, model="b").model == "b"
    for wrong in (None, "c"):
      with pytest.raises(ValueError, match=r"serves \['a', 'b'\], not"):
        sampler_of(server, model=wrong)


def test_an_address_of_another_kind_is_refused():
  with pytest.raises(ValueError, match="give http://host:port"):
    VllmSampler("localhost:8000", TOKENIZER)


def test_new_weights_reach_the_server(tmp_path):
  model, seen = toys.model(3), []

  def load(body):
    assert body["method"] == "reload_weights"
    folder = body["kwargs"]["weights_path"]
    loaded = AutoModel.from_pretrained(folder)
    seen.append((folder, loaded(np.ones((1, 4), np.int32))[0]))
    return {"results": [None]}

  answers = {"/collective_rpc": load, "/reset_prefix_cache": {"success": True}}
  with engine(**answers) as server:
    sampler = sampler_of(server, weights_dir=tmp_path)
    sampler.update_weights(model)
    save_pretrained(model, tmp_path / "own")
    sampler.update_weights(tmp_path / "own")
    paths = [path for path, _ in server.asked]
  assert paths[-4:] == ["/collective_rpc", "/reset_prefix_cache"] * 2
  expected = model(np.ones((1, 4), np.int32))[0]
  for _, logits in seen:
    np.testing.assert_array_equal(logits, expected)
  assert seen[0][0].startswith(str(tmp_path)) and seen[1][0] == str(tmp_path / "own")
  assert [p.name for p in tmp_path.iterdir()] == ["own"]  # ours is gone


def test_weights_that_do_not_arrive_are_an_error(tmp_path):
  save_pretrained(toys.model(), tmp_path / "weights")
  folder = tmp_path / "weights"
  with engine() as server, pytest.raises(FileNotFoundError, match="no safetensors"):
    sampler_of(server).update_weights(tmp_path / "none")
  with engine() as server, pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE=1"):
    sampler_of(server).update_weights(folder)
  failing = engine(**{"/collective_rpc": 500})
  with failing as server, pytest.raises(EngineError, match=r"failed \(500\)"):
    sampler_of(server).update_weights(folder)
  kept = {
    "/collective_rpc": {"results": [None]},
    "/reset_prefix_cache": {"success": False},
  }
  with (
    engine(**kept) as server,
    pytest.raises(EngineError, match="prefix cache still has"),
  ):
    sampler_of(server).update_weights(folder)
