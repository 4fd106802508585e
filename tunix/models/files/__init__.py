"""Files of weights, read and checked without running code from them."""
