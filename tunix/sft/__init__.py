"""Supervised fine-tuning: the trainer core and what it needs.

Called, `tunix.sft(model=..., data=...)` runs the job sft. `help(tunix.dpo)` shows the
arguments that all jobs have.
"""
