"""Arrays as JSON, from a sender that is not trusted."""

import base64
import zlib

import numpy as np
import pytest

from tunix.utils import json_arrays


def sent(data, shape, kind="|u1"):
  text = base64.b64encode(zlib.compress(data)).decode()
  return {"__array__": [kind, shape, text]}


def test_arrays_keep_bits_and_shapes():
  for array in (np.zeros((0, 3)), np.array(5, np.int8), np.arange(6.0).reshape(2, 3)):
    again = json_arrays.decoded({"x": [json_arrays.encoded(array)]})["x"][0]
    assert again.dtype == array.dtype and again.shape == array.shape
    assert (again == array).all()


@pytest.mark.parametrize(
  "data, shape", [(bytes(9), [8]), (bytes(7), [8]), (bytes(8), [-1]), (b"", [0, -1])]
)
def test_bytes_that_do_not_fit_the_shape_are_refused(data, shape):
  with pytest.raises(ValueError, match="shape"):
    json_arrays.decoded(sent(data, shape))


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
    json_arrays.decoded(sent(bytes(10**6), [8]))
  assert sizes == [9]


def test_arrays_together_have_a_limit():
  rows = [sent(bytes(100), [100])] * 3
  assert len(json_arrays.decoded(rows, 300)) == 3
  with pytest.raises(ValueError, match="more than 299 bytes"):
    json_arrays.decoded(rows, 299)
