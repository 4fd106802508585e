"""Supervised fine-tuning: the trainer core and what it needs.

Called, `tunix.sft(model=..., data=...)` runs the job sft; see `tunix.cli.one_call`.
"""
