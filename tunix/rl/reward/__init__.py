"""Rewards of completions, in this process and in workers."""
