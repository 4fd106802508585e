"""Reinforcement learning: rollouts, rewards, learners.

The formulas are in `tunix.ops`: `advantages`, `policy_gradient`, `importance`, `kl`.
"""
