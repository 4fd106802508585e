"""Protocol Buffers and JSON against the SDK's own messages."""

import numpy as np
import pytest

from tunix.serve.http.bodies import to_json
from tunix.tinker import client_data
from tunix.tinker.errors import NotServedError, TinkerError
from tunix.tinker.learning import data
from tunix.tinker.learning.sparse import Sparse
from tunix.tinker.protocol import protobuf, wire
from tunix.tinker.protocol.results import Result
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.work import operations

tinker = pytest.importorskip("tinker")
messages = pytest.importorskip("tinker.proto.tinker_public_pb2")
response_conv = pytest.importorskip("tinker.proto.response_conv")


def request(**changes):
  from tinker.proto.request_conv import forward_backward_request_to_proto
  from tinker.types.forward_backward_input import ForwardBackwardInput
  from tinker.types.forward_backward_request import ForwardBackwardRequest

  data = [
    tinker.Datum(
      model_input=tinker.ModelInput.from_ints([1, 2, 300]).append(
        tinker.EncodedTextChunk(tokens=[70000])
      ),
      loss_fn_inputs={
        "target_tokens": np.array([2, 300, 70000, 5]),
        "advantages": np.array([0.5, -1, 2, 0], np.float32),
        "logprobs": np.array([-1.0, -2, -3, -4], np.float32),
      },
    )
  ]
  given = {"data": data, "loss_fn": "ppo", **changes}
  return forward_backward_request_to_proto(
    ForwardBackwardRequest(
      forward_backward_input=ForwardBackwardInput(**given), model_id="m", seq_id=300
    )
  )


def test_requests_of_the_sdk():
  message = request(loss_fn_config={"clip_low_threshold": 0.5})
  read = wire.gradient_from_proto(message.SerializeToString())
  assert (read.model, read.number, read.loss, read.backward) == ("m", 300, "ppo", True)
  assert read.config == {"clip_low_threshold": 0.5}
  (row,) = read.read_rows()
  assert row.tokens.tolist() == [1, 2, 300, 70000]
  assert row.inputs["target_tokens"].tolist() == [2, 300, 70000, 5]
  assert row.inputs["advantages"].tolist() == [0.5, -1, 2, 0]
  message.forward_only = True
  assert not wire.gradient_from_proto(message.SerializeToString()).backward
  message.data[0].model_input.add().image.data = b"x"
  read = wire.gradient_from_proto(message.SerializeToString())
  with pytest.raises(NotServedError, match="image or audio"):
    read.read_rows()


def test_bodies_that_are_no_messages():
  good = request().SerializeToString()
  for cut in range(1, len(good), 7):
    try:
      wire.gradient_from_proto(good[:cut]).read_rows()
    except TinkerError:
      continue
  for body in (b"\xff" * 12, b"\x0b", b"\x0a\x05ab", b"\x09\x01"):
    with pytest.raises(TinkerError, match="no message of the protocol"):
      list(protobuf.fields(body))


def wide(sparse):
  """A datum with three targets for each of two positions, two of them listed."""
  made = {}
  for name, dtype in (("target_tokens", np.int64), ("weights", np.float32)):
    dense = np.array([[0, 0, 7], [0, 5, 0]], dtype)
    made[name] = tinker.TensorData.from_numpy(dense)
    if sparse:
      made[name] = tinker.TensorData(
        data=dense[dense != 0],
        dtype=made[name].dtype,
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[2, 1],
      )
  return tinker.Datum(tinker.ModelInput.from_ints([1, 2]), made)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("form", ["proto", "json"])
def test_several_targets_for_each_position(form, sparse):
  datum = wide(sparse)
  message = request(data=[datum], loss_fn="cross_entropy")
  read = wire.gradient_from_proto(message.SerializeToString())
  if form == "json":
    keys = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
    inputs = {
      name: {key: getattr(x, key) for key in keys}
      for name, x in datum.loss_fn_inputs.items()
    }
    sent = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": inputs}
    content = {"data": [sent], "loss_fn": "cross_entropy"}
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": content}
    read = wire.gradient_from_json(body, backward=True)
  given = read.read_rows()
  (row,) = data.check_rows(given, read.loss, vocab_size=10, max_tokens=9)
  (again,) = data.from_arrays(data.to_arrays([row]))
  for x in (row, again):
    assert x.inputs["target_tokens"].tolist() == [[0, 0, 7], [0, 5, 0]]
    assert x.inputs["weights"].tolist() == [[0, 0, 7], [0, 5, 0]]


@pytest.mark.parametrize(
  "changes",
  [
    {"shape": [2, 2]},  # a column beyond it
    {"shape": [2]},
    {"shape": [3, 3]},  # a row pointer too few
    {"columns": [2, 0], "starts": [0, 2, 2]},  # descending
    {"columns": [2, 2], "starts": [0, 2, 2]},  # twice
    {"columns": [2, -1]},
    {"starts": [0, 2, 1]},
    {"starts": [1, 1, 2]},
    {"starts": [0, 1, 3]},
    {"shape": [2, 2**63]},
  ],
)
def test_sparse_tensors_that_do_not_fit(changes):
  given = {"starts": [0, 1, 2], "columns": [2, 1], "shape": [2, 3]} | changes
  starts, columns = np.array(given["starts"]), np.array(given["columns"])
  with pytest.raises(TinkerError, match="a sparse tensor has the shape"):
    Sparse(np.array([7, 5]), starts, columns, given["shape"])


def test_a_short_message_that_names_a_huge_array_is_refused_by_its_size():
  zero = np.zeros(0, np.int64)
  huge = Sparse(zero, np.zeros(4, np.int64), zero, [3, 2**31 - 1])
  row = data.Row(tokens=np.ones(3, int), inputs={"target_tokens": huge})
  with pytest.raises(TinkerError, match=r"has 6442450941 targets; expected at most"):
    operations.gradient(
      [row], "cross_entropy", None, backward=True, vocab_size=9, limits=TinkerSettings()
    )


def test_results_of_several_targets_as_the_sdk_reads_them():
  """Rows of 0, 2, 2 and 1 targets: each run of equal numbers is a record."""
  arrays = {
    "lengths": np.array([2, 1, 2, 1], np.int32),
    "widths": np.array([0, 2, 2, 1], np.int32),
    "logprobs": -np.arange(9, dtype=np.float32),
  }
  result = Result(values={"metrics": {}}, arrays=arrays)
  read = response_conv.deserialize_forward_backward_output(wire.to_proto(result))
  rows = [x["logprobs"].tolist() for x in read.loss_fn_outputs]
  assert rows == [[0, -1], [[-2, -3]], [[-4, -5], [-6, -7]], [[-8]]]
  shapes = [x["logprobs"]["shape"] for x in wire.to_json(result)["loss_fn_outputs"]]
  assert shapes == [[2], [1, 2], [2, 2], [1, 1]]
  outputs = client_data.outputs_of(result).loss_fn_outputs
  assert [x["logprobs"].tolist() for x in outputs] == rows


def test_results_as_the_sdk_reads_them():
  result = Result(
    values={"metrics": {"loss:sum": 2.5}},
    arrays={
      "lengths": np.array([2, 1], np.int32),
      "logprobs": np.array([-1, -2, -3], np.float32),
    },
  )
  read = response_conv.deserialize_forward_backward_output(wire.to_proto(result))
  assert read.metrics == {"loss:sum": 2.5}
  rows = [x["logprobs"].tolist() for x in read.loss_fn_outputs]
  assert rows == [[-1, -2], [-3]]
  assert wire.to_json(result)["loss_fn_outputs"][1]["logprobs"]["data"] == [-3]


def test_samples_as_the_sdk_reads_them():
  arrays = {
    "lengths": np.array([2, 0, 1], np.int32),
    "tokens": np.array([5, 6, 7], np.int32),
    "logprobs": np.array([-1, -2, -3], np.float32),
    "topk_ids": np.arange(6, dtype=np.int32).reshape(3, 2),
    "topk_logprobs": -np.arange(6, dtype=np.float32).reshape(3, 2),
    "prompt_logprobs": np.array([np.nan, -4], np.float32),
    "topk_prompt_ids": np.array([[0, 0], [8, 9]], np.int32),
    "topk_prompt_logprobs": np.array([[-99999, -99999], [-1, -2]], np.float32),
  }
  result = Result(
    values={"stop_reasons": ["stop", "length", "stop"], "cached_tokens": 3},
    arrays=arrays,
  )
  read = response_conv.deserialize_sample_response(wire.to_proto(result))
  assert [x.tokens for x in read.sequences] == [[5, 6], [], [7]]
  assert [x.stop_reason for x in read.sequences] == ["stop", "length", "stop"]
  assert read.sequences[0].topk_logprobs == [[(0, 0), (1, -1)], [(2, -2), (3, -3)]]
  assert read.prompt_logprobs == [None, -4]
  assert read.topk_prompt_logprobs == [None, [(8, -1), (9, -2)]]
  assert read.prompt_cache_hit_tokens == 3
  assert wire.to_json(result)["sequences"][2]["tokens"] == [7]


def test_results_of_a_diverged_model_are_json():
  update = Result(values={"metrics": {"grad_norm": float("inf"), "learning_rate": 1.0}})
  assert to_json(wire.to_json(update)) == b'{"metrics":{"learning_rate":1.0}}'
  arrays = {
    "lengths": np.array([2], np.int32),
    "logprobs": np.array([np.nan, -1], np.float32),
  }
  rows = Result(values={"metrics": {"loss:sum": float("nan")}}, arrays=arrays)
  assert b'"data":[null,-1.0]' in to_json(wire.to_json(rows))


def test_ids_beyond_32_bits_are_refused():
  row = data.Row(tokens=np.array([1]), inputs={"target_tokens": np.array([2**32 + 5])})
  with pytest.raises(TinkerError, match="4294967301 in target_tokens"):
    data.check_rows([row], "cross_entropy", vocab_size=10, max_tokens=9)
