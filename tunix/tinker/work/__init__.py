"""Queues requests of the Tinker service and runs them; `learning` computes updates."""
