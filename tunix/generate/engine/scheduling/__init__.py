"""Decisions of the host: order, pages, text. It touches no device."""
