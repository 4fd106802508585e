"""What the Tinker service keeps in its root."""
