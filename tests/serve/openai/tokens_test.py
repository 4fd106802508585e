import pytest

from tests.generate.tokenizer_adapter_test import processed
from tests.serve.fake_engine import FakeEngine, logprob
from tests.serve.serving import error_of, server
from tunix.generate.tokenizer_adapter import TokenizerAdapter

PATH = "/inference/v1/generate"
IDS = [60, 61, 62]
DRAWN = [40 + (183 + 7 * i) % 400 for i in range(4)]


@pytest.fixture(scope="module")
def running():
  with server() as made:
    yield made


def test_tokenize_and_back(running):
  tokenizer = running.engine.tokenizer
  text = "<think> hello there"
  body = running.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
  assert body["tokens"] == tokenizer.encode(text)
  assert body["count"] == len(body["tokens"]) and body["max_model_len"] == 256
  assert "".join(body["token_strs"]) == text
  back = running.post("/detokenize", {"tokens": body["tokens"]}).json()
  assert back == {"prompt": text}
  messages = [{"role": "user", "content": "a"}]
  chat = running.post("/tokenize", {"messages": messages}).json()
  assert chat["tokens"] == tokenizer.apply_chat_template(messages, tokenize=True)
  for path, bad in (
    ("/tokenize", {"prompt": 3}),
    ("/tokenize", {"messages": 3}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {}),
  ):
    error_of(running.post(path, bad), 400)


@pytest.mark.parametrize(
  "kind, add_bos",
  [("adds", None), ("adds", False), ("adds none", True), ("none", None)],
)
def test_a_plain_prompt_begins_with_bos_as_in_training(kind, add_bos):
  tokenizer = TokenizerAdapter(
    processed(kind), bos_token="<s>", eos_token="</s>", add_bos=add_bos
  )
  bare = tokenizer.encode("hello")
  with server(FakeEngine(tokenizer)) as made:
    for text, special in (("hello", True), ("<s>hello", True), ("hello", False)):
      ids = tokenizer.tokenize(text, add_eos=False).tolist() if special else bare
      body = {"prompt": text, "add_special_tokens": special}
      assert made.post("/tokenize", body).json()["tokens"] == ids
      body |= {"max_tokens": 1, "return_token_ids": True}
      (choice,) = made.post("/v1/completions", body).json()["choices"]
      assert choice["prompt_token_ids"] == ids
    assert ids == bare


def test_what_clients_ask_of_the_tokenizer(running):
  info = running.get("/tokenizer_info").json()
  assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None
  assert info["pad_token"] == "<pad>" and "im_start" in info["chat_template"]


def test_tokens_in_and_out_as_the_renderers_client_reads_them(running):
  params = {
    "max_tokens": 4,
    "logprobs": 1,
    "stop_token_ids": [3],
    "temperature": 1.0,
    "skip_special_tokens": False,
    "detokenize": False,
    "extra_args": {},
    "repetition_penalty": 1.0,
  }
  body = {"model": "default", "token_ids": IDS, "sampling_params": params}
  answer = running.post(PATH, {**body, "cache_salt": "7", "request_id": "abc"})
  assert answer.headers["x-ignored-fields"] == "cache_salt, sampling_params.extra_args"
  content = answer.json()
  assert content["request_id"] == "abc" and content["usage"]["prompt_tokens"] == 3
  choice = content["choices"][0]
  assert choice["token_ids"] == DRAWN and choice["finish_reason"] == "length"
  assert "text" not in choice
  entries = choice["logprobs"]["content"]
  assert [x["token"] for x in entries] == [f"token_id:{t}" for t in DRAWN]
  assert [x["token_id"] for x in entries] == DRAWN
  assert [x["logprob"] for x in entries] == pytest.approx([logprob(t) for t in DRAWN])
  assert choice["sampling_logprobs"] == [x["logprob"] for x in entries]
  assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 4}]


def test_text_mode_prompt_logprobs_and_streams(running):
  body = {
    "token_ids": IDS,
    "output_mode": "text",
    "return_token_ids": True,
    "sampling_params": {"max_tokens": 4, "prompt_logprobs": 0, "n": 2, "logprobs": 0},
  }
  content = running.post(PATH, body).json()
  assert content["prompt_token_ids"] == IDS and content["output_mode"] == "text"
  assert content["prompt_logprobs"][0] is None
  assert list(content["prompt_logprobs"][1]) == ["61"]
  decode = running.engine.tokenizer.decode
  assert content["choices"][0]["text"] == decode(DRAWN)
  entries = content["choices"][0]["logprobs"]["content"]
  assert "".join(x["token"] for x in entries) == decode(DRAWN)
  stream = {**body, "stream_options": {"include_usage": True}}
  events = running.events(PATH, stream)
  assert events[0]["prompt_token_ids"] == IDS and events[0]["prompt_logprobs"]
  assert events[-1]["usage"] == content["usage"]
  for choice in content["choices"]:
    parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
    assert [token for p in parts for token in p["token_ids"]] == choice["token_ids"]
    assert "".join(p["text"] for p in parts) == choice["text"]


@pytest.mark.parametrize(
  ("change", "param"),
  [
    ({"token_ids": None}, "token_ids"),
    ({"token_ids": []}, "prompt"),
    ({"token_ids": [1.5]}, "token_ids"),
    ({"sampling_params": None}, "sampling_params"),
    ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ({"sampling_params": {"guess": 1}}, "sampling_params.guess"),
    ({"sampling_params": {"min_tokens": 2}}, "sampling_params.min_tokens"),
    ({"features": {"a": 1}}, "features"),
    ({"output_mode": "sound"}, "output_mode"),
  ],
)
def test_bad_fields_are_refused(running, change, param):
  body = {"token_ids": IDS, "sampling_params": {}, **change}
  assert error_of(running.post(PATH, body), 400)["param"] == param
