"""A launch from requests to results, with speculative decoding; the engine calls it."""
