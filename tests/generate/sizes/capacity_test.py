"""What cannot fit is refused by arithmetic."""

import pytest

from tunix.generate.sizes import capacity

MEMORY = capacity.memory_bytes()


def test_what_fits_passes():
  capacity.require("n", 3, lambda n: n * MEMORY // 3, "x")


@pytest.mark.parametrize(
  ("value", "bytes_of", "says"),
  [
    (10**9, lambda n: n * (MEMORY // 5), "n is 1000000000: x would .* at most 5 fits"),
    # Rounded up to powers of two, as rows are.
    (100, lambda n: (1 << (n - 1).bit_length()) * (MEMORY // 20), "at most 16 fits"),
    (2, lambda n: n + MEMORY, "not even the smallest fits"),
  ],
)
def test_the_largest_that_fits_is_said(value, bytes_of, says):
  with pytest.raises(ValueError, match=says):
    capacity.require("n", value, bytes_of, "x")
