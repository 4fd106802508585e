"""Values of requests that no client should send."""

import numpy as np
import pytest

from tunix.generate.engine.config import EngineConfig
from tunix.tinker.errors import QuotaError, TinkerError
from tunix.tinker.learning import data, losses
from tunix.tinker.protocol import sampling_values, wire
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state.runs import Op
from tunix.tinker.work import operations, sampling

PROMPT, ENGINE = np.arange(4), EngineConfig(max_tokens=64)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_samples": 1_500_000}, "num_samples is 1500000; expected .* 1 to 1024"),
    ({"num_samples": 2.0}, "num_samples is 2.0"),
    ({"num_samples": True}, "num_samples is True"),
    ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1"),
    ({"topk_sample_logprobs": 21}, "topk_sample_logprobs is 21; .* from 0 to 20"),
    ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs is 21"),
    ({"sampling_params": {"stop": [1] * 17}}, "stop has 17 ids; expected at most 16"),
    ({"prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n is 4; expected .* 1 to 3"),
    ({"num_samples": 1024, "topk_sample_logprobs": 20}, "expected a product of at m"),
    ({"sampling_params": {"top_p": "x", "seed": [1]}}, "seed is .1.; expected an int"),
    ({"sampling_params": {"seed": 2**32}}, "seed is 4294967296; .* 0 to 4294967295"),
    ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
    ({"sampling_params": {"max_tokens": 10**9}}, "max_tokens is 1000000000"),
    ({"sampling_params": {"stop": {"a": 1}}}, "stop is .*expected a text, a list"),
    ({"sampling_params": {"stop": [1.5]}}, "stop is"),
    ({"sampling_params": {"stop": [2**40]}}, "stop is"),
    ({"sampling_params": {"stop": ["a", 1]}}, "stop is"),
    ({"sampling_params": [1]}, "sampling_params is"),
  ],
  ids=str,
)
def test_sampling_arguments_out_of_range(changes, message):
  with pytest.raises(TinkerError, match=message):
    sampling_values.check(changes, PROMPT, ENGINE, 2**20)


def test_only_the_first_part_of_a_request_has_alternatives_of_its_prompt():
  args = sampling_values.check({"topk_prompt_logprobs": 5}, PROMPT, ENGINE, 2**20)
  op = Op(kind="sample", args=args, arrays={"prompt": PROMPT})
  tops = [sampling._request("a", op, None, i, 16).top_logprobs for i in (0, 16)]
  assert tops == [5, 0]


def test_seeds_have_32_bits():
  given = {"sampling_params": {"seed": 2**32 - 1}}
  assert sampling_values.check(given, PROMPT, ENGINE, 2**20)["seed"] == 2**32 - 1


@pytest.mark.parametrize(
  ("stop", "ids", "texts"),
  [
    (None, None, ()),
    ([], (), ()),
    ("a", None, ("a",)),
    (["a", "b"], None, ("a", "b")),
    ([1, 2], (1, 2), ()),
  ],
)
def test_stops(stop, ids, texts):
  read = sampling_values.check(
    {"sampling_params": {"stop": stop}}, PROMPT, ENGINE, 2**20
  )
  assert (read["stop_ids"], read["stop_strings"]) == (ids, texts)


def test_a_request_is_drawn_by_the_rules_of_its_record():
  params = {"temperature": 0.5, "top_k": 3, "top_p": 0.4, "seed": 7, "stop": [4]}
  args = sampling_values.check({"sampling_params": params}, PROMPT, ENGINE, 2**20)
  rules = {"temperature": 0.5, "top_k": 3, "top_p": 0.4, "seed": 7, "eos_tokens": (4,)}
  for more in ({}, {"min_p": 0.2}):  # a rule that records of before do not have
    op = Op(kind="sample", args={**args, **more}, arrays={"prompt": PROMPT})
    assert (
      sampling._request("a:1", op, None).rules().items() >= {**rules, **more}.items()
    )


@pytest.mark.parametrize(
  "tokens", [[1.5], [2**31], [-(2**40)], [-(2**63)], [2**70], ["1"], [[1, 2]], None, 3]
)
def test_ids_are_integers_of_32_bits(tokens):
  with pytest.raises(TinkerError, match="tokens"):
    wire.model_input({"chunks": [{"tokens": tokens}]})


@pytest.mark.parametrize(
  ("name", "value", "message"),
  [
    ("target_tokens", 2.5, "target_tokens has the value 2.5; expected integers"),
    ("target_tokens", 1e30, "expected integers"),
    ("mask", -0.5, "mask has the value -0.5; expected numbers from 0 to 1"),
    ("mask", 2.0, "mask has the value 2.0"),
    ("weights", 1e300, "weights has the value .*expected finite numbers"),
    ("logprobs", float("-inf"), "logprobs has the value -inf; expected finite"),
    ("advantages", float("nan"), "advantages has the value nan; expected finite"),
  ],
)
def test_values_of_a_datum(name, value, message):
  inputs = {
    x: np.ones(2) for x in ("target_tokens", "weights", "logprobs", "advantages")
  }
  row = data.Row(tokens=PROMPT[:2], inputs=inputs | {name: np.array([1.0, value])})
  with pytest.raises(TinkerError, match=message):
    data.check_rows([row], "ppo", vocab_size=9, max_tokens=9)


@pytest.mark.parametrize(
  ("params", "message"),
  [
    ({"learning_rate": -1e-3}, "learning_rate is -0.001"),
    ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ({"beta1": 1}, "beta1 is 1"),
    ({"eps": "1"}, "eps is '1'"),
    ({"rate": 1}, "unexpected keyword"),
    ([1], "adam_params is .*expected an object"),
    (None, "adam_params is missing"),
  ],
)
def test_settings_of_an_update(params, message):
  with pytest.raises(TinkerError, match=message):
    operations.update(params)


@pytest.mark.parametrize(
  "config", [{"beta": -1}, {"beta": 10**400}, {"beta": True}, {"beta": "1"}, [1], "x"]
)
def test_the_configuration_of_a_loss(config):
  with pytest.raises(TinkerError, match=r"loss_fn_config.*expected"):
    losses.configured("dro", config)


@pytest.mark.parametrize(("count", "tokens"), [(3, 1), (1, 11), (2, 6)])
def test_rows_and_tokens_of_a_request_have_limits(count, tokens):
  limits = TinkerSettings(max_rows=2, max_request_tokens=10)
  row = data.Row(tokens=np.ones(tokens, int), inputs={})
  with pytest.raises(QuotaError, match=r"has \d+ (rows|tokens); expected at most"):
    operations.gradient(
      [row] * count, "ppo", None, backward=True, vocab_size=9, limits=limits
    )


@pytest.mark.parametrize("shape", [[3], [-1, -2], ["2"], [2.0], "2", {"a": 2}, 2])
def test_a_shape_is_a_list_of_sizes(shape):
  datum = {"dtype": "float32", "data": [0.5, 1.0], "shape": shape}
  request = {
    "model_id": "m",
    "seq_id": 1,
    "forward_input": {
      "data": [{"model_input": {"chunks": []}, "loss_fn_inputs": {"a": datum}}]
    },
  }
  with pytest.raises(TinkerError, match="a tensor has the shape"):
    wire.gradient_from_json(request, backward=False).read_rows()
