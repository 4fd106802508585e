"""Environments of other libraries, one file for each."""
