"""Values of requests that no client should send."""

import numpy as np
import pytest

from tunix.tinker import sampling_values, wire
from tunix.tinker.errors import TinkerError

PROMPT = np.arange(4)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_samples": 1_500_000}, "num_samples is 1500000; expected .* 1 to 1024"),
    ({"num_samples": 2.0}, "num_samples is 2.0"),
    ({"num_samples": True}, "num_samples is True"),
    ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1"),
    ({"topk_sample_logprobs": 10**6}, "topk_sample_logprobs is 1000000"),
    ({"prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n is 4; expected .* 1 to 3"),
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
    sampling_values.check(changes, PROMPT, 64, 2**20)


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
  read = sampling_values.check({"sampling_params": {"stop": stop}}, PROMPT, 64, 2**20)
  assert (read["stop_ids"], read["stop_strings"]) == (ids, texts)


@pytest.mark.parametrize(
  "tokens", [[1.5], [2**31], [-(2**40)], [2**70], ["1"], [[1, 2]], None, 3]
)
def test_ids_are_integers_of_32_bits(tokens):
  with pytest.raises(TinkerError, match="tokens"):
    wire.model_input({"chunks": [{"tokens": tokens}]})


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
