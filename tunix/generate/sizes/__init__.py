"""Sizes of requests: buckets, and what memory holds."""
