"""Group-relative policy optimisation: GRPO, Dr.GRPO, DAPO, RLOO."""
