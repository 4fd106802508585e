"""Environments: episodes of several turns between the policy and the user's code."""
