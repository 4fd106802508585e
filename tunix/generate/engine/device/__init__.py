"""The compiled programs of a launch; `run` calls them.

`launch` also checks the draft tokens of speculative decoding.
"""
