import types

import pytest

from tests.serve.fake_engine import FakeEngine, logprob
from tests.serve.serving import error_of, server
from tunix.serve.openai.logprobs import Offsets

PROMPT = [60, 61, 62, 63]


@pytest.mark.parametrize("rounds", [1, 2, 50])
def test_log_probabilities_of_characters_in_several_tokens(rounds):
  text = "naïve \U0001f600\U0001f601 日本 and \ufffd on"
  with server(FakeEngine(text=text, rounds=rounds)) as made:
    body = {"prompt": PROMPT, "max_tokens": 99, "logprobs": 1}
    whole = made.post("/v1/completions", body).json()["choices"][0]
    parts = [e["choices"][0] for e in made.events("/v1/completions", body)]
    messages = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    chat = made.post("/v1/chat/completions", messages).json()["choices"][0]
  *data, _ = [bytes(x["bytes"]) for x in chat["logprobs"]["content"]]
  assert b"".join(data) == text.encode() and len(data) > len(text)
  # The place of a token is the number of characters that end before it.
  before = [b"".join(data[:i]).decode(errors="ignore") for i in range(len(data) + 1)]
  offsets = list(map(len, before))
  assert whole["text"] == text and whole["logprobs"]["text_offset"] == offsets
  assert [x for part in parts for x in part["logprobs"]["text_offset"]] == offsets
  assert all(text.startswith(some) for some in before)


@pytest.mark.parametrize(
  "tokens, places",
  [
    ([b"\xe2", b"x", b"y"], [0, 1, 2]),
    ([b"\xe2\x82", b"\xe2\x82", b"\xac!", b"x"], [0, 1, 1, 3]),
    ([b"\xf0\x9f", b"", b"\x98\x80", b"\x80", b"x"], [0, 0, 0, 1, 2]),
    ([b"a\xe2", b"\xff\xe2", b"xy", b"z"], [0, 2, 4, 6]),
  ],
)
def test_places_of_broken_characters(tokens, places):
  offsets = Offsets(types.SimpleNamespace(shown=tokens.__getitem__))
  assert list(map(offsets.push, range(len(tokens)))) == places
  text = b"".join(tokens).decode(errors="replace")
  assert text[places[-1] :] == tokens[-1].decode()


@pytest.fixture(scope="module")
def running():
  with server() as made:
    yield made


def complete(running, **body):
  answer = running.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, **body})
  assert answer.status_code == 200, answer.text
  return answer.json()


def drawn(prompt, count, sample=0, seed=0):
  """The tokens that the fake engine draws."""
  first = sum(prompt) + sample + seed
  return [40 + (first + 7 * i) % 400 for i in range(count)]


def test_text_tokens_and_usage(running):
  body = complete(running, return_token_ids=True, n=2)
  decode = running.engine.tokenizer.decode
  for sample, choice in enumerate(body["choices"]):
    tokens = drawn(PROMPT, 5, sample)
    assert choice["index"] == sample
    assert choice["token_ids"] == tokens and choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == decode(tokens) and choice["finish_reason"] == "length"
  assert body["object"] == "text_completion" and body["model"] == "default"
  assert body["usage"]["prompt_tokens"] == 4
  assert body["usage"]["completion_tokens"] == 10
  assert body["usage"]["total_tokens"] == 14


def test_every_form_of_a_prompt(running):
  text = "The river runs"
  ids = running.engine.tokenizer.encode(text, add_special_tokens=True)
  one = complete(running, prompt=text)["choices"]
  assert one[0]["text"] == complete(running, prompt=ids)["choices"][0]["text"]
  many = complete(running, prompt=[text, "hello"])["choices"]
  assert [choice["index"] for choice in many] == [0, 1]
  assert many[0]["text"] == one[0]["text"] != many[1]["text"]
  lists = complete(running, prompt=[ids, PROMPT], n=2)["choices"]
  assert [choice["index"] for choice in lists] == [0, 1, 2, 3]
  assert lists[2]["text"] == complete(running)["choices"][0]["text"]


def test_logprobs_as_lm_eval_reads_them(running):
  prompt = [60, 61, 62, 65]
  body = complete(
    running,
    prompt=prompt,
    max_tokens=1,
    logprobs=1,
    echo=True,
    temperature=0,
    seed=1234,
  )
  found = body["choices"][0]["logprobs"]
  new = drawn(prompt, 1, seed=1234)
  decode = running.engine.tokenizer.decode
  assert body["choices"][0]["text"] == decode(prompt) + decode(new)
  assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
  expected = [logprob(token) for token in [*prompt[1:], *new]]
  assert found["token_logprobs"][1:] == pytest.approx(expected)
  # lm-eval: a token is the greedy one if its number is the largest of its position.
  greedy = [
    number == max(top.values())
    for number, top in zip(found["token_logprobs"][1:-1], found["top_logprobs"][1:-1])
  ]
  assert greedy == [False, True, False]  # even ids are the most likely ones
  assert len(found["tokens"]) == len(found["text_offset"]) == 5
  assert "".join(found["tokens"]) == body["choices"][0]["text"]


def test_echo_without_new_tokens_scores_the_prompt(running):
  body = complete(running, prompt="hello there", max_tokens=0, echo=True, logprobs=0)
  choice = body["choices"][0]
  assert choice["text"] == "hello there" and choice["finish_reason"] == "length"
  assert "".join(choice["logprobs"]["tokens"]) == "hello there"
  assert choice["logprobs"]["top_logprobs"] is None
  assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_as_vllm_writes_them(running):
  body = complete(
    running, prompt_logprobs=1, return_tokens_as_token_ids=True, logprobs=2
  )
  choice = body["choices"][0]
  first, second = choice["prompt_logprobs"][:2]
  assert first is None and set(second) == {"60", "61"}
  assert second["61"]["rank"] is None and second["60"]["rank"] == 1
  tokens = drawn(PROMPT, 5)
  assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]


def test_a_stream_is_the_answer_in_parts(running):
  body = {"prompt": PROMPT, "max_tokens": 8, "n": 2, "logprobs": 1, "echo": True}
  whole = complete(running, **body)
  events = running.events(
    "/v1/completions", {**body, "stream_options": {"include_usage": True}}
  )
  assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
  for choice in whole["choices"]:
    parts = [e["choices"][0] for e in events[:-1]]
    parts = [part for part in parts if part["index"] == choice["index"]]
    assert len(parts) == 3  # 8 tokens, 3 of them at a time
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == "length"
    assert {part["finish_reason"] for part in parts[:-1]} == {None}
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
      joined = [item for part in parts for item in part["logprobs"][key]]
      assert joined == choice["logprobs"][key], key
  assert all(event["usage"] is None for event in events[:-1])


def test_fields_reach_the_engine(running):
  complete(
    running,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    seed=2**40 + 5,
    stop=["zz"],
    stop_token_ids=[3],
    logit_bias={"5": -100},
    priority=-2,
    user="a",
  )
  request = running.engine.submitted[-1]
  assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 7)
  assert request.min_p == 0.1 and request.seed == 5 and request.priority == -2
  assert request.stop_strings == ("zz",) and request.logit_bias == {5: -100.0}
  assert request.stop_ids == (*running.engine.tokenizer.eos_ids(), 3)
  complete(running, temperature=0, top_p=0.9, ignore_eos=True)
  request = running.engine.submitted[-1]
  assert request.temperature == 0 and request.top_p is None and request.stop_ids == ()


def test_the_default_number_of_tokens_fits(running):
  for size, count in ((4, 16), (250, 6)):
    body = complete(running, prompt=[1] * size, max_tokens=None)
    assert body["usage"]["completion_tokens"] == count


def test_stop_and_end_tokens():
  with server(FakeEngine(text="the sea is deep")) as made:
    whole = complete(made, max_tokens=50)["choices"][0]
    assert whole["text"] == "the sea is deep" and whole["finish_reason"] == "stop"
    cut = complete(made, max_tokens=50, stop=" is")["choices"][0]
    assert cut["text"] == "the sea" and cut["finish_reason"] == "stop"


BAD = {
  "prompt is missing": ({"prompt": None}, "prompt"),
  "prompt is a number": ({"prompt": 5}, "prompt"),
  "prompt has no tokens": ({"prompt": []}, "prompt"),
  "prompt has an empty list": ({"prompt": [[]]}, "prompt"),
  "prompt mixes": ({"prompt": ["a", [1]]}, "prompt"),
  "prompt has booleans": ({"prompt": [True]}, "prompt"),
  "prompt is too long": ({"prompt": [1] * 300}, "max_tokens"),
  "too many tokens": ({"max_tokens": 253}, "max_tokens"),
  "id outside the vocabulary": ({"prompt": [600]}, None),
  "no tokens": ({"max_tokens": 0}, "max_tokens"),
  "n": ({"n": 0}, "n"),
  "too many choices": ({"n": 129}, "n"),
  "temperature": ({"temperature": -1}, "temperature"),
  "temperature is text": ({"temperature": "hot"}, "temperature"),
  "temperature is tiny": ({"temperature": 1e-30}, None),
  "top_p": ({"top_p": 0}, "top_p"),
  "logprobs": ({"logprobs": 21}, "logprobs"),
  "stop is empty": ({"stop": ""}, "stop"),
  "too many stops": ({"stop": [f"x{i}" for i in range(65)]}, "stop"),
  "stops too long": ({"stop": ["a" * 1000, "b" * 25]}, "stop"),
  "too many stop ids": ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
  "too many biases": ({"logit_bias": {f"{i}": 1 for i in range(321)}}, "logit_bias"),
  "stop": ({"stop": [1]}, "stop"),
  "bias": ({"logit_bias": {"x": 1}}, "logit_bias"),
  "bias too large": ({"logit_bias": {"1": 101}}, "logit_bias"),
  "unknown": ({"temprature": 1}, "temprature"),
  "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
  "best_of": ({"best_of": 3}, "best_of"),
  "suffix": ({"suffix": "x"}, "suffix"),
  "format": ({"response_format": {"type": "json_object"}}, "response_format"),
  "stream_options": ({"stream_options": {"x": 1}}, "stream_options.x"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_refused(running, name):
  body, param = BAD[name]
  body = {"prompt": PROMPT, **body}
  before = len(running.engine.submitted)
  error = error_of(running.post("/v1/completions", body), 400)
  assert error["param"] == param and error["type"] == "invalid_request_error"
  assert len(running.engine.submitted) == before


def test_neutral_and_harmless_fields_are_accepted(running):
  answer = running.post(
    "/v1/completions",
    {
      "prompt": PROMPT,
      "frequency_penalty": 0.0,
      "presence_penalty": None,
      "best_of": 1,
      "user": "a",
      "metadata": {"a": "b"},
    },
  )
  assert answer.status_code == 200
  assert answer.headers["x-ignored-fields"] == "metadata, user"


def test_unknown_models_are_not_found(running):
  error = error_of(running.post("/v1/completions", {"model": "x", "prompt": "a"}), 404)
  assert error["code"] == "model_not_found" and error["param"] == "model"
