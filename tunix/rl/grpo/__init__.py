"""Group-relative policy optimization: GRPO, Dr.GRPO, DAPO, RLOO."""
