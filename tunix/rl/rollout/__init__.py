"""Rollout engines: they turn prompts into completions while a policy is trained.

`local_clients` draws in this process. `remote_host` calls a host that samples for the
run, and sends new weights to it; `host` is that host.
"""
