"""Arrays as JSON, also from a sender that is not trusted, and as bytes."""

import base64
import struct
import zlib

import numpy as np
import pytest

from tunix.utils import array_codec


def sent(data, shape, kind="|u1"):
  text = base64.b64encode(zlib.compress(data)).decode()
  return {"__array__": [kind, shape, text]}


def test_arrays_keep_bits_and_shapes():
  for array in (np.zeros((0, 3)), np.array(5, np.int8), np.arange(6.0).reshape(2, 3)):
    again = array_codec.from_json({"x": [array_codec.to_json(array)]})["x"][0]
    assert again.dtype == array.dtype and again.shape == array.shape
    assert (again == array).all()


def test_a_cut_stream_of_an_empty_array_is_refused():
  cut = {"__array__": ["|u1", [0], base64.b64encode(zlib.compress(b"")[:3]).decode()]}
  with pytest.raises(ValueError, match="shape"):
    array_codec.from_json(cut)


@pytest.mark.parametrize(
  "data, shape", [(bytes(9), [8]), (bytes(7), [8]), (bytes(8), [-1]), (b"", [0, -1])]
)
def test_bytes_that_do_not_fit_the_shape_are_refused(data, shape):
  with pytest.raises(ValueError, match="shape"):
    array_codec.from_json(sent(data, shape))


def test_bytes_after_the_shape_are_not_expanded(monkeypatch):
  sizes = []

  class Watched:
    def __init__(self):
      self._stream = make()
      self.eof = False

    def decompress(self, data, *limit):
      out = self._stream.decompress(data, *limit)
      sizes.append(len(out))
      return out

  make = zlib.decompressobj
  monkeypatch.setattr(zlib, "decompressobj", Watched)
  with pytest.raises(ValueError, match="shape"):
    array_codec.from_json(sent(bytes(10**6), [8]))
  assert sizes == [9]


def test_arrays_together_have_a_limit():
  rows = [sent(bytes(100), [100])] * 3
  assert len(array_codec.from_json(rows, 300)) == 3
  with pytest.raises(ValueError, match="more than 299 bytes"):
    array_codec.from_json(rows, 299)


def test_both_forms_are_those_of_earlier_versions():
  arrays = {"a": np.array([[1, -2]], "<i2"), "b": np.array(0.5)}
  data = (
    b'F\0\0\0{"meta": {"n": 1}, "arrays": [["a", "<i2", [1, 2]], ["b", "<f8", []]]}'
    b"\x01\0\xfe\xff\0\0\0\0\0\0\xe0?"
  )
  assert array_codec.to_bytes({"n": 1}, arrays) == data
  meta, again = array_codec.from_bytes(data)
  assert meta == {"n": 1} and [*again] == ["a", "b"]
  text = {"__array__": ["<i2", [1, 2], "eAFjZPj3HwADAwH/"]}
  for got in (again["a"], array_codec.from_json(text)):
    assert got.dtype == "<i2" and got.tolist() == [[1, -2]]
  assert again["b"] == 0.5
  for length in range(len(data)):
    with pytest.raises((ValueError, struct.error)):
      array_codec.from_bytes(data[:length])
