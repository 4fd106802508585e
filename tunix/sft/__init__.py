"""Supervised fine-tuning: the trainer core and what it needs."""
