"""Algorithms without a critic: GRPO and its variants, DAPO, RLOO, REINFORCE++."""
