"""Reinforcement learning: rollouts, rewards, learners."""
