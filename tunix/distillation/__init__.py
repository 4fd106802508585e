"""Distillation: a student learns from what a teacher says of every token."""
