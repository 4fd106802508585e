"""The short convolution by hand, across calls, segments and padding."""

import numpy as np

from tunix.ops.recurrences.short_conv import causal_conv

KERNEL = np.array([[1.0], [10.0], [100.0]])


def conv(values, **options):
  x = np.asarray(values, np.float32).reshape(1, -1, 1)
  y, last = causal_conv(x, KERNEL, **options)
  return np.asarray(y)[0, :, 0].tolist(), np.asarray(last)[0, :, 0].tolist()


def test_by_hand():
  assert conv([1, 2, 3]) == ([100, 210, 321], [2, 3])


def test_a_later_call_goes_on():
  y, last = conv([1, 2])
  again, _ = conv([3, 4], before=np.asarray(last).reshape(1, 2, 1))
  assert y + again == conv([1, 2, 3, 4])[0]


def test_a_segment_sees_no_other():
  starts = np.array([[True, False, True, False]])
  assert conv([1, 2, 3, 4], starts=starts)[0] == [100, 210, 300, 430]
  before = np.full((1, 2, 1), 5.0)
  assert conv([1], before=before, starts=np.array([[True]]))[0] == [100]


def test_padding_is_zeros_and_not_kept():
  left = np.array([[False, True, True]])
  assert conv([7, 1, 2], valid=left) == ([0, 100, 210], [1, 2])
  right = np.array([[True, False, False]])
  before = np.array([8.0, 9.0]).reshape(1, 2, 1)
  y, last = conv([1, 7, 7], valid=right, before=before)
  assert (y[0], last) == (198, [9, 1])
  none = np.zeros((1, 3), bool)
  assert conv([7, 7, 7], valid=none, before=before)[1] == [8, 9]
