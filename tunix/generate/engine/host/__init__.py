"""What the host decides: order, pages, text. It touches no device."""
