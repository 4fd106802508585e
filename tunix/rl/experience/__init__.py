"""Rollouts into training examples; the schedules call it."""
