"""Compatibility module: other names of `reading.jsonl` and `records`."""

from tunix.data.reading.jsonl import JsonlRecords, place
from tunix.data.records import SFT

__all__ = ["FINE_TUNING", "JsonlRecords", "place"]

FINE_TUNING = SFT
