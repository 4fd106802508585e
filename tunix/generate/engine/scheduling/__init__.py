"""Decisions of the host: order, pages, prefix cache, text. It touches no device."""
