"""The contract with SGLang-JAX's HTTP interface, after the source of 0.0.1.post1. The
engine itself was asked once, see docs/guides/engines.md."""

import numpy as np
import pytest

from tests import toys, toys_text
from tests.generate.fake_engine import FakeEngine
from tunix.generate.external.rows import EngineError
from tunix.generate.sglang_jax_sampler import SglangJaxSampler
from tunix.models.automodel import AutoModel

TOKENIZER = toys_text.chat_tokenizer("chatml")
EOS = TOKENIZER.eos_id()
WORDS = TOKENIZER.encode("The river runs")
INFO = {"/get_model_info": {"is_generation": True, "model_path": "toy"}}


def completion(tokens, finish):
  known = [[-0.5 - i, token, None] for i, token in enumerate(tokens)]
  meta = {"output_token_logprobs": known, "finish_reason": finish}
  return {"text": "not used", "meta_info": meta}


def engine(answer=None, **more):
  answer = completion(WORDS, {"type": "length"}) if answer is None else answer
  return FakeEngine(INFO | {"/generate": answer} | more)


def sampler_of(server, **options):
  return SglangJaxSampler(server.url, TOKENIZER, timeout_s=30.0, **options)


def test_a_request_says_everything():
  with engine() as server:
    sampler_of(server)([[5, 6]], 3)
    (body,) = server.bodies("/generate")
  assert body == {
    "input_ids": [5, 6],
    "sampling_params": {
      "temperature": 0.0,
      "top_p": 1.0,
      "top_k": -1,
      "min_p": 0.0,
      "stop": [],
      "stop_token_ids": [EOS],
      "ignore_eos": False,
      "max_new_tokens": 3,
    },
    "return_logprob": True,
  }


@pytest.mark.parametrize(
  ("options", "fields"),
  [
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"temperature": 1.0, "top_p": 0.9}, {"top_p": 0.9}),
    ({"temperature": 1.0, "top_k": 3}, {"top_k": 3}),
    ({"temperature": 1.0, "min_p": 0.1}, {"min_p": 0.1}),
    ({"eos_tokens": []}, {"stop_token_ids": [], "ignore_eos": True}),
    ({"stop_strings": "walks"}, {"stop": ["walks"]}),
    ({"engine_options": {"regex": "a+"}}, {"regex": "a+"}),
  ],
)
def test_options_reach_the_request(options, fields):
  with engine() as server:
    sampler_of(server)([[5]], 3, **options)
    (body,) = server.bodies("/generate")
  assert {name: body["sampling_params"][name] for name in fields} == fields


def test_samples_come_group_by_group():
  def answer(body):
    steps = body["sampling_params"]["max_new_tokens"]
    return completion(body["input_ids"] * steps, {"type": "length"})

  with engine(answer) as server:
    out = sampler_of(server)([[5], [6]], [1, 2], num_samples=2, temperature=1.0)
  assert [x.tolist() for x in out.tokens] == [[5], [5], [6, 6], [6, 6]]


@pytest.mark.parametrize(
  ("tokens", "finish", "options", "reason", "text"),
  [
    (WORDS, {"type": "length"}, {}, "length", "The river runs"),
    ([*WORDS, EOS], {"type": "stop", "matched": EOS}, {}, "eos", "The river runs"),
    # The engine looks at the limit first.
    ([*WORDS, EOS], {"type": "length"}, {}, "eos", "The river runs"),
    (
      WORDS,
      {"type": "stop", "matched": "runs"},
      {"stop_strings": "runs"},
      "stop",
      None,
    ),
    (WORDS, {"type": "length"}, {"stop_strings": "runs"}, "stop", None),
    ([*WORDS, EOS], {"type": "length"}, {"eos_tokens": []}, "length", "The river runs"),
  ],
)
def test_why_a_row_ended(tokens, finish, options, reason, text):
  with engine(completion(tokens, finish)) as server:
    out = sampler_of(server)([[5]], len(tokens), **options)
  assert out.finish_reasons == [reason]
  assert out.text == ["The river " if text is None else text]


@pytest.mark.parametrize(
  ("options", "own", "drawn"),
  [
    ({}, -0.5, 0.0),
    ({"temperature": 1.0}, -0.5, -0.5),
    ({"temperature": 0.5}, None, -0.5),
    # Taken before the filters.
    ({"temperature": 1.0, "top_k": 3}, -0.5, None),
  ],
)
def test_log_probs_are_given_as_what_they_are(options, own, drawn):
  with engine() as server:
    out = sampler_of(server)([[5]], 9, return_logprobs=True, **options)
  found = [
    None if x is None else x[0][0] for x in (out.logprobs, out.sampling_logprobs)
  ]
  assert found == [own, drawn]


@pytest.mark.parametrize(
  ("options", "name"),
  [
    ({"return_logits": True}, "return_logits"),
    ({"forbidden_tokens": [1]}, "forbidden_tokens"),
    ({"beam_size": 2}, "beam_size"),
    ({"eos_tokens": [3]}, "eos_tokens"),
    ({"seed": 1, "temperature": 1.0}, "seed"),
    (
      {"return_logprobs": True, "temperature": 0.5, "top_k": 2},
      "return_logprobs of draws filtered by top_k",
    ),
  ],
)
def test_what_the_engine_does_not_honour_is_refused(options, name):
  with engine() as server, pytest.raises(ValueError, match=f"not honor {name}"):
    sampler_of(server)([[5]], 3, **options)


@pytest.mark.parametrize(
  ("answer", "message"),
  [
    ({"text": "a", "meta_info": {}}, "without output_token_logprobs"),
    ([], "without output_token_logprobs"),
    (completion([1], {"type": "abort"}), "{'type': 'abort'}"),
    (500, r"failed \(500\)"),
  ],
)
def test_an_answer_that_cannot_be_used_is_named(answer, message):
  with engine(answer) as server, pytest.raises(EngineError, match=message):
    sampler_of(server)([[5]], 3)


def test_a_model_that_does_not_generate_is_refused():
  classifier = {"/get_model_info": {"is_generation": False, "model_path": "toy"}}
  with (
    engine(**classifier) as server,
    pytest.raises(ValueError, match="serves toy"),
  ):
    sampler_of(server)


def test_engine_options_do_not_replace_arguments():
  with engine() as server, pytest.raises(ValueError, match=r"has \['n', 'top_k'\]"):
    sampler_of(server)([[5]], 3, engine_options={"n": 2, "top_k": 1})


def test_new_weights_need_a_restart(tmp_path):
  model, logits = toys.model(3), []
  with (
    engine() as old,
    engine(completion(WORDS[:1], {"type": "length"})) as new,
  ):

    def restart(folder):
      loaded = AutoModel.from_pretrained(folder)
      logits.append(loaded(np.ones((1, 4), np.int32))[0])
      return new.url

    with pytest.raises(ValueError, match="restart is None"):
      sampler_of(old).update_weights(model)
    sampler = sampler_of(old, restart=restart, weights_dir=tmp_path)
    assert sampler([[5]], 3).tokens[0].tolist() == WORDS
    sampler.update_weights(model)
    assert sampler([[5]], 3).tokens[0].tolist() == WORDS[:1]
  np.testing.assert_array_equal(logits[0], model(np.ones((1, 4), np.int32))[0])
  assert list(tmp_path.iterdir()) == []
