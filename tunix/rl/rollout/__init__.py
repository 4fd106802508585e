"""Rollout engines: they turn prompts into completions while a policy is trained."""
