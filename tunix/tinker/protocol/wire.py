"""Requests and results as the SDK sends and reads them: JSON and Protocol Buffers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tunix.tinker.errors import NotServedError, TinkerError
from tunix.tinker.learning.data import Row
from tunix.tinker.learning.sparse import Sparse
from tunix.tinker.protocol import fields, protobuf
from tunix.tinker.protocol.results import Result
from tunix.utils import checks

# Numbers of the protocol's data types, and the types of JSON.
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_JSON_DTYPES = {"float32": np.dtype(np.float32), "int64": np.dtype(np.int64)}
_FLOAT32, _INT64 = 1, 2
_INT32 = 2**31 - 1  # ids, and targets of losses
_STOP_REASONS = {"stop": 0, "length": 1}
_RECORD = "ArrayRecord"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientRequest:
  """A forward or forward-backward request.

  Attributes:
    model, number: id of the model, number of the request.
    loss, config: name and configuration of the loss.
    backward: False for a forward pass.
    read_rows: returns the rows; it raises TinkerError for wrong data.
  """

  model: str
  number: int
  loss: str
  config: Any
  backward: bool
  read_rows: Callable[[], list[Row]]


def gradient_from_proto(body: bytes) -> GradientRequest:
  """Reads a message ForwardBackwardRequest.

  Raises:
    TinkerError: the body is no such message.
  """
  model, number, loss, forward_only = "", 0, "", False
  rows: list[bytes] = []
  old: dict[str, object] = {}
  new: dict[str, object] = {}
  for field, value in protobuf.fields(body):
    if field == 1:
      model = protobuf.as_text(value)
    elif field == 2:
      number = protobuf.as_int(value)
    elif field == 3:
      rows.append(protobuf.as_bytes(value))
    elif field == 4:
      loss = protobuf.as_text(value)
    elif field == 5:
      key, entry = _entry(value)
      old[key] = protobuf.as_double(entry)
    elif field == 6:
      forward_only = bool(protobuf.as_int(value))
    elif field == 7:
      key, entry = _entry(value)
      new[key] = _config_value(protobuf.as_bytes(entry))
  return GradientRequest(
    model=model,
    number=number,
    loss=loss,
    config=new or old,
    backward=not forward_only,
    read_rows=lambda: [_row_from_proto(x) for x in rows],
  )


def _entry(value: protobuf.Value) -> tuple[str, protobuf.Value]:
  """Returns key and value of an entry of a map."""
  parts = dict(protobuf.fields(protobuf.as_bytes(value)))
  return protobuf.as_text(parts.get(1, b"")), parts.get(2, b"")


def _config_value(message: bytes) -> object:
  for field, value in protobuf.fields(message):
    return protobuf.as_double(value) if field == 1 else protobuf.as_text(value)
  return 0.0


def _row_from_proto(message: bytes) -> Row:
  tokens: list[np.ndarray] = []
  inputs: dict[str, np.ndarray | Sparse] = {}
  for field, value in protobuf.fields(message):
    if field == 1:
      for kind, chunk in protobuf.fields(protobuf.as_bytes(value)):
        if kind != 1:
          raise _no_media()
        parts = dict(protobuf.fields(protobuf.as_bytes(chunk)))
        tokens.append(_array(protobuf.as_bytes(parts.get(1, b"")), _DTYPES[3]))
    elif field == 2:
      name, tensor = _entry(value)
      inputs[name] = _tensor_from_proto(protobuf.as_bytes(tensor))
  return _row(tokens, inputs)


def _tensor_from_proto(message: bytes) -> np.ndarray | Sparse:
  dense, dtype, shape, sparse = b"", 0, [], None
  for field, value in protobuf.fields(message):
    if field == 1:
      dense = protobuf.as_bytes(value)
    elif field == 2:
      sparse = dict(protobuf.fields(protobuf.as_bytes(value)))
    elif field == 3:
      dtype = protobuf.as_int(value)
    elif field == 4:
      shape += protobuf.integers(value)
  if dtype not in _DTYPES:
    raise TinkerError(
      f"a tensor has the dtype {dtype}; expected 1 (float32), 2 (int64) or 3 (int32). "
      "Convert it"
    )
  if sparse is not None:

    def part(field, dtype):
      return _array(protobuf.as_bytes(sparse.get(field, b"")), _DTYPES[dtype])

    return Sparse(part(1, dtype), part(2, _INT64), part(3, _INT64), shape)
  return _shaped(_array(dense, _DTYPES[dtype]), shape or None)


def _array(data: bytes, dtype: np.dtype) -> np.ndarray:
  if len(data) % dtype.itemsize:
    raise TinkerError(
      f"an array has {len(data)} bytes; expected a multiple of {dtype.itemsize}, the "
      f"size of {dtype.name}. Check the client"
    )
  return np.frombuffer(data, dtype)


def _shaped(values: np.ndarray, shape: Any) -> np.ndarray:
  if shape is None:
    return values
  whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
  if not whole or math.prod(shape) != values.size:
    raise TinkerError(
      f"a tensor has the shape {str(shape)[:80]} and {values.size} values; expected a "
      "list of sizes with this product. Check the client"
    )
  return values.reshape(shape)


def _row(tokens: list[np.ndarray], inputs: Mapping[str, np.ndarray | Sparse]) -> Row:
  flat = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
  # Sorted, so that a repeated request has equal bytes.
  return Row(tokens=flat, inputs=dict(sorted(inputs.items())))


def _no_media() -> NotServedError:
  return NotServedError(
    "model_input has an image or audio chunk, which this service does not take; "
    "expected chunks of tokens. Leave it out"
  )


def gradient_from_json(body: Mapping[str, Any], backward: bool) -> GradientRequest:
  """Reads the JSON form of a forward or forward-backward request.

  Raises:
    TinkerError: a field is missing or has another type.
  """
  content = body.get("forward_backward_input" if backward else "forward_input")
  if not isinstance(content, dict) or not isinstance(content.get("data"), list):
    raise TinkerError(
      "the body has no forward_backward_input (forward_input) with a list of data; "
      "expected one. Check the version of the SDK"
    )
  return GradientRequest(
    model=fields.text(body, "model_id"),
    number=fields.integer(body, "seq_id"),
    loss=str(content.get("loss_fn")),
    config=content.get("loss_fn_config"),
    backward=backward,
    read_rows=lambda: [_row_from_json(x) for x in content["data"]],
  )


def _row_from_json(datum: object) -> Row:
  if not isinstance(datum, dict):
    raise TinkerError(f"a datum is {checks.type_of(datum)}; expected a JSON object")
  inputs = fields.table(datum, "loss_fn_inputs")
  return _row(
    [model_input(datum.get("model_input"))],
    {name: _tensor_from_json(name, x) for name, x in inputs.items()},
  )


def model_input(value: object) -> np.ndarray:
  """Returns the ids of a model input in JSON, int64 [N].

  Raises:
    TinkerError: the value has another form, or chunks without tokens.
  """
  chunks = value.get("chunks") if isinstance(value, dict) else None
  if not isinstance(chunks, list):
    raise TinkerError(
      "model_input has no list of chunks; expected one. Check the client"
    )
  parts = [np.zeros(0, np.int64)]
  for chunk in chunks:
    if not isinstance(chunk, dict) or "tokens" not in chunk:
      raise _no_media()
    parts.append(_numbers("tokens", chunk["tokens"], np.dtype(np.int64)))
  return np.concatenate(parts)


def _tensor_from_json(name: str, value: Any) -> np.ndarray | Sparse:
  kind = value.get("dtype") if isinstance(value, dict) else None
  dtype = _JSON_DTYPES.get(kind) if isinstance(kind, str) else None
  if dtype is None:
    raise TinkerError(
      f"loss_fn_inputs.{name} has no dtype float32 or int64; expected one. Check the "
      "client"
    )
  numbers = _numbers(name, value.get("data"), dtype)
  if value.get("sparse_crow_indices") is None:
    return _shaped(numbers, value.get("shape"))
  starts, columns = (
    _numbers(field, value.get(field), _JSON_DTYPES["int64"])
    for field in ("sparse_crow_indices", "sparse_col_indices")
  )
  return Sparse(numbers, starts, columns, value.get("shape"))


def _numbers(name: str, values: object, dtype: np.dtype) -> np.ndarray:
  try:
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
      raise ValueError("no numbers")
    array = np.asarray(values)
    with np.errstate(all="ignore"):  # of values that are refused below, or as infinite
      made = array.astype(dtype)
  except (TypeError, ValueError, OverflowError) as error:
    raise TinkerError(
      f"{name} holds other values than numbers; expected a flat list of numbers"
    ) from error
  if dtype.kind == "i":
    wrong = (made != array) | (array < -_INT32) | (array > _INT32)
    if wrong.any():
      raise TinkerError(
        f"{name} has the value {array[wrong][0]}; expected integers that fit 32 bits. "
        "Check the client"
      )
  return made


# Results.


def is_sample(result: Result) -> bool:
  """Returns True for the result of a sampling request."""
  return "tokens" in result.arrays


def to_proto(result: Result) -> bytes:
  """Returns a message ForwardBackwardOutput or SampleResponse."""
  return _sample_to_proto(result) if is_sample(result) else _output_to_proto(result)


def has_proto(result: Result) -> bool:
  """Returns True for results that the SDK reads as Protocol Buffers only."""
  return result.error is None and "logprobs" in result.arrays


def _output_to_proto(result: Result) -> bytes:
  out, start = protobuf.data(1, _RECORD), 0
  rows = result.per_row()
  widths = [x.shape[1] if x.ndim == 2 else 0 for x in rows["logprobs"]]
  # The rows of a record have equal shapes but for their lengths.
  for width, group in itertools.groupby(widths):
    part = slice(start, start + len(list(group)))
    start = part.stop
    record = {name: values[part] for name, values in rows.items()}
    out += protobuf.data(2, _record_to_proto(record, width))
  for name, value in result.values["metrics"].items():
    out += protobuf.data(3, protobuf.data(1, name) + protobuf.double(2, value))
  return out


def _record_to_proto(rows: Mapping[str, list[np.ndarray]], width: int) -> bytes:
  """Returns a message ArrayRecord of rows [N], or [N, width] if the width is not 0."""
  record = protobuf.data(1, _RECORD)
  for name, values in rows.items():
    offsets = np.cumsum([0, *(x.size * 4 for x in values)], dtype=np.int64)
    tensor = protobuf.data(1, np.concatenate(values).astype("<f4").tobytes())
    tensor += protobuf.data(2, offsets.astype("<i8").tobytes())
    tensor += protobuf.number(3, _FLOAT32) + protobuf.number(4, width)
    entry = protobuf.data(1, name) + protobuf.data(2, tensor)
    record += protobuf.data(2, entry)
  return record + protobuf.number(3, len(rows["logprobs"]))


def _sample_to_proto(result: Result) -> bytes:
  arrays, out = result.arrays, b""
  start = 0
  for length, reason in zip(arrays["lengths"], result.values["stop_reasons"]):
    part = slice(start, start + int(length))
    start = part.stop
    sequence = protobuf.number(1, _STOP_REASONS[reason])
    sequence += protobuf.data(2, arrays["tokens"][part].astype("<i4").tobytes())
    sequence += protobuf.data(3, arrays["logprobs"][part].astype("<f4").tobytes())
    if "topk_ids" in arrays:
      top = arrays["topk_ids"][part], arrays["topk_logprobs"][part]
      sequence += protobuf.data(4, _topk_to_proto(*top))
    out += protobuf.data(1, sequence)
  if "prompt_logprobs" in arrays:
    out += protobuf.data(2, arrays["prompt_logprobs"].astype("<f4").tobytes())
  if "topk_prompt_ids" in arrays:
    top = arrays["topk_prompt_ids"], arrays["topk_prompt_logprobs"]
    out += protobuf.data(3, _topk_to_proto(*top))
  return out + protobuf.number(4, result.values["cached_tokens"])


def _topk_to_proto(ids: np.ndarray, logps: np.ndarray) -> bytes:
  length, k = ids.shape
  return (
    protobuf.data(1, ids.astype("<i4").tobytes())
    + protobuf.data(2, logps.astype("<f4").tobytes())
    + protobuf.number(3, k)
    + protobuf.number(4, length)
  )


def to_json(result: Result) -> dict[str, Any]:
  """Returns a result as JSON values."""
  if result.error is not None:
    return {"error": result.error, "category": result.category}
  if not has_proto(result):
    values = dict(result.values)
    if "metrics" in values:
      values["metrics"] = _finite(values["metrics"])
    return values
  per_row = result.per_row()
  if is_sample(result):
    return {
      "type": "sample",
      "sequences": [
        {
          "stop_reason": reason,
          "tokens": per_row["tokens"][i].tolist(),
          "logprobs": per_row["logprobs"][i].tolist(),
        }
        for i, reason in enumerate(result.values["stop_reasons"])
      ],
      "prompt_logprobs": _nan_to_none(result.arrays.get("prompt_logprobs")),
    }
  rows = [
    {name: _tensor_to_json(values[i]) for name, values in per_row.items()}
    for i in range(len(result.arrays["lengths"]))
  ]
  return {
    "loss_fn_output_type": _RECORD,
    "loss_fn_outputs": rows,
    "metrics": _finite(result.values["metrics"]),
  }


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the metrics that JSON can hold: a diverged model has NaN and infinity."""
  return {name: x for name, x in metrics.items() if math.isfinite(x)}


def _tensor_to_json(values: np.ndarray) -> dict[str, Any]:
  data = [x if math.isfinite(x) else None for x in values.ravel().tolist()]
  return {"data": data, "dtype": "float32", "shape": list(values.shape)}


def _nan_to_none(values: np.ndarray | None) -> list[float | None] | None:
  if values is None:
    return None
  return [None if math.isnan(x) else x for x in values.tolist()]
