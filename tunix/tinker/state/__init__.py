"""State that the Tinker service keeps in its root."""
