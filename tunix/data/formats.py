"""Compatibility module: other names of `tunix.data.jsonl` and `tunix.data.records`."""

from tunix.data.jsonl import JsonlRecords, place
from tunix.data.records import SFT

__all__ = ["FINE_TUNING", "JsonlRecords", "place"]

FINE_TUNING = SFT
