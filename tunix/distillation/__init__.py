"""Distillation: trains a student on the token distributions of a teacher."""
