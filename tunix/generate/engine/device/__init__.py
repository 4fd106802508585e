"""The compiled programs of a launch and of speculative decoding; `run` calls them."""
